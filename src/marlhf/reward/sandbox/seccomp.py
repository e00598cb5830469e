"""The system calls that a program may make; every other one fails with EPERM.

The filter is a classic BPF program, assembled here. It kills a process that uses another
architecture's calls (32-bit, x32): their numbers mean other calls. Calls that are harmless only
with certain arguments have rules on these.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct
from collections.abc import Iterable
from contextlib import suppress

from marlhf.reward.sandbox import kernel

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name, number on x86_64, number on aarch64 (- if it has none). The filter is a linear search, so
# the most frequent calls come first.
_TABLE = """
read 0 63, write 1 64, futex 202 98, mmap 9 222, munmap 11 215, brk 12 214, lseek 8 62,
newfstatat 262 79, openat 257 56, close 3 57, fstat 5 80, clock_gettime 228 113, madvise 28 233,
readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, stat 4 -,
lstat 6 -, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
readlinkat 267 78, getdents64 217 61, statfs 137 43, fstatfs 138 44, getcwd 79 17, chdir 80 49,
fchdir 81 50, umask 95 166, open 2 -, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -,
unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, symlink 88 -, symlinkat 266 36,
link 86 -, linkat 265 37, ftruncate 77 46, fallocate 285 47, fsync 74 82, fdatasync 75 83,
flock 73 32, fadvise64 221 223, sendfile 40 71, copy_file_range 326 285, mprotect 10 226,
mremap 25 216, msync 26 227, mincore 27 232, set_robust_list 273 99, set_tid_address 218 96,
rseq 334 293, membarrier 324 283, sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, restart_syscall 219 128,
pause 34 -, alarm 37 -, setitimer 38 103, getitimer 36 102, nanosleep 35 101,
clock_nanosleep 230 115, clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153,
getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgid 121 155,
getpgrp 111 -, getsid 124 156, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163,
getrandom 318 278, getpriority 140 141, wait4 61 260, waitid 247 95, exit 60 93,
exit_group 231 94, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd 284 -,
eventfd2 290 19, recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205,
getsockopt 55 209
"""
# Calls with a rule on their arguments: see `build`.
_WITH_RULES = """
ioctl 16 29, fcntl 72 25, prctl 157 167, kill 62 129, tgkill 234 131, clone 56 220,
clone3 435 435, socketpair 53 199, sendto 44 206, prlimit64 302 261, setrlimit 160 164
"""

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # isatty, its size, FIO*
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # copies, flags, locks; no F_SETOWN
_PRCTLS = (15, 16)  # a thread's name
_THREAD = 0x00010000  # CLONE_THREAD
_NAMESPACES = 0x7E020080  # CLONE_NEW*: user, mount, PID, network, IPC, UTS, cgroup, time
_AF_UNIX, _SOCK_STREAM = 1, 1

_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _ASK, _ERRNO, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101  # ioctls of a listener

Instruction = tuple[int, int, int, int]
PID_PLACEHOLDER = 0x7FEDCBA9
"""Stands for the process id in a filter that is built before the process exists."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def numbers(table: str, machine: str) -> dict[str, int]:
    """The calls of a table by name; those that the architecture lacks are left out."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    rows = [entry.split() for entry in table.replace("\n", " ").split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def available(action: int = _ERRNO) -> bool:
    """Whether this kernel filters system calls, and the architecture is supported here."""
    if kernel.machine() not in AUDIT_ARCH:
        return False
    try:  # SECCOMP_GET_ACTION_AVAIL
        kernel.syscall(kernel.SECCOMP[kernel.machine()], 2, 0, (ctypes.c_uint32 * 1)(action))
    except OSError:
        return False
    return True


def build(machine: str, pid: int = PID_PLACEHOLDER) -> list[Instruction]:
    """The filter for a process that may send signals only to itself."""
    with_rules = numbers(_WITH_RULES, machine)
    rules: dict[str, list[Instruction]] = {
        "ioctl": _one_of(1, _IOCTLS),
        "fcntl": _one_of(1, _FCNTLS),
        "prctl": _one_of(0, _PRCTLS),
        "kill": _one_of(0, (pid,)),
        "tgkill": _one_of(0, (pid,)),
        "clone": [  # threads, but neither processes nor namespaces
            _load(0),
            (_AND, 0, 0, _THREAD | _NAMESPACES),
            (_EQUAL, 0, 1, _THREAD),
            _return(_ALLOW),
            _return(_ERRNO | errno.EPERM),
        ],
        # Its flags are in memory, which a filter cannot read. ENOSYS makes libc fall back to clone.
        "clone3": [_return(_ERRNO | errno.ENOSYS)],
        "socketpair": [  # streams within the process, which asyncio needs
            _load(0),
            (_EQUAL, 0, 3, _AF_UNIX),
            _load(1),
            (_AND, 0, 0, 0xF),
            (_EQUAL, 1, 0, _SOCK_STREAM),
            _return(_ERRNO | errno.EPERM),
            _return(_ALLOW),
        ],
        "sendto": _when_null(4, _ALLOW, _ERRNO | errno.EPERM),
        # Many programs raise their own stack limit: report success and do nothing.
        "prlimit64": [
            _load(0),
            (_EQUAL, 2, 0, 0),
            (_EQUAL, 1, 0, pid),
            _return(_ERRNO | errno.EPERM),
            *_when_null(2, _ALLOW, _ERRNO),
        ],
        "setrlimit": [_return(_ERRNO)],
    }
    filter_ = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, AUDIT_ARCH[machine]), _return(_KILL)]
    filter_.append((_LOAD, 0, 0, 0))
    if machine == "x86_64":
        filter_ += [(0x35, 0, 1, 0x40000000), _return(_KILL)]  # at or above: x32
    for number in numbers(_TABLE, machine).values():
        filter_ += [(_EQUAL, 0, 1, number), _return(_ALLOW)]
    for name, number in with_rules.items():
        filter_ += [(_EQUAL, 0, len(rules[name]), number), *rules[name]]
    return [*filter_, _return(_ERRNO | errno.EPERM)]


def pack(instructions: Iterable[Instruction]) -> bytes:
    """The kernel's layout: a 16-bit code, two 8-bit jump offsets, a 32-bit operand."""
    return b"".join(
        code.to_bytes(2, "little") + bytes((yes, no)) + operand.to_bytes(4, "little")
        for code, yes, no, operand in instructions
    )


def install(packed: bytes, pid: int) -> None:
    """Filter this process from now on. no_new_privs must be set."""
    packed = packed.replace(PID_PLACEHOLDER.to_bytes(4, "little"), pid.to_bytes(4, "little"))
    program = _Program(len(packed) // 8, packed)
    set_filter, all_threads = 1, 1
    kernel.syscall(kernel.SECCOMP[kernel.machine()], set_filter, all_threads, program)


def can_ask() -> bool:
    """Whether this kernel can ask another process whether to allow a call."""
    return available(_ASK)


def ask_for_threads() -> int:
    """Let the reader of the returned descriptor decide on every new thread of this process.

    The other filter is installed after this one; where they differ the stricter action counts.
    """
    clone = numbers(_WITH_RULES, kernel.machine())["clone"]
    packed = pack([(_LOAD, 0, 0, 0), (_EQUAL, 0, 1, clone), _return(_ASK), _return(_ALLOW)])
    set_filter, new_listener = 1, 8
    program = _Program(len(packed) // 8, packed)
    return kernel.syscall(kernel.SECCOMP[kernel.machine()], set_filter, new_listener, program)


def answer(listener: int, allow: bool) -> None:
    """Allow the call that a listener reports, or let it fail as if no thread were left."""
    request = bytearray(80)
    with suppress(OSError):  # the process was killed meanwhile
        fcntl.ioctl(listener, _RECEIVE, request)
        error, flags = (0, 1) if allow else (-errno.EAGAIN, 0)  # 1: carry out the call
        reply = bytes(request[:8]) + struct.pack("<qiI", 0, error, flags)
        fcntl.ioctl(listener, _ANSWER, reply)


def _load(argument: int, *, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * argument + 4 * high)


def _return(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _one_of(argument: int, values: Iterable[int]) -> list[Instruction]:
    """Allow the call if a 32-bit argument has one of these values."""
    allowed = [step for v in values for step in ((_EQUAL, 0, 1, v), _return(_ALLOW))]
    return [_load(argument), *allowed, _return(_ERRNO | errno.EPERM)]


def _when_null(argument: int, null: int, other: int) -> list[Instruction]:
    """Return one action if a 64-bit argument is zero, another if not; BPF reads 32 bits at once."""
    halves = [_load(argument), (_EQUAL, 0, 3, 0), _load(argument, high=True), (_EQUAL, 0, 1, 0)]
    return [*halves, _return(null), _return(other)]
