"""JSON lines: files that grow while something is measured, and that a kill cannot spoil."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from marlhf.runs.atomic import encode_json, explain_disk_errors, open_to_append, write_bytes
from marlhf.runs.layout import RunError, leads_out

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
