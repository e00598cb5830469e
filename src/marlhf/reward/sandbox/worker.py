"""The host's side of one fork server: starts it and follows the program that it runs."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlhf.errors import MarlhfError
from marlhf.reward.sandbox import kernel
from marlhf.reward.sandbox.protocol import Case, Outcome, Suite, decode

START_SECONDS = 60.0
COMPILE_SECONDS = 5.0
"""Extra time until a program has compiled; covers the fork and a busy machine."""
GRACE_SECONDS = 10.0
"""How long a killed program may take to end before its server is replaced."""
STOP_SECONDS = 0.2
"""How often a program that runs is checked for whether the host has been stopped."""
ERROR_BYTES = 8192

# Registers the packages without running their __init__ files, which would import torch.
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
    """The fork server has ended."""


class Worker:
    """A fork server; it runs one program at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        here = Path(__file__).parent
        folders = {"marlhf.reward.sandbox": here, "marlhf.reward": here.parent}
        folders["marlhf"] = here.parent.parent
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {"socket": theirs.fileno(), "host": os.getpid()}
        paths = {name: str(path) for name, path in folders.items()}
        arguments = json.dumps({**settings, **own, "folders": paths})
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-B", "-X", "utf8", "-c", _BOOT, arguments],
                env={**single, "MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )

    def layers(self) -> dict[str, bool | str]:
        """Wait for the server; returns its layers, or raises OSError with the reason."""
        if not _ready(self.socket.fileno(), START_SECONDS):
            raise OSError(f"no answer within {START_SECONDS:.0f} s")
        answer = json.loads(self.socket.recv(65536) or b'{"failed": ""}')
        if "failed" in answer:
            self.process.wait(GRACE_SECONDS)
            self._stderr.seek(0)
            last_line = self._stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise OSError(answer["failed"] or f"its server ended: {last_line or 'no message'}")
        self._stderr.close()
        return answer["layers"]

    def start(self, files: list[int], seconds: float) -> bool:
        """Request a process with these descriptors; False if the server is dead."""
        try:
            socket.send_fds(self.socket, [json.dumps({"seconds": seconds}).encode()], files)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop the server and its program: it exits when its socket is shut down."""
        with suppress(OSError):  # not only close: a fork of this process may hold a copy
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._stderr.close()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def release(self) -> None:
        """In a fork of the host: close our copies and leave the server to its owner."""
        self.socket.close()
        self._stderr.close()


@dataclass
class SuiteRun:
    """A suite in progress: its outcomes so far, and the code its first case compiled."""

    suite: Suite
    outcomes: list[Outcome] = field(default_factory=list)
    code: int | None = None
    deaths: int = 0

    @property
    def case(self) -> Case:
        return self.suite.cases[len(self.outcomes)]

    @property
    def done(self) -> bool:
        failed = bool(self.outcomes) and self.outcomes[-1].status != "ok"
        return failed or len(self.outcomes) == len(self.suite.cases)

    def close(self) -> None:
        if self.code is not None:
            os.close(self.code)
            self.code = None


class Execution:
    """One process of one program, from the request to its outcome."""

    def __init__(self, worker: Worker, job: SuiteRun, seconds: float, output_bytes: int) -> None:
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

    def follow(self, stop: threading.Event) -> Outcome:
        """Wait for the program's end; WorkerDied if its server ends first, or must be ended."""
        if not self.started:
            raise WorkerDied
        poll = select.poll()  # not `select`, which fails for descriptors above 1023
        for fd in (self.worker.socket.fileno(), *self.pipes):
            poll.register(fd, select.POLLIN)
        while not stop.is_set():
            left = self.deadline - time.monotonic()
            if left <= 0 and self.killed:  # and still alive: only the end of its server can end it
                break
            if left <= 0:
                self.kill("timeout")
                continue
            for fd, _ in poll.poll(1000 * min(left, STOP_SECONDS)):
                if fd in self.pipes:
                    if not self.read(fd):
                        poll.unregister(fd)
                elif self.handle_message():
                    return self.finish()
        raise WorkerDied

    def read(self, fd: int) -> bool:
        """Read what a pipe holds; False at its end."""
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

    def handle_message(self) -> bool:
        """Read a message of the server; True once the program has ended."""
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
        """Close every descriptor; keep the compiled code, if any, for the next case."""
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
        """Read the rest of the pipes, whose other ends are closed by now."""
        for fd in list(self.pipes):
            while _ready(fd) and self.read(fd):
                pass
        self.close()
        return self._outcome()

    def _outcome(self) -> Outcome:
        stderr = self.stderr[-ERROR_BYTES:].decode("utf-8", "replace")
        stdout = self.stdout.decode("utf-8", "replace")
        if not self.status.startswith(b"L"):
            reason = self.status[1:].decode("utf-8", "replace") or stderr or "it never started"
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
        elif memory or self.exit == -signal.SIGKILL:  # not by us: by the kernel, out of memory
            status = "memory"
        elif self.exit == -signal.SIGXCPU:
            status = "timeout"
        else:
            status = "ok" if self.exit == 0 and complete else "runtime_error"
        return Outcome(status, stdout, stderr, returned, self.taken)  # pyright: ignore[reportArgumentType]

    def _returned(self) -> tuple[list[Any] | None, bool]:
        """Values up to the first malformed line, and whether memory ran out."""
        values: list[Any] = []
        memory = False
        try:
            for line in bytes(self.report).splitlines():
                message = json.loads(line)
                memory = memory or message.get("memory") is True
                if "value" in message:
                    values.append(decode(message["value"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            pass
        calls = self.job.case.calls
        return (None if calls is None else values[: len(calls)]), memory


def _ready(fd: int, seconds: float = 0.0) -> bool:
    """Whether a descriptor is readable; `select` fails for numbers above 1023, `poll` does not."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _memory_file(data: bytes) -> int:
    """An anonymous file with this content that nobody can change."""
    fd = kernel.memory_file(b"input")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    kernel.seal(fd)
    return fd
