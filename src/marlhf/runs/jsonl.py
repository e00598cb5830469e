"""Files of JSON lines that grow while something is measured, and outlive whatever stops it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from marlhf.errors import MarlhfError

Line = dict[str, Any]


class FileError(MarlhfError, ValueError):
    """A file that cannot be written, with what to do about it."""


def read_lines(file: Path, setting: str | None = None) -> dict[str, Line]:
    """The last line of each prompt, by its key, of one setting: that of the last line if None.

    A killed process leaves its last line torn; that one is left out.
    """
    found: list[Line] = []
    if file.is_file():
        with file.open(encoding="utf-8", errors="replace") as lines:
            for text in lines:
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict) and {"setting", "key"} <= line.keys():
                    found.append(line)
    if setting is None:
        setting = found[-1]["setting"] if found else ""
    return {line["key"]: line for line in found if line["setting"] == setting}


def append_lines(file: Path, lines: Iterable[Line]) -> None:
    with _explained(file), file.open("ab+") as out:
        torn = False
        if out.tell():
            out.seek(-1, os.SEEK_END)
            torn = out.read(1) != b"\n"
        out.write((b"\n" if torn else b"") + _encode(lines))


def write_lines(file: Path, lines: Iterable[Line]) -> None:
    """Replace the file in one go: there is always either the old or the new one."""
    new = file.with_name(f"{file.name}.new")
    with _explained(file):
        new.write_bytes(_encode(lines))
        new.replace(file)


def _encode(lines: Iterable[Line]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@contextlib.contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise FileError(
            f"Cannot write {file}: {error.strerror}. Make room or give a folder that may be "
            "written to; the same command goes on from there."
        ) from error
