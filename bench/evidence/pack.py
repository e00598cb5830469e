"""The small results of a sweep as one archive, without weights."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from marlhf.runs.atomic import read_jsonl
from marlhf.runs.layout import CONFIG, EVAL, EVALUATION, METRICS, STATE

LEFT_OUT = {"model", "best", "critic", "checkpoints", "cache"}
ENDINGS = {".json", ".jsonl", ".yaml", ".log"}
PAGE_FILES = {CONFIG, EVAL, METRICS, STATE}
"""What the page of results is made from, and all of `measured/`."""
DECIMALS = {"scores": 2, "gold": 2, "kl": 1, "length": 0}
"""Of the numbers of one prompt. Rounding moves a mean over 400 prompts by less than 0.002."""
SHOWN = ("kind", "step", "seconds", "rl/score", "rl/kl", "rl/length")
"""Metrics that a page may read, beside those of evaluations and what the critic explains."""


def pack(out: Path, file: Path, *, for_page: bool = False) -> Path:
    """Write the archive anew; a run that is not over is in it as far as it has come.

    With `for_page` only what the page is made from, with rounded numbers: small enough to commit.
    """
    new = file.with_name(f".{file.name}.new")
    with tarfile.open(new, "w:xz", preset=9 if for_page else 3) as archive:
        for path in sorted(out.rglob("*")):
            inside = path.relative_to(out)
            if path.suffix not in ENDINGS or LEFT_OUT & set(inside.parts[:-1]):
                continue
            if any(part.startswith(".") for part in inside.parts) or path == file:
                continue
            # The rows are the user's own; the prompts that were evaluated are in the samples.
            if inside.parts[0] == "data" and path.suffix == ".jsonl":
                continue
            evaluated = path.parent.name == EVALUATION and path.suffix == ".jsonl"
            of_page = path.name in PAGE_FILES or evaluated or inside.parts[0] == "measured"
            if for_page and not of_page:
                continue
            name = f"evidence/{inside}"
            shorten = _evaluated if evaluated else SHORTEN.get(path.name)
            if for_page and shorten:
                _add_bytes(archive, name, shorten(path))
            else:
                archive.add(path, name, filter=_anonymous)
    new.replace(file)
    return file


def unpack(file: Path, folder: Path) -> Path:
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return folder / "evidence"


def _rounded(file: Path) -> bytes:
    """The evaluations of a run with fewer decimals."""
    lines: list[str] = []
    for row in read_jsonl(file).rows:
        kept: dict[str, object] = {"step": row["step"]}
        for key, decimals in DECIMALS.items():
            if row.get(key):
                kept[key] = [_short(value, decimals) for value in row[key]]
        lines.append(json.dumps(kept, separators=(",", ":")) + "\n")
    return "".join(lines).encode()


def _evaluated(file: Path) -> bytes:
    """What `marlhf evaluate` found, without texts: how it sampled, then a list for each number."""
    rows = read_jsonl(file).rows
    kept = {"sampling": rows[0]["sampling"], "scores": {}} if rows else {}
    for name in rows[0]["scores"] if rows else ():
        values = [row["scores"].get(name) for row in rows]
        kept["scores"][name] = [_short(value, DECIMALS["scores"]) for value in values]
    for name in ("kl", "length"):
        kept[name] = [_short(row.get(name), DECIMALS[name]) for row in rows]
    return (json.dumps(kept, separators=(",", ":")) + "\n").encode()


def _few_metrics(file: Path) -> bytes:
    lines = [
        {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in row.items()
            if name in SHOWN or name.startswith("eval/") or "explained_variance" in name
        }
        for row in read_jsonl(file).rows
    ]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


SHORTEN = {EVAL: _rounded, METRICS: _few_metrics}


def _short(value: float | None, decimals: int) -> float | int | None:
    return None if value is None else round(value, decimals or None)


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the owner's name."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
