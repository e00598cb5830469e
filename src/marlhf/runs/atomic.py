"""Files and folders that are complete or not there, whenever the process is killed; JSON lines,
which lose at most the last; and the lock by which one process at a time works in a folder."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from marlhf.errors import MarlhfError
from marlhf.runs.layout import RunError, check_inside, leads_out

UNFINISHED = ".new"
"""How the name of a file ends until it is complete."""
DISK_FULL = ("No space left", "unexpected pos", "PytorchStreamWriter failed")
"""What safetensors and torch say where Python would give an error number."""


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary file to write to; it takes the place of `file` when the block ends well.

    Its bytes are on disk before its name is, so a crash leaves the old file or the new one. Its
    name is random: nobody can put a link there beforehand, and when two processes replace the same
    file, the later one wins.
    """
    check_inside(file.parent / f".{file.name}{UNFINISHED}")
    descriptor, name = tempfile.mkstemp(UNFINISHED, f".{file.name}.", file.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _sync(temporary)
        temporary.replace(file)
        _sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(final: Path) -> Iterator[Path]:
    """A temporary folder to fill, which takes the place of `final` when the block ends well."""
    check_inside(final.parent / f".{final.name}{UNFINISHED}")
    temporary = Path(tempfile.mkdtemp(UNFINISHED, f".{final.name}.", final.parent))
    try:
        yield temporary
        replace_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_to_append(file: Path) -> BinaryIO:
    """Open a file for adding to its end, and for reading, without following links."""
    file.parent.mkdir(parents=True, exist_ok=True)
    check_inside(file)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not on Windows
    try:
        descriptor = os.open(file, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RunError(f"{file} is a symbolic link, which is not written to. Remove it.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(f"{file} is not a file. Remove it.")
    return os.fdopen(descriptor, "ab+")


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


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(temporary: Path, final: Path) -> None:
    """Move a complete folder to its place, with everything on disk before its name is."""
    umask = _umask()
    for path in [*temporary.rglob("*"), temporary]:
        # safetensors makes files that only their owner can read, whatever the umask.
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _sync(path)
    # A folder cannot replace one that is not empty: the old one steps aside first.
    old = final.with_name(f".{final.name}.{secrets.token_hex(4)}{UNFINISHED}")
    if final.is_symlink():  # what it points to is left alone
        final.unlink()
    elif final.exists():
        final.replace(old)
    temporary.replace(final)
    shutil.rmtree(old, ignore_errors=True)
    _sync(final.parent)


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
                "choose another folder: output_dir of a training, -o of a report."
            ) from error
        raise


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


Line = dict[str, Any]


class JsonLines(NamedTuple):
    """The objects of a file, and what in it could not be read."""

    rows: list[Line]
    broken: dict[int, str]
    """Number (from 1) and fault of each line that is not JSON."""
    torn: bool
    """Whether the last line breaks off, as a kill leaves it; it is not among the broken."""

    @property
    def num_unread(self) -> int:
        return len(self.broken) + self.torn


def read_jsonl(file: Path) -> JsonLines:
    """Every object in a file; none where there is no file."""
    rows: list[Line] = []
    broken: dict[int, str] = {}
    if not file.is_file() or leads_out(file):
        return JsonLines(rows, broken, torn=False)
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, start=1):
            try:
                row = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError) as error:
                if not text.endswith("\n"):
                    return JsonLines(rows, broken, torn=True)
                broken[number] = str(error)
                continue
            if isinstance(row, dict):
                rows.append(row)
    return JsonLines(rows, broken, torn=False)


def read_keyed(file: Path, setting: str | None = None) -> dict[str, Line]:
    """The last line of each prompt, by its key, under one setting: the last line's if None."""
    rows = [row for row in read_jsonl(file).rows if {"setting", "key"} <= row.keys()]
    if setting is None:
        setting = rows[-1]["setting"] if rows else ""
    return {row["key"]: row for row in rows if row["setting"] == setting}


def append_jsonl(file: Path, rows: Iterable[Line]) -> None:
    """Add lines at the end; a line that a kill tore stays a line of its own."""
    with explain_disk_errors(file.parent), open_to_append(file) as out:
        torn = False
        if out.tell():
            out.seek(-1, os.SEEK_END)
            torn = out.read(1) != b"\n"
        out.write((b"\n" if torn else b"") + _encode(rows))


def write_jsonl(file: Path, rows: Iterable[Line]) -> None:
    """Replace a file in one step."""
    write_bytes(file, _encode(rows))


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity; they become null."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encode(rows: Iterable[Line]) -> bytes:
    try:
        return b"".join(encode_json(finite(row)) + b"\n" for row in rows)
    except RecursionError:
        raise RunError("A line is nested too deeply to be written. Remove it.") from None
