"""How long a training will take, so that none begins which the deadline would cut off."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlhf.sweep.jobs import TAIL, Job, tail
from marlhf.sweep.plan import Training
from marlhf.sweep.sweep_state import SweepState


def expected_seconds(
    training: Training, trainings: Sequence[Training], state: SweepState, running: Sequence[Job]
) -> float | None:
    """Seconds that are left of a training, judged by others of its kind; None where none ran.

    Those that are finished count first. While there are none, those that are running say how fast
    they are. Where both give their number of steps, time is taken to grow with it.
    """
    alike = [other for other in trainings if other.kind == training.kind]
    known = [
        seconds * _scale(training, other)
        for other in alike
        if (seconds := state.seconds(other)) is not None and state.is_finished(other.folder)
    ]
    known = known or [
        seconds * _scale(training, job.training)
        for job in running
        if job.training in alike and (seconds := _projected(job)) is not None
    ]
    return statistics.median(known) * _share_left(training) if known else None


def _scale(training: Training, other: Training) -> float:
    ours, theirs = training.config.num_steps, other.config.num_steps
    return ours / theirs if ours and theirs else 1.0


def _projected(job: Job) -> float | None:
    """All the seconds of a running training, if the rest goes on at its pace."""
    total, row = job.training.config.num_steps, _last_row(job.training.folder)
    if not total or not row.get("step"):
        return None
    trained = min(float(row.get("seconds") or 0.0), job.seconds)
    loading = job.seconds - trained
    return loading + trained * total / row["step"]


def _share_left(training: Training) -> float:
    """What is left of a training that was stopped, as a share of the whole."""
    total, row = training.config.num_steps, _last_row(training.folder)
    return max(0.0, 1.0 - row.get("step", 0) / total) if total else 1.0


def _last_row(folder: Path) -> dict[str, Any]:
    """The last complete line of metrics.jsonl; empty before the first."""
    try:
        lines = tail(folder / "metrics.jsonl", TAIL)
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return {}
