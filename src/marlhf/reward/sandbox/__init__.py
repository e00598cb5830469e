"""Runs untrusted Python programs on Linux, with nothing to install.

    with Sandbox() as sandbox:
        [outcome] = sandbox.run([Program("print(int(input()) + 1)", stdin="41")])
    assert (outcome.status, outcome.stdout) == ("ok", "42\\n")

A program is a process that a fork server made, and several walls stand around it: namespaces (its
own root folder with nothing but Python's libraries in it, its own network without a way out, its
own process ids and users), Landlock, a list of allowed system calls, limits on memory, output,
files, threads and time, an empty environment, no descriptor but its own. Every process has a
state of its own: nothing written is there for the next. The expected answers never go in; what
comes out is text and JSON, and the caller judges it.

What it does not cover:

- Holes in the kernel itself. The allowed calls are some 130 plain ones, but a program that finds
  a hole in one of them is out. Where programs come from somebody who means harm, use a virtual
  machine around all of it.
- Side channels: timing, caches, how busy the machine is, the size of its memory.
- Python's libraries, installed packages and the system's shared libraries can be read.
- CPU time and memory bandwidth are shared with the host: up to `workers` programs, with as many
  threads as they like, run at normal priority. Memory may reach `workers * (memory_mb + 64)` MiB
  (64 is the size of /tmp) above what the servers themselves take.
- Without namespaces (`layers` says so) names, sizes and times of the host's files can be seen,
  though none can be opened or changed, and no file can be written at all.
- A program may print whatever it likes, and end with status 0 whenever it likes. A verdict must
  come from comparing its output, as `Outcome` leaves it to the caller.
"""

from marlhf.reward.sandbox.pool import PRELOAD, Sandbox, SandboxUnavailable, SandboxWarning
from marlhf.reward.sandbox.protocol import Call, Case, Outcome, Program, Status, Suite
from marlhf.reward.sandbox.wire_format import Opaque

__all__ = [
    "PRELOAD",
    "Call",
    "Case",
    "Opaque",
    "Outcome",
    "Program",
    "Sandbox",
    "SandboxUnavailable",
    "SandboxWarning",
    "Status",
    "Suite",
]
