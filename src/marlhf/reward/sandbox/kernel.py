"""System calls that Python has no name for, by way of the C library.

This module and those above it (`seccomp`, `landlock`, `namespaces`, `server`, `program`) run in
the sandbox's own processes, where neither torch nor the rest of marlhf is loaded: they import the
standard library and one another, and nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

# The same numbers on every architecture, for calls younger than Linux 5.1.
PIDFD_SEND_SIGNAL, PIDFD_OPEN, MOUNT_SETATTR = 424, 434, 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
SECCOMP = {"x86_64": 317, "aarch64": 277}
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38


def machine() -> str:
    return os.uname().machine


def syscall(number: int, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """The call's result; OSError where it is -1."""
    return _checked("syscall", LIBC.syscall(ctypes.c_long(number), *map(_argument, arguments)))


def call(name: str, *arguments: int | bytes | None) -> int:
    """A function of the C library by its name; OSError where it answers -1."""
    return _checked(name, LIBC[name](*map(_argument, arguments)))


def prctl(option: int, value: int = 0) -> None:
    call("prctl", option, value, 0, 0, 0)


def memory_file(name: bytes) -> int:
    """A file without a place, which can be sealed; not every Python has `os.memfd_create`."""
    cloexec, allow_sealing = 1, 2
    return syscall(MEMFD_CREATE[machine()], name, cloexec | allow_sealing)


def seal(fd: int) -> None:
    """Nobody can change that file any more."""
    add_seals, every_seal = 1033, 0xF
    fcntl.fcntl(fd, add_seals, every_seal)


def open_process(pid: int) -> int:
    return syscall(PIDFD_OPEN, pid, 0)


def kill_process(pidfd: int) -> None:
    syscall(PIDFD_SEND_SIGNAL, pidfd, signal.SIGKILL, None, 0)


def drop_capabilities() -> None:
    """Give up every capability, so that even user 0 is nobody in particular."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    syscall(CAPSET[machine()], header, (ctypes.c_uint32 * 6)())


def _argument(value):
    """Integers as wide as a register: ctypes would pass 32 bits of them."""
    if isinstance(value, int):
        return ctypes.c_long(value)
    return value if value is None or isinstance(value, bytes) else ctypes.byref(value)


def _checked(name: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
