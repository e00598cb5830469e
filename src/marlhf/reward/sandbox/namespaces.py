"""Namespaces and Landlock: what a program sees of the machine, and which files it may open.

By namespaces the sandbox gets its own root folder, network, process ids and users. The new root is
a read-only tmpfs with Python's libraries and four devices bound into it: the host's other files are
not mounted at all. There is no /proc.

Landlock then limits which files a program may open, whatever its user is allowed to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

from marlhf.reward.sandbox import kernel

NOBODY = 65534
ASIDE = "/.aside"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

_USER = 0x10000000
_OTHERS = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_NAMES = "mount, PID, network, IPC, UTS, cgroup"

_NOSUID, _NODEV, _NOEXEC, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_CHANGE = sum(1 << bit for bit in (1, 4, 5, 7, 8, 12, 13, 14))
"""Write, remove, create folders, files and links, move, truncate; no devices, sockets, fifos."""
_NET, _SCOPES = 0b11, 0b11  # TCP bind and connect; abstract sockets and signals of others


def enter() -> tuple[str, int | None]:
    """Enter new namespaces; returns their names and the user id for programs, None for our own.

    The PID namespace takes effect at the next fork. Started as root, the sandbox has two users: one
    that mounts and one that runs programs. An ordinary user can map only itself.
    """
    try:
        mapped = _enter_with_user()
    except OSError:
        if os.geteuid():
            raise
        kernel.call("unshare", _OTHERS)  # root can do this where user namespaces are disabled
        return _NAMES, NOBODY if _is_mapped(NOBODY) else None
    return f"user, {_NAMES}", NOBODY if mapped else None


def _enter_with_user() -> bool:
    """Enter a user namespace with all others; returns whether it maps a second user.

    A process without privileges in its parent namespace may map only itself, so a helper process
    that stays outside writes the maps, once we have entered.
    """
    root = os.geteuid() == 0
    single = f"{0 if root else NOBODY} %d 1\n"
    both = f"0 0 1\n{NOBODY} {NOBODY} 1\n"
    ready, go = os.pipe()
    target, helper = os.getpid(), os.fork()
    if helper == 0:
        status = 2
        try:
            os.close(go)
            if os.read(ready, 1):
                status = _write_maps(target, single, both if root else None)
        finally:
            os._exit(status)
    os.close(ready)
    try:
        kernel.call("unshare", _USER | _OTHERS)
        os.write(go, b"1")
    finally:
        os.close(go)
        status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if status == 2:
        raise OSError(1, "the user map of the new namespace could not be written")
    return status == 0


def _write_maps(pid: int, single: str, both: str | None) -> int:
    """Write the user and group maps; returns 0 for two mapped users, 1 for one."""
    if both:
        with suppress(OSError):
            _write(f"/proc/{pid}/uid_map", both)
            _write(f"/proc/{pid}/gid_map", both)
            return 0
    with suppress(OSError):  # fails if uid_map was written above and gid_map was refused
        _write(f"/proc/{pid}/uid_map", single % os.geteuid())
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", single % os.getegid())
    return 1


def _is_mapped(user: int) -> bool:
    """Whether this user exists here: in a namespace that maps root alone it does not."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [list(map(int, line.split())) for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def build_root(readable: Sequence[str]) -> None:
    """Build the new root, move into it and unmount the old one."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("sandbox", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    kernel.syscall(kernel.PIVOT_ROOT[kernel.machine()], b"/tmp", b"/tmp/old")
    os.chdir("/")
    bound: list[str] = []
    for path in sorted(readable):
        real = _old_path(path)
        if real is not None and not any(f"{real}/".startswith(f"{b}/") for b in bound):
            place = _place(real)
            _bind(f"/old{real}", place)
            _protect(place, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, _AT_RECURSIVE)
            bound.append(real)
        if real is not None and real != path and not os.path.lexists(_place(path)):
            os.makedirs(os.path.dirname(_place(path)), exist_ok=True)
            os.symlink(real, _place(path))
    for path in DEVICES:
        _bind(f"/old{path}", path)
    os.symlink("/tmp/.stdin", "/dev/stdin")
    os.makedirs("/tmp", 0o755, exist_ok=True)
    kernel.call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    _protect("/", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)


def _place(path: str) -> str:
    """Where a path is put: those in /tmp aside, as every program gets a new /tmp over the old."""
    return f"{ASIDE}{path}" if f"{path}/".startswith("/tmp/") else path


def fresh_tmp(megabytes: int) -> None:
    """Mount an empty /tmp of limited size over the previous one.

    A Python that is installed in /tmp is shown there again, read-only as it is.
    """
    options = f"size={megabytes}m,nr_inodes=16384,mode=1777"
    _mount("sandbox", "/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    with suppress(FileNotFoundError):
        for entry in os.scandir(f"{ASIDE}/tmp"):
            path = f"/tmp/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            else:
                _bind(entry.path, path)


def drop_tmp() -> None:
    kernel.call("umount2", b"/tmp", _DETACH)


def _old_path(path: str) -> str | None:
    """Resolve a path of the host from inside the new root; None if it does not exist.

    `os.path.realpath` would follow absolute links in the new root instead of the old one.
    """
    parts, real, jumps = path.strip("/").split("/"), "", 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            real = os.path.dirname(real)
        elif os.path.islink(f"/old{real}/{part}") and jumps < 40:
            target, jumps = os.readlink(f"/old{real}/{part}"), jumps + 1
            parts = target.split("/") + parts
            real = "" if target.startswith("/") else real
        else:
            real = f"{real}/{part}"
    return real if os.path.lexists(f"/old{real}") else None


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "x").close()
    _mount(source, target, None, _BIND | _RECURSIVE)


def _protect(path: str, attributes: int, flags: int) -> None:
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    kernel.syscall(kernel.MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, values, 32)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    names = [text.encode() if text else None for text in (source, target, kind, options)]
    try:
        kernel.call("mount", *names[:3], flags, names[3])
    except OSError as error:
        message = f"mounting {source or 'nothing'} at {target}: {error.strerror}"
        raise OSError(error.errno, message) from error


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # the layout that _pack_ implies; Python 3.14 requires it
    _fields_ = (("access", ctypes.c_uint64), ("folder", ctypes.c_int32))


def landlock_version() -> int:
    """The kernel's Landlock ABI version, 0 if Landlock is missing or disabled."""
    try:
        return kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def restrict_files(abi: int, readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow only these folders and files from now on. no_new_privs must be set."""
    # Each ABI version added rights. The kernel refuses rights that it does not know, so only
    # those of its version are listed; all that are listed are denied unless a rule allows them.
    bits = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    handled = (1 << bits) - 1
    attributes = (ctypes.c_uint64 * 3)(handled, _NET, _SCOPES)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, attributes, size, 0)
    try:
        for path in readable:
            _allow(rules, path, handled & (_EXECUTE | _READ_FILE | _READ_DIR))
        for path in writable:
            _allow(rules, path, handled & (_READ_FILE | _READ_DIR | _CHANGE))
        kernel.syscall(kernel.LANDLOCK_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    with suppress(FileNotFoundError):  # a missing path only means fewer rights
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                access &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
            kernel.syscall(kernel.LANDLOCK_ADD_RULE, rules, 1, _Beneath(access, at), 0)
        finally:
            os.close(at)
