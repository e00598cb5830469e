"""Landlock: which files a program may open, whatever its user is allowed to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

from marlhf.reward.sandbox import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_CHANGE = sum(1 << bit for bit in (1, 4, 5, 7, 8, 12, 13, 14))
"""Write, remove, create folders, files and links, move, truncate; no devices, sockets, fifos."""
_NET, _SCOPES = 0b11, 0b11  # TCP bind and connect; abstract sockets and signals of others


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # the layout that _pack_ implies; Python 3.14 requires it
    _fields_ = (("access", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """The kernel's Landlock ABI version, 0 if Landlock is missing or disabled."""
    try:
        return kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def restrict(abi: int, readable: Sequence[str], writable: Sequence[str]) -> None:
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
