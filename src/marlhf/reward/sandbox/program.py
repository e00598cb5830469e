"""The process of one program: confine itself, compile, report that, and only then run.

Once the program runs it can reach everything in this process, so nothing here can be trusted any
more. The host relies on what it got before (a byte on a pipe that is closed by then) and on what
the kernel reports (the exit status, the clock, the bytes on the pipes).
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import gc
import json
import linecache
import marshal
import os
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from marlhf.reward.sandbox import kernel, namespaces, seccomp
from marlhf.reward.sandbox.protocol import decode, encode

SOURCE, STATUS, REPORT, CODE, CONTROL = 3, 4, 5, 6, 7
FILE_NAME = "program.py"
THREADS, FILES, STACK = 256, 256, 100 << 20


class Confinement(NamedTuple):
    """The limits and layers that a server applies to its programs."""

    namespaced: bool
    own_user: bool
    """Whether no process of the host counts towards the limit on processes."""
    user: int | None
    landlock: int
    seccomp: bytes
    asks_for_threads: bool
    readable: Sequence[str]
    address_space: int
    tmp_bytes: int


def run_program(
    received: Sequence[int], confinement: Confinement, seconds: float, server: int
) -> NoReturn:
    """Everything that the process does, from fork to exit."""
    status = 1
    try:
        _place_descriptors(received)
        try:
            _confine(confinement, seconds, server)
        except BaseException as error:
            os.write(STATUS, f"X{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.write(STATUS, b"L")
        code, calls = _prepare()
        status = _run(code, calls)
    finally:
        os._exit(status)


def _place_descriptors(received: Sequence[int]) -> None:
    """Move the received descriptors to their numbers and close every other one.

    The host sends them in this order: source, input, output, error, status, report, code. The
    server adds its control socket where it has to limit threads.
    """
    # First out of the way: a received number may be the place of another.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in received]
    for fd, place in zip(high, (SOURCE, 0, 1, 2, STATUS, REPORT, CODE, CONTROL)):
        os.dup2(fd, place, inheritable=False)
    kernel.close_from(len(received))


def _confine(confinement: Confinement, seconds: float, server: int) -> None:
    os.setsid()
    if confinement.namespaced:
        _copy_input()
        os.chdir("/tmp")
    _set_limits(confinement, seconds)
    if confinement.user is not None:
        os.setgroups([])
        os.setresgid(confinement.user, confinement.user, confinement.user)
        os.setresuid(confinement.user, confinement.user, confinement.user)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server died before the line above, so no signal will come
        os._exit(1)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if confinement.asks_for_threads:
        listener = seccomp.ask_for_threads()
        with socket.socket(fileno=CONTROL) as control:
            socket.send_fds(control, [b"listener"], [listener])
        os.close(listener)
    if confinement.landlock:
        writable = ["/tmp"] if confinement.namespaced else []
        devices = ["/dev/null"] if os.path.exists("/dev/null") else []
        readable = [*confinement.readable, *namespaces.DEVICES]
        namespaces.restrict_files(confinement.landlock, readable, writable + devices)
    if confinement.seccomp:
        seccomp.install(confinement.seccomp, os.getpid())


def _copy_input() -> None:
    """A copy for programs that open /dev/stdin, a link to this file: there is no /proc."""
    size = os.fstat(0).st_size
    copy = os.open("/tmp/.stdin", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with suppress(OSError):  # an input larger than /tmp can be read by descriptor only
        os.sendfile(copy, 0, 0, size)
    os.close(copy)
    os.lseek(0, 0, os.SEEK_SET)


def _set_limits(confinement: Confinement, seconds: float) -> None:
    processors = len(os.sched_getaffinity(0))
    limits = {
        resource.RLIMIT_AS: confinement.address_space,
        resource.RLIMIT_CPU: int((seconds + 1) * processors) + 1,  # the host's clock is earlier
        resource.RLIMIT_FSIZE: confinement.tmp_bytes,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_STACK: STACK,
    }
    if confinement.own_user:  # else it would count all processes of the host's user
        limits[resource.RLIMIT_NPROC] = THREADS
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (most, most))


def _prepare() -> tuple[types.CodeType, list | None]:
    """Compile, or load what an earlier process compiled; report it and close the status pipe."""
    with open(SOURCE, "rb") as file:
        file.seek(0)
        task = json.load(file)
    source = task["source"]
    try:
        if os.fstat(CODE).st_size:
            os.lseek(CODE, 0, os.SEEK_SET)
            with open(CODE, "rb") as file:
                code = marshal.load(file)
        else:
            code = compile(source, FILE_NAME, "exec", dont_inherit=True)
            with open(CODE, "wb") as file:
                marshal.dump(code, file)
    except BaseException as error:
        message = "".join(traceback.format_exception_only(type(error), error))
        os.write(STATUS, b"E" + message.encode("utf-8", "replace")[:4000])
        os._exit(1)
    lines = source.splitlines(keepends=True)
    linecache.cache[FILE_NAME] = (len(source), None, lines, FILE_NAME)
    os.write(STATUS, b"C")
    os.close(STATUS)
    return code, task["calls"]


def _run(code: types.CodeType, calls: list | None) -> int:
    main = _fresh_main()
    status = 0
    try:
        exec(code, vars(main))
        if calls is not None:
            for call in calls:
                _report({"value": encode(_answer(call, vars(main)))})
    except SystemExit as end:
        status = _exit_status(end.code)
    except BaseException as error:
        status = 1
        _print_traceback(error)
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        status = status or 1
        _print_traceback(error)
    return status


def _fresh_main() -> types.ModuleType:
    """The state of an interpreter that starts to run a file."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "marlhf"]:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __file__=FILE_NAME)
    sys.modules["__main__"] = main
    sys.argv = [FILE_NAME]
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    gc.enable()
    return main


def _answer(call: list, space: dict[str, Any]) -> Any:
    """Evaluate an expression or call a function; a method gets a new instance of its class."""
    name, arguments, keywords = call
    if arguments is None:
        return eval(compile(name, "call", "eval", dont_inherit=True), space)
    owner, _, method = name.rpartition(".")
    if not owner and name not in space and hasattr(space.get("Solution"), name):
        owner = "Solution"
    if not owner and name not in space:
        raise NameError(f"the program does not define {name!r}")
    function = getattr(space[owner](), method) if owner else space[name]
    return function(*decode(arguments), **decode(keywords))


def _report(line: dict[str, Any]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(REPORT, data) :]


def _exit_status(code: object) -> int:
    """As in Python: None is 0, a number is itself, anything else is printed and 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with suppress(BaseException):
        print(code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """Print the traceback without our frames, as far as there is memory left."""
    with suppress(BaseException):
        if isinstance(error, MemoryError):
            _report({"memory": True})
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
