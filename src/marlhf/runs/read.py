"""Run folders, read from disk whatever state a killed run left them in; and what a run stands on.

A path in a config says little: `runs/a/sft/model` and `runs/b/sft/model` may be two seeds of one
setting, or two models of different size. So a path into another run's folder is read as that run,
and what was chosen there counts as chosen here, under its stage's name (`sft.learning_rate`).
"""

from __future__ import annotations

import difflib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlhf.config.rl import RLConfig
from marlhf.config.settings import flatten
from marlhf.errors import MarlhfError
from marlhf.fields import settings_with
from marlhf.intervals import mean
from marlhf.runs import layout
from marlhf.runs.atomic import read_jsonl

Row = dict[str, Any]

SKIPPED_FOLDERS = {layout.CHECKPOINTS, layout.MODEL, layout.BEST, layout.CRITIC}
MAX_MAGNITUDE = 1e30
"""Beyond this a number is a divergence, not a measurement: it is treated as missing."""


class NoRuns(MarlhfError, ValueError):
    """Nothing to report on, with what was looked for and where."""


@dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out prompts: a number a prompt, NaN where none was recorded."""

    step: int
    scores: list[float]
    gold: list[float] | None = None
    kl: list[float] | None = None
    length: list[float] | None = None
    sft_scores: list[float] | None = None
    earned: list[float] | None = None
    """What a response earned in each tenth of its length, where rewards had places."""


@dataclass(frozen=True)
class Run:
    """One stage of one training, as its folder recorded it.

    `train` and `evals` hold one row per step in order of steps; a resumed run that wrote
    a step twice keeps the later row. `problems` says what could not be read.
    """

    path: Path
    name: str
    stage: str
    status: str = "unknown"
    seed: int | None = None
    seconds: float | None = None
    note: str = ""
    summary: Row = field(default_factory=dict)
    about: Row = field(default_factory=dict)
    config: Row = field(default_factory=dict)
    train: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_policy(self) -> bool:
        """Whether this run trained a policy by reinforcement learning."""
        return layout.facts_of(self.stage).samples

    @property
    def is_empty(self) -> bool:
        return not (self.train or self.evals or self.samples or self.summary)

    @property
    def last_step(self) -> int | None:
        steps = [row["step"] for row in self.train[-1:] + self.evals[-1:]]
        return max(steps, default=None)

    def curve(self, key: str) -> list[tuple[int, float, float]]:
        """(step, seconds, value) wherever `key` was recorded; seconds may be NaN."""
        return [
            (row["step"], number(row.get("seconds")), value)
            for row in self._rows_of(key)
            if key in row and math.isfinite(value := number(row[key]))
        ]

    def final(self, key: str) -> float:
        """The last recorded value, NaN where there is none."""
        values = (number(row[key]) for row in reversed(self._rows_of(key)) if key in row)
        return next(filter(math.isfinite, values), math.nan)

    def _rows_of(self, key: str) -> list[Row]:
        return self.evals if key.startswith("eval/") else self.train


def number(value: object) -> float:
    """A recorded value as a float; NaN for text, null, infinities and divergences."""
    if type(value) is float:  # nearly all are, and long runs have millions
        return value if abs(value) < MAX_MAGNITUDE else math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    # Compared before the conversion: float() of a huge int raises.
    return float(value) if abs(value) < MAX_MAGNITUDE else math.nan


def nearest_folder(path: Path) -> str:
    """`Did you mean runs/toy? ` where that is beside it and its name is like that of `path`."""
    beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"Did you mean {path.parent / near[0]}? " if near else ""


def find_runs(paths: Sequence[Path | str]) -> list[Run]:
    """Every run under `paths`: run folders, or folders that hold them up to three levels down."""
    by_folder: dict[Path, Run] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise NoRuns(
                f"There is no folder {path}. {nearest_folder(path)}Give the folder of a run (its "
                "`output_dir`), or one that holds several."
            )
        folders = list(_run_folders(path, depth=3)) if path.is_dir() else []
        if not folders:
            raise NoRuns(
                f"{path} holds no run: neither it nor the folders in it have a run.json or a "
                "metrics.jsonl. Give the `output_dir` of a training."
            )
        for folder in folders:
            if folder.resolve() not in by_folder:
                by_folder[folder.resolve()] = read_run(folder)
    runs = list(by_folder.values())
    if not runs:
        raise NoRuns("No path was given. Give the folder of at least one run.")
    if all(run.is_empty for run in runs):
        names = ", ".join(str(run.path) for run in runs)
        raise NoRuns(
            f"Nothing has been recorded yet in {names}. Wait for the first logged step, or look "
            "at the training's output for why it ended before one."
        )
    return sorted(runs, key=lambda run: layout.order_of(run.stage))


def read_run(path: Path | str) -> Run:
    """Read one run folder; whatever is missing, torn or not a number is left out."""
    path = Path(path)
    if not path.is_dir():
        raise NoRuns(f"There is no folder {path}. Give the folder of a run.")
    if not layout.is_run(path):
        raise NoRuns(
            f"{path} is not a run: it has neither run.json nor metrics.jsonl. "
            "Give the `output_dir` of a training."
        )
    links = [
        name
        for name in (layout.STATE, layout.CONFIG, layout.METRICS, layout.EVAL, layout.SAMPLES)
        if layout.leads_out(path / name)
    ]
    problems = [f"{name} is a link out of the folder and was left out" for name in links]
    about, config = layout.read_state(path), layout.read_config(path)
    for name, content in ((layout.STATE, about), (layout.CONFIG, config)):
        if not content and (path / name).is_file() and name not in links:
            problems.append(f"{name} is damaged and was left out")
    metrics = _read_rows(path / layout.METRICS, problems)
    if not metrics and about.get("status") == "finished":
        problems.append(f"{layout.METRICS} is missing or empty: there are no curves")
    train = _by_step(row for row in metrics if row.get("kind", "train") == "train")
    evaluations = [
        evaluation
        for row in _by_step(_read_rows(path / layout.EVAL, problems))
        if (evaluation := _evaluation(row)) is not None
    ]
    evals = _by_step(row for row in metrics if row.get("kind") == "eval")
    summary = about.get("summary")
    seed = about.get("seed")
    elapsed = [number(about.get("seconds"))]
    elapsed += [number(row.get("seconds")) for row in train[-1:] + evals[-1:]]
    return Run(
        path=path,
        name=_words(about, "name") or path.resolve().name,
        stage=_words(about, "stage") or _guess_stage(train + evals),
        status=_words(about, "status") or "unknown",
        seed=seed if isinstance(seed, int) else None,
        seconds=max(filter(math.isfinite, elapsed), default=None),
        note=_words(about, "note"),
        summary=summary if isinstance(summary, dict) else {},
        about=about,
        config=config,
        train=train,
        evals=_merge(evals, evaluations, train),
        evaluations=evaluations,
        samples=_read_rows(path / layout.SAMPLES, problems),
        problems=problems,
    )


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """The run folders at and below `folder`; one that has metrics of its own is not searched."""
    if (folder / layout.METRICS).is_file():
        yield folder
        return
    inner: list[Path] = []
    if depth > 0:
        for child in sorted(folder.iterdir()):
            hidden = child.name.startswith(".") or child.name in SKIPPED_FOLDERS
            if child.is_dir() and not hidden:
                inner += _run_folders(child, depth - 1)
    if inner:
        yield from inner
    elif layout.is_run(folder):
        yield folder


def _words(about: Row, key: str) -> str:
    value = about.get(key)
    return value if isinstance(value, str) else ""


def _read_rows(file: Path, problems: list[str]) -> list[Row]:
    """The objects of a JSON-lines file; lines that are not JSON are counted."""
    lines = read_jsonl(file)
    if lines.num_unread:
        plural = "line" if lines.num_unread == 1 else "lines"
        problems.append(f"{lines.num_unread} broken {plural} of {file.name} left out")
    return lines.rows


def _by_step(rows: Iterator[Row] | list[Row]) -> list[Row]:
    """One row per step, in order; the later one wins, as in a run resumed from a checkpoint."""
    by_step: dict[int, Row] = {}
    for row in rows:
        step = number(row.get("step"))
        if math.isfinite(step):
            by_step[int(step)] = {**row, "step": int(step)}
    return [by_step[step] for step in sorted(by_step)]


def _evaluation(row: Row) -> Evaluation | None:
    scores = _numbers(row.get("scores"))
    if scores is None:
        return None
    rest = {key: _numbers(row.get(key)) for key in ("gold", "kl", "length", "sft_scores", "earned")}
    return Evaluation(step=row["step"], scores=scores, **rest)


def _numbers(values: object) -> list[float] | None:
    if not isinstance(values, list) or not values:
        return None
    # The sum tells at once of all: it is no number if one of them is none, and large if one is.
    if set(map(type, values)) == {float} and sum(map(abs, values)) < MAX_MAGNITUDE:
        return values
    numbers = [number(value) for value in values]
    return numbers if any(map(math.isfinite, numbers)) else None


def _merge(evals: list[Row], evaluations: list[Evaluation], train: list[Row]) -> list[Row]:
    """Evaluation rows with what only eval.jsonl knows: step 0, and means never logged."""
    seconds = {row["step"]: row.get("seconds") for row in train}
    merged: dict[int, Row] = {}
    for evaluation in evaluations:
        row: Row = {"step": evaluation.step, "eval/score": mean(evaluation.scores)}
        row["seconds"] = 0.0 if evaluation.step == 0 else seconds.get(evaluation.step)
        for key in ("gold", "kl", "length"):
            row[f"eval/{key}"] = mean(getattr(evaluation, key) or [])
        merged[evaluation.step] = row
    for row in evals:
        known = merged.get(row["step"], {})
        said = {k: v for k, v in row.items() if k not in known or math.isfinite(number(v))}
        merged[row["step"]] = known | said
    return [merged[step] for step in sorted(merged)]


def _guess_stage(rows: list[Row]) -> str:
    keys = {key for row in rows[:1] for key in row}
    if "rl/group_std" in keys:  # PPO has no groups of responses to a prompt
        return "rloo"
    prefixes = {key.split("/")[0] for key in keys}
    return next((stage for stage in layout.NOT_RL if stage in prefixes), "ppo")


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
        for key, value in _chosen(layout.read_config(origin), origin, seen):
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
            if layout.is_run(candidate) and (candidate / layout.CONFIG).is_file():
                return candidate.resolve()
    return None


def _stage_of(folder: Path) -> str:
    stage = layout.read_state(folder).get("stage")
    return stage if isinstance(stage, str) else folder.name


def num_parameters(run: Run) -> int | None:
    """How many numbers a run's model has, from the headers of its weights; None if unknown.

    An unfinished run has no weights yet, and one with LoRA may have kept the adapter alone: then
    the model that it began with is counted.
    """
    folders = [run.path / layout.MODEL]
    start = run.config.get("model")
    if isinstance(start, str) and (origin := origin_of(run.config, run.path, start)):
        folders.append(origin / layout.MODEL)
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
