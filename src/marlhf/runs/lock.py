"""One process per folder: a lock that the system drops with the process, however it ends."""

from __future__ import annotations

import os
from pathlib import Path

from marlhf.errors import MarlhfError


class FolderInUse(MarlhfError, RuntimeError):
    """Another process holds the lock."""


def lock_folder(folder: Path) -> int | None:
    """Take the lock of a folder without waiting.

    Returns the descriptor that holds it until it is closed, here and in every process that
    inherits it; None where there are no locks (Windows, some network file systems).
    """
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FolderInUse(f"Another process works in {folder}.") from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
