"""System calls that Python does not wrap, through the C library.

This module and those that import it (`seccomp`, `namespaces`, `server`, `program`) run
in the sandbox's own processes, where neither torch nor the rest of marlhf is loaded: they import
only the standard library and one another.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

# Calls added since Linux 5.1 have the same number on every architecture.
PIDFD_SEND_SIGNAL, PIDFD_OPEN, CLOSE_RANGE, MOUNT_SETATTR = 424, 434, 436, 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
SECCOMP = {"x86_64": 317, "aarch64": 277}
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38


def machine() -> str:
    return os.uname().machine


def syscall(number: int, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Make a system call by number; OSError if it returns -1."""
    return _checked("syscall", LIBC.syscall(ctypes.c_long(number), *map(_argument, arguments)))


def call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library by name; OSError if it returns -1."""
    return _checked(name, LIBC[name](*map(_argument, arguments)))


def prctl(option: int, value: int = 0) -> None:
    call("prctl", option, value, 0, 0, 0)


def memory_file(name: bytes) -> int:
    """An anonymous file that can be sealed; not every Python build has `os.memfd_create`."""
    cloexec, allow_sealing = 1, 2
    return syscall(MEMFD_CREATE[machine()], name, cloexec | allow_sealing)


def seal(fd: int) -> None:
    """Make a memory file read-only for good, for every process."""
    add_seals, every_seal = 1033, 0xF
    fcntl.fcntl(fd, add_seals, every_seal)


def close_from(first: int) -> None:
    """Close every descriptor from this number on, however high its number."""
    try:
        syscall(CLOSE_RANGE, first, 0xFFFFFFFF, 0)
    except OSError:  # Linux before 5.9
        os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def open_process(pid: int) -> int:
    return syscall(PIDFD_OPEN, pid, 0)


def kill_process(pidfd: int) -> None:
    syscall(PIDFD_SEND_SIGNAL, pidfd, signal.SIGKILL, None, 0)


def drop_capabilities() -> None:
    """Give up every capability, so that even user 0 has no privileges."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    syscall(CAPSET[machine()], header, (ctypes.c_uint32 * 6)())


def _argument(value):
    """Integers as wide as a register: by default ctypes passes only 32 bits."""
    if isinstance(value, int):
        return ctypes.c_long(value)
    return value if value is None or isinstance(value, bytes) else ctypes.byref(value)


def _checked(name: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
