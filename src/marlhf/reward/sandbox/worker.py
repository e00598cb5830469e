"""The host's end of one fork server: starting it, and following the program it runs."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlhf.errors import MarlhfError
from marlhf.reward.sandbox import kernel
from marlhf.reward.sandbox.protocol import Case, Outcome, Suite
from marlhf.reward.sandbox.wire_format import decode

START_SECONDS = 60.0
COMPILE_SECONDS = 5.0
"""Added to a program's own time until it has compiled: the fork and a busy machine are in it."""
GRACE_SECONDS = 10.0
"""How long a killed program may take to be gone before its server is given up."""
ERROR_BYTES = 8192

# The package's own name without its __init__ files, which would load torch into the server.
_BOOT = """
import json, sys, types
settings = json.loads(sys.argv[1])
for name, folder in settings["folders"].items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from marlhf.reward.sandbox.server import main
main(settings)
"""


class WorkerDied(MarlhfError, RuntimeError):
    """The fork server is gone."""


class Worker:
    """A fork server: one program at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        here = Path(__file__).parent
        folders = {"marlhf.reward.sandbox": here, "marlhf.reward": here.parent}
        folders["marlhf"] = here.parent.parent
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {"socket": theirs.fileno(), "host": os.getpid()}
        told = {**settings, **own, "folders": {name: str(path) for name, path in folders.items()}}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-B", "-X", "utf8", "-c", _BOOT, json.dumps(told)],
                env={**single, "MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )

    def layers(self) -> dict[str, bool | str]:
        """What the server has put up, once it has. OSError with its reason where it could not."""
        if not _ready(self.socket.fileno(), START_SECONDS):
            raise OSError(f"no answer in {START_SECONDS:.0f} s")
        answer = json.loads(self.socket.recv(65536) or b'{"failed": ""}')
        if "failed" in answer:
            self.process.wait(GRACE_SECONDS)
            self._said.seek(0)
            said = self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise OSError(answer["failed"] or f"its server ended with {said or 'no word'}")
        self._said.close()
        return answer["layers"]

    def start(self, files: list[int], seconds: float) -> bool:
        """Ask for a process with these descriptors; False where the server is dead."""
        try:
            socket.send_fds(self.socket, [json.dumps({"seconds": seconds}).encode()], files)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """The server sees its socket closed and leaves, with whatever it runs."""
        with suppress(OSError):  # for a forked copy of us as well, which would keep it open
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._said.close()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def forget(self) -> None:
        """In a forked copy of the host: let go, and leave the server to its owner."""
        self.socket.close()
        self._said.close()


@dataclass
class Job:
    """A suite on its way: outcomes so far, and what its first program compiled."""

    suite: Suite
    outcomes: list[Outcome] = field(default_factory=list)
    code: int | None = None
    deaths: int = 0

    @property
    def case(self) -> Case:
        return self.suite.cases[len(self.outcomes)]

    @property
    def done(self) -> bool:
        n, last = len(self.outcomes), self.outcomes[-1] if self.outcomes else None
        stop = last is not None and last.status != "ok" and self.suite.stop_early
        return n == len(self.suite.cases) or stop

    def close(self) -> None:
        if self.code is not None:
            os.close(self.code)
            self.code = None


class Run:
    """One process of one program, from the request to its outcome."""

    def __init__(self, worker: Worker, job: Job, seconds: float, output_bytes: int) -> None:
        self.worker, self.job = worker, job
        self.seconds, self.output_bytes = seconds, output_bytes
        self.began = time.monotonic()
        self.deadline = self.began + seconds + COMPILE_SECONDS
        self.taken = 0.0
        self.killed: str | None = None
        self.exit: int | None = None
        self.pidfd: int | None = None
        self.status, self.stdout, self.stderr, self.report = (bytearray() for _ in range(4))
        self.pipes: dict[int, bytearray] = {}
        task = {"source": job.suite.source, "calls": job.case.wire()}
        source = _memory_file(json.dumps(task).encode())
        stdin = _memory_file(job.case.input())
        code = kernel.memory_file(b"code") if job.code is None else job.code
        ends = [self._pipe(buffer) for buffer in (self.stdout, self.stderr, self.status)]
        ends.append(self._pipe(self.report))
        stdout, stderr, status, report = ends
        self.code = code
        self.started = worker.start([source, stdin, stdout, stderr, status, report, code], seconds)
        for fd in (source, stdin, *ends):
            os.close(fd)

    def _pipe(self, buffer: bytearray) -> int:
        mine, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(mine, False)
        self.pipes[mine] = buffer
        return theirs

    def read(self, fd: int) -> bool:
        """Take what a pipe holds; False at its end."""
        buffer = self.pipes[fd]
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        buffer += data
        if buffer is self.status and b"C" in data and self.compiled:
            self.began, self.deadline = time.monotonic(), time.monotonic() + self.seconds
        elif buffer is not self.status and len(buffer) > self.output_bytes:
            del buffer[self.output_bytes :]
            self.kill("output_limit")
        return bool(data)

    def hear(self) -> bool:
        """Take a message of the server; True once the program has ended."""
        message, files, _, _ = socket.recv_fds(self.worker.socket, 4096, 1)
        if not message:
            raise WorkerDied
        if files:
            self.pidfd = files[0]
            if self.killed:
                self.kill(self.killed)
            return False
        self.taken = time.monotonic() - self.began
        self.exit = int(json.loads(message)["exit"])
        return True

    def kill(self, reason: str) -> None:
        self.killed = self.killed or reason
        self.deadline = time.monotonic() + GRACE_SECONDS
        if self.pidfd is not None:
            with suppress(ProcessLookupError):
                kernel.kill_process(self.pidfd)

    @property
    def compiled(self) -> bool:
        return bytes(self.status) == b"LC"

    def close(self) -> None:
        """Drop every descriptor; keep the compiled code if there is some."""
        for fd in self.pipes:
            os.close(fd)
        self.pipes.clear()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        if self.job.code is None:
            if self.compiled:
                kernel.seal(self.code)
                self.job.code = self.code
            else:
                os.close(self.code)

    def finish(self) -> Outcome:
        """Drain the pipes, whose other ends are closed by now, and judge."""
        for fd in list(self.pipes):
            while _ready(fd) and self.read(fd):
                pass
        self.close()
        return self._outcome()

    def _outcome(self) -> Outcome:
        said = self.stderr[-ERROR_BYTES:].decode("utf-8", "replace")
        printed = self.stdout.decode("utf-8", "replace")
        if not self.status.startswith(b"L"):
            reason = self.status[1:].decode("utf-8", "replace") or said or "it never started"
            return Outcome("sandbox_error", "", f"The program did not start: {reason}")
        if not self.compiled:
            reason = self.status[2:].decode("utf-8", "replace")
            reason = reason or f"compiling ended without a result ({self.killed or self.exit})\n"
            return Outcome("compile_error", "", reason, None, self.taken)
        returned, memory = self._returned()
        calls = self.job.case.calls
        complete = calls is None or (returned is not None and len(returned) == len(calls))
        if self.killed:
            status = self.killed
        elif memory or self.exit == -signal.SIGKILL:  # ours aside, the kernel's for want of memory
            status = "memory"
        elif self.exit == -signal.SIGXCPU:
            status = "timeout"
        else:
            status = "ok" if self.exit == 0 and complete else "runtime_error"
        return Outcome(status, printed, said, returned, self.taken)  # pyright: ignore[reportArgumentType]

    def _returned(self) -> tuple[list[Any] | None, bool]:
        """Values up to the first line that makes no sense, and whether memory ran out."""
        values: list[Any] = []
        memory = False
        try:
            for line in bytes(self.report).splitlines():
                said = json.loads(line)
                memory = memory or said.get("memory") is True
                if "value" in said:
                    values.append(decode(said["value"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            pass
        calls = self.job.case.calls
        return (None if calls is None else values[: len(calls)]), memory


def _ready(fd: int, seconds: float = 0.0) -> bool:
    """Whether there is something to read, or the end; `select` fails above 1023 descriptors."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _memory_file(data: bytes) -> int:
    """A file without a name that nobody can change any more."""
    fd = kernel.memory_file(b"input")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    kernel.seal(fd)
    return fd
