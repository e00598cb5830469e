"""All that the report needs, without weights, as one small archive."""

from __future__ import annotations

import tarfile
from pathlib import Path

from evidence.settings import Settings

ARCHIVE = "evidence.tar.xz"
LEFT_OUT = {"model", "best", "critic", "checkpoints", "cache"}
ENDINGS = {".json", ".jsonl", ".yaml", ".log"}


def pack(settings: Settings, file: Path) -> Path:
    """Write the archive anew; a run that is not over is in it as far as it has come."""
    out = Path(settings.out)
    new = file.with_name(f".{file.name}.new")
    with tarfile.open(new, "w:xz", preset=3) as archive:
        for path in sorted(out.rglob("*")):
            inside = path.relative_to(out)
            if path.suffix not in ENDINGS or LEFT_OUT & set(inside.parts[:-1]):
                continue
            if any(part.startswith(".") for part in inside.parts) or path == file:
                continue
            # The rows themselves are the user's own; the test prompts are in the answers.
            if inside.parts[0] == "data" and path.suffix == ".jsonl":
                continue
            archive.add(path, f"evidence/{inside}")
    new.replace(file)
    return file


def unpack(file: Path, folder: Path) -> Path:
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return folder / "evidence"
