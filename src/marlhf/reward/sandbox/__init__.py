"""Runs untrusted Python programs on Linux, with nothing to install.

    with Sandbox() as sandbox:
        [outcome] = sandbox.run([Program("print(int(input()) + 1)", stdin="41")])
    assert (outcome.status, outcome.stdout) == ("ok", "42\\n")

A fork server starts one process per program, confined by several layers: namespaces (a root folder
with only Python's libraries, a network without interfaces, separate process ids and users),
Landlock, a list of allowed system calls, limits on memory, output, files, threads and time, an
empty environment, and no open descriptors but its own. Nothing that a program writes is visible to
the next. The expected answers never enter the sandbox; it returns text and JSON, and the caller
judges them.

What it does not cover:

- Kernel vulnerabilities. About 130 ordinary system calls are allowed, but a program that exploits
  a bug in one of them escapes. Against deliberate attackers, add a virtual machine.
- Side channels: timing, caches, the load of the machine, the size of its memory.
- Python's libraries, installed packages and the system's shared libraries can be read.
- CPU time and memory bandwidth are shared with the host: up to `workers` programs, each with up to
  256 threads, run at normal priority. Memory may reach `workers * (memory_mb + 64)` MiB
  (64 is the size of /tmp) above what the servers themselves take.
- Without namespaces (see `layers`) a program can list names, sizes and times of the host's files,
  but it cannot open or change them, and it cannot write any file.
- A program can print anything and exit with status 0 at any time. Only the comparison of its
  output with the expected one is a verdict, and that is left to the caller.
"""

from marlhf.reward.sandbox.pool import PRELOAD, Sandbox, SandboxUnavailable, SandboxWarning
from marlhf.reward.sandbox.protocol import Call, Case, Opaque, Outcome, Program, Status, Suite

# fmt: off
__all__ = [
    "PRELOAD", "Call", "Case", "Opaque", "Outcome", "Program", "Sandbox", "SandboxUnavailable",
    "SandboxWarning", "Status", "Suite",
]
# fmt: on
