"""How long a training will take, so that none begins which the deadline would cut off."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from marlhf.fields import settings_with
from marlhf.runs.jsonl import read_jsonl
from marlhf.runs.layout import METRICS
from marlhf.sweep.jobs import Job
from marlhf.sweep.plan import Training
from marlhf.sweep.sweep_state import SweepState

RECENT = 1 << 15
"""Bytes at the end of metrics.jsonl that tell how fast a training is now: a dozen steps or more."""


def expected_seconds(
    training: Training, trainings: Sequence[Training], state: SweepState, running: Sequence[Job]
) -> float | None:
    """Seconds that are left of a training, judged by those most like it; None where none ran.

    Alike are trainings of its kind with the fewest other settings: values from continuations take
    ten times as long as those of a critic. Those that are running count first, by their present
    pace: it depends on how many share the machine. Else those that are finished. Time is taken to
    grow with the number of steps, where both give it.
    """
    paces = {job.training.folder: _projected(job) for job in running}
    known: dict[tuple[int, bool], list[float]] = {}
    for other in trainings:
        seconds, runs = paces.get(other.folder), True
        if seconds is None and state.is_finished(other.folder):
            seconds, runs = state.seconds(other), False
        if seconds is not None and other.kind == training.kind:
            rank = (_differing_settings(training, other), not runs)
            known.setdefault(rank, []).append(seconds * _scale(training, other))
    return statistics.median(known[min(known)]) * _share_left(training) if known else None


def _differing_settings(training: Training, other: Training) -> int:
    """How many settings differ, but for those that do not tell trainings apart."""
    ours, theirs = training.config, other.config
    idle = {"num_steps", *settings_with(type(ours), "idle")}
    names = [field.name for field in fields(ours) if field.name not in idle]
    return sum(getattr(ours, name) != getattr(theirs, name) for name in names)


def _scale(training: Training, other: Training) -> float:
    ours, theirs = training.config.num_steps, other.config.num_steps
    return ours / theirs if ours and theirs else 1.0


def _projected(job: Job) -> float | None:
    """All the seconds of a running training at its pace: loading, then every step."""
    total, rows = job.training.config.num_steps, _last_rows(job.training.folder)
    if not total or len(rows) < 2 or rows[0]["step"] == rows[-1]["step"]:
        return None
    loading = max(0.0, job.seconds - rows[-1]["seconds"])
    pace = (rows[-1]["seconds"] - rows[0]["seconds"]) / (rows[-1]["step"] - rows[0]["step"])
    return loading + pace * total


def _share_left(training: Training) -> float:
    """What is left of a training that was stopped, as a share of the whole."""
    total, rows = training.config.num_steps, _last_rows(training.folder)
    return max(0.0, 1.0 - rows[-1]["step"] / total) if total and rows else 1.0


def _last_rows(folder: Path) -> list[dict[str, Any]]:
    """The last complete lines of metrics.jsonl; none before the first."""
    rows = read_jsonl(folder / METRICS, RECENT).rows
    return [row for row in rows if {"step", "seconds"} <= row.keys()]
