"""Files and folders that are either complete or not there, whenever the process is killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marlhf.runs.layout import RunError

UNFINISHED = ".new"
"""How the name of a file ends until it is complete."""
DISK_FULL = ("No space left", "unexpected pos", "PytorchStreamWriter failed")
"""What safetensors and torch say where Python would give an error number."""


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary file to write to; it takes the place of `file` when the block ends well.

    Its bytes are on disk before its name is, so a crash leaves the old file or the new one. The
    process id is in its name: two processes may replace the same file, and the later one wins.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(file: Path, data: bytes) -> None:
    """Replace a file in one step; its folder is made if it is not there."""
    with explain_disk_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write_bytes(data)


def write_text(file: Path, text: str) -> None:
    write_bytes(file, text.encode())


def write_json(file: Path, value: Any) -> None:
    write_bytes(file, encode_json(value, indent=2) + b"\n")


def encode_json(value: Any, indent: int | None = None) -> bytes:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold
        return json.dumps(value, indent=indent).encode()


def replace_folder(temporary: Path, final: Path) -> None:
    """Move a complete folder to its place, with everything on disk before its name is."""
    umask = os.umask(0)
    os.umask(umask)
    for file in temporary.rglob("*"):
        if file.is_file():
            # safetensors makes files that only their owner can read, whatever the umask.
            file.chmod(0o666 & ~umask)
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    # A folder cannot replace one that is not empty: the old one steps aside first.
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.replace(old)
    temporary.replace(final)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_disk_errors(where: Path, temporary: Path | None = None) -> Iterator[None]:
    """A full or read-only disk as a sentence, with a half-written folder removed."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        code = error.errno if isinstance(error, OSError) else None
        # safetensors and torch raise their own errors, which know the reason in words only.
        if code in (errno.ENOSPC, errno.EDQUOT) or any(sign in str(error) for sign in DISK_FULL):
            raise RunError(
                f"The disk of {where} is full. What was saved before is complete: free some space "
                "and run the same command again to resume."
            ) from error
        if isinstance(error, OSError):
            raise RunError(
                f"Cannot write to {where}: {error}. Make it a folder that can be written to, or "
                "choose another folder (output_dir, for a training)."
            ) from error
        raise
