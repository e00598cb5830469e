"""All that the report needs, without weights, as one small archive."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evidence.settings import HUB, keep, read

ARCHIVE = "evidence.tar.xz"
LEFT_OUT = {"model", "best", "critic", "checkpoints", "cache"}
ENDINGS = {".json", ".jsonl", ".yaml", ".log"}


def pack(out: Path, file: Path) -> Path:
    """Write the archive anew; a run that is not over is in it as far as it has come."""
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


def join(outs: Sequence[Path], folder: Path) -> Path:
    """Tasks of several unpacked archives as one: each task is whole, from the first that has it.

    Tasks share nothing but the model they begin with, so that they may come from several days.
    Runs of one task do not: its SFT and reward models are its own.
    """
    settings = [read(out) for out in outs]
    tasks = {task: out for out, s in zip(reversed(outs), reversed(settings)) for task in s.tasks}
    for task, out in tasks.items():
        for part in (task, f"data/{task}", f"timing/{task}"):
            if (out / part).is_dir():
                shutil.copytree(out / part, folder / part)
    keep(replace(settings[0], out=str(folder), tasks=tuple(t for t in HUB if t in tasks)))
    return folder
