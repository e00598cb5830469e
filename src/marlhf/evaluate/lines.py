"""Files of JSON lines that grow while something is measured, and outlive whatever stops it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


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
    file.parent.mkdir(parents=True, exist_ok=True)
    torn = file.is_file() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" if torn else "")
        out.writelines(json.dumps(line) + "\n" for line in lines)


def write_lines(file: Path, lines: Iterable[Line]) -> None:
    """Replace the file in one go: there is always either the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    new.replace(file)
