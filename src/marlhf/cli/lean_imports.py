"""A start that imports no more than it needs, and compiles it once."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

UNUSED = {
    "torchvision": "is_torchvision_available",
    "sklearn": "is_sklearn_available",
    "scipy": "is_scipy_available",
}
"""Packages, and what transformers asks whether they are there."""


def skip_unused_packages() -> None:
    """Let transformers believe that some packages are not installed, from its import on.

    Where they are, it imports torchvision and SciPy for models of images, and scikit-learn for
    assisted generation. That is a second or two of each start; and a torchvision that was built for
    another torch, which is easily installed, would stop a model of text. Others can import them as
    before.
    """
    if "transformers" in sys.modules:  # and has asked already
        return
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        from transformers.utils import import_utils

        for name in hidden:
            ask = getattr(import_utils, UNUSED[name], None)
            if ask is not None:
                ask()  # the answer is kept
    finally:
        for name in hidden:
            del sys.modules[name]


def keep_compiled_modules() -> None:
    """Keep compiled modules in a folder of our own where Python was told to keep none.

    Containers often tell it so (PYTHONDONTWRITEBYTECODE) and hold a torch that was never compiled:
    then each start compiles more than a thousand of its files, which takes seconds.
    """
    if not sys.dont_write_bytecode or sys.pycache_prefix:
        return
    torch = importlib.util.find_spec("torch")
    source = torch and torch.origin
    if not source or Path(importlib.util.cache_from_source(source)).exists():
        return
    folder = _own_folder()
    if folder is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def _own_folder() -> Path | None:
    """Where only this user can write: what is kept there will be run."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "marlhf" / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
    except (OSError, RuntimeError):  # nowhere to write, or no home
        return None
    mine = not hasattr(os, "getuid") or stat.st_uid == os.getuid()
    return folder if mine and not stat.st_mode & 0o022 else None
