"""What a run stands on: the runs whose models it began with, and how large its own is.

A path in a config says little: `runs/a/sft/model` and `runs/b/sft/model` may be two seeds of one
setting, or two models of different size. So a path into another run's folder is read as that run,
and what was chosen there counts as chosen here, under its stage's name (`sft.learning_rate`).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marlhf.config.rl import RLConfig
from marlhf.config.settings import flatten
from marlhf.fields import settings_with
from marlhf.runs.layout import CONFIG, MODEL, is_run, read_config, read_state
from marlhf.runs.read import Run

OUTSIDE_IDENTITY = settings_with(RLConfig, "outside_identity")
"""Settings by which two trainings of the same thing may differ."""
MAX_HEADER = 100_000_000


def chosen(run: Run) -> dict[str, Any]:
    """What was chosen for a run and for the runs it stands on, under dotted names.

    Paths beside the run's own folder are given relative to it, so that the same recipe run
    twice into two folders is recognised as the same.
    """
    return dict(_chosen(run.config, run.path, {run.path.resolve()}))


def _chosen(config: dict[str, Any], folder: Path, seen: set[Path]) -> Iterator[tuple[str, Any]]:
    """Own settings before those of the runs behind: what was learnt last is read first."""
    behind: list[tuple[str, Path]] = []
    output = config.get("output_dir")
    beside = output.rstrip("/").rpartition("/")[0] + "/" if isinstance(output, str) else "/"
    for key, value in flatten(config).items():
        if key.split(".")[0] in OUTSIDE_IDENTITY:
            continue
        origin = origin_of(config, folder, value) if isinstance(value, str) else None
        if origin is not None:
            stage = _stage_of(origin)
            yield key, f"@{stage}"
            if origin not in seen:
                seen.add(origin)
                behind.append((stage, origin))
        elif isinstance(value, str) and beside != "/" and value.startswith(beside):
            yield key, "../" + value[len(beside) :]
        else:
            yield key, value
    for stage, origin in behind:
        for key, value in _chosen(read_config(origin), origin, seen):
            name = key if key.split(".")[0] in ("sft", "reward") else f"{stage}.{key}"
            yield name, value


def origin_of(config: dict[str, Any], folder: Path, value: str) -> Path | None:
    """The run folder that a path in a config points into, moved together with it or not."""
    if "/" not in value or "\0" in value or len(value) > 1000:
        return None
    places = [Path(value)]
    output = config.get("output_dir")
    if isinstance(output, str):
        places.insert(0, folder / os.path.relpath(value, output))
    for place in places:
        for candidate in (place, place.parent):
            if is_run(candidate) and (candidate / CONFIG).is_file():
                return candidate.resolve()
    return None


def _stage_of(folder: Path) -> str:
    stage = read_state(folder).get("stage")
    return stage if isinstance(stage, str) else folder.name


def num_parameters(run: Run) -> int | None:
    """How many numbers a run's model has, from the headers of its weights; None if unknown.

    An unfinished run has no weights yet, and one with LoRA may have kept the adapter alone: then
    the model that it began with is counted.
    """
    folders = [run.path / MODEL]
    start = run.config.get("model")
    if isinstance(start, str) and (origin := origin_of(run.config, run.path, start)):
        folders.append(origin / MODEL)
    elif isinstance(start, str) and "/" in start and "\0" not in start:
        folders.append(Path(start))
    for folder in folders:
        if count := parameters_in(folder):
            return count
    return None


def parameters_in(folder: Path) -> int:
    """How many numbers the weights in a model's folder have; 0 if there are none."""
    return sum(map(_count, sorted(folder.glob("model*.safetensors"))))


def _count(file: Path) -> int:
    """The numbers in a safetensors file: 8 bytes of length, then a JSON header with shapes."""
    try:
        with file.open("rb") as data:
            (length,) = struct.unpack("<Q", data.read(8))
            header = json.loads(data.read(min(length, MAX_HEADER)))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        return sum(math.prod(shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return 0
