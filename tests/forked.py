"""Commands in processes of their own that do not import torch anew.

Importing torch, transformers and marlhf takes longer than most of what tests run in a process. A
server has them imported and forks a process per command, before any of them has computed anything
or started a thread. What tests see is that of a new process: its exit status, output, signals,
working directory and environment. Whatever is about starting, such as imports, needs `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import IO, Any

import pytest
from torch import multiprocessing
from torch.distributed import run as torchrun

FORKED_SAMPLERS = "MARLHF_FORKED_SAMPLERS"
"""Set where commands fork the processes that sample ahead, instead of starting them anew."""


class ForkedProcess:
    """As much of `subprocess.Popen` as tests need; output is read once the process has ended."""

    def __init__(self, control: socket.socket, arguments: list[str], terminal: int | None = None):
        self._output = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        ours, theirs = os.pipe()
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        request["terminal"] = terminal is not None
        output = [file.fileno() for file in self._output] if terminal is None else [terminal] * 2
        descriptors = [*output, theirs]
        socket.send_fds(control, [json.dumps(request).encode()], descriptors)
        os.close(theirs)
        self._status = os.fdopen(ours, encoding="utf-8")
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked command", timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        stdout, stderr = map(_read_and_close, self._output)
        return stdout, stderr

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _read_and_close(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


class ForkServer:
    """`server.start("-m", "marlhf", "sft", ...)` is `python -m marlhf sft ...`, forked."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._processes: list[ForkedProcess] = []

    def start(self, *arguments: str, terminal: int | None = None) -> ForkedProcess:
        """With its output to read in the end, or at a terminal of its own."""
        process = ForkedProcess(self.control, list(arguments), terminal)
        self._processes.append(process)
        return process

    def start_ranks(self, *arguments: str) -> ForkedProcess:
        """Two processes that torchrun starts."""
        return self.start("two ranks", *arguments)

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # what a test that failed left running
        self.control.close()
        self._server.wait()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def fork_samplers() -> Callable[[str], Any]:
    """In place of `multiprocessing.get_context`: by the server that Python has for forking."""
    real = multiprocessing.get_context
    context = real("forkserver")
    context.set_forkserver_preload(["marlhf.rollout.sampler_process"])
    return lambda method: context if method == "spawn" else real(method)


@pytest.fixture
def forked_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that sample ahead are forked as well, here and in forked commands."""
    monkeypatch.setattr(multiprocessing, "get_context", fork_samplers())
    monkeypatch.setenv(FORKED_SAMPLERS, "1")


def next_command(control: socket.socket) -> list[str]:
    """Serve until the other side closes; returns in each forked process, with its arguments."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
        _reap()
        if not message:
            sys.exit()
        request = json.loads(message)
        if FORKED_SAMPLERS in request["environment"]:
            _start_sampler_server()
        if os.fork() == 0:
            control.close()
            _fork_and_report(*descriptors)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["folder"])
            if request["terminal"]:
                _take_terminal()
            if FORKED_SAMPLERS in os.environ:
                multiprocessing.get_context = fork_samplers()
            return request["arguments"]
        for descriptor in descriptors:
            os.close(descriptor)


def _start_sampler_server() -> None:
    """Before the fork, so that all commands share the server that forks their samplers."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_address is None:
        fork_samplers()
        server.ensure_running()
        server.ensure_running = lambda: None  # a command would look for it among its children


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_and_report(stdout: int, stderr: int, status: int) -> None:
    """Return in the process of the command; report its process id and its exit status."""
    pid = os.fork()
    if pid == 0:
        os.close(status)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        return
    os.write(status, f"{pid}\n".encode())
    _, ended = os.waitpid(pid, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
    os._exit(0)


def _take_terminal() -> None:
    """The terminal that is this process's output is where it reads, and keys there are signals."""
    os.setsid()
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    os.dup2(1, 0)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def run(arguments: list[str]) -> None:
    """As `python` would, with arguments such as `-m marlhf` or a script."""
    module = arguments[1] if arguments[0] == "-m" else None
    sys.argv = arguments[1:] if module else arguments
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def run_ranks(arguments: list[str]) -> None:
    """By torchrun itself, which forks the two processes where it would start them anew."""
    if arguments[0] == "-m":
        main = importlib.util.find_spec(f"{arguments[1]}.__main__")
        assert main is not None
        arguments = [str(main.origin), *arguments[2:]]
    options = ["--nproc-per-node=2", "--standalone", "--start-method=fork", "--run-path"]
    torchrun.main([*options, *arguments])


def end(status: int) -> None:
    """As Python ends, without freeing one by one what was imported, which takes half a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


PRELOADED = ("peft", "transformers.models.llama.modeling_llama", "marlhf.cli", "marlhf.trainers")

if __name__ == "__main__":
    os.fsync = os.fstat  # as in conftest.py
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # no fork searches, and so copies, what was imported
    gc.set_threshold(20_000, 20, 100)  # as in conftest.py
    gc.enable()
    asked = next_command(socket.socket(fileno=int(sys.argv[1])))
    status = 0
    try:
        if asked[0] == "two ranks":
            run_ranks(asked[1:])
        else:
            run(asked)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise  # Python prints it
        status = error.code or 0
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    end(status)
