"""Runs a sweep, and what it has come to."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlhf.report.write import write_report
from marlhf.runs.read import NoRuns, read_run
from marlhf.runtime.progress import say
from marlhf.sweep.plan import Plan, Training, make_plan
from marlhf.sweep.schedule import Schedule
from marlhf.sweep.sweep_state import SweepState, locked
from marlhf.train.preflight import check_stages
from marlhf.train.recipe import ConfigError, Stage


@dataclass(frozen=True)
class Outcome:
    """How one training of a sweep stands."""

    name: str
    """Its folder within the sweep's."""
    folder: Path
    stage: str
    state: str
    """`finished`, `failed`, `stopped` or `waiting`."""
    note: str = ""
    """Why it failed."""
    score: float = math.nan
    kl: float = math.nan
    length: float = math.nan
    loss: float = math.nan
    seconds: float = math.nan


@dataclass(frozen=True)
class Sweep:
    """What a sweep has come to: all trainings of its folder, those of earlier calls included."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    report: Path | None

    @property
    def failed(self) -> list[Outcome]:
        """Those that this call tried in vain."""
        return [each for each in self._mine if each.state == "failed"]

    @property
    def left(self) -> list[Outcome]:
        """Those that this call stopped or did not begin, because of its deadline."""
        return [each for each in self._mine if each.state in ("stopped", "waiting")]

    @property
    def _mine(self) -> list[Outcome]:
        mine = {run.folder for run in self.plan.runs}
        return [each for each in self.outcomes if each.folder in mine]


def sweep(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    jobs: int = 1,
    deadline: float | None = None,
    only: Sequence[str] = (),
    notice: Callable[[str], None] = say,
) -> Sweep:
    """Train every point of a recipe that is not finished, then write the report over all of them.

    `overrides` are those of the command line: one with several values (`"seed=0,1,2"`) is an axis.
    A training that fails is noted and does not stop the others. `deadline` is in minutes from now:
    what cannot be expected to finish before it does not begin, and what is running then saves and
    ends. `only` names the stages to train, as in `["ppo*"]`; those that they need come along.
    """
    end = math.inf if deadline is None else time.monotonic() + 60 * deadline
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1; got {jobs}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "A sweep starts processes of its own: run it without torchrun. With several GPUs "
            "--jobs gives each its own."
        )
    plan = make_plan(recipe, overrides, only)
    check_stages([_as_stage(run, plan.root) for run in plan.runs])
    with locked(plan.root, notice) as lock:
        plan = make_plan(recipe, overrides, only)  # now that nobody else changes what is there
        state = SweepState(plan)
        state.write()
        Schedule(plan, state, jobs, end, lock, notice).run()
        outcomes = tuple(_outcome(plan, name, entry) for name, entry in state.runs.items())
        try:
            report = write_report([plan.root], plan.root / "report.html")
        except NoRuns:  # nothing got as far as a first number
            report = None
    return Sweep(plan, outcomes, report)


def _as_stage(training: Training, root: Path) -> Stage:
    """A training under the name of its folder, which says at which point a check fails."""
    return Stage(str(training.folder.relative_to(root)), training.kind, training.config)


def _outcome(plan: Plan, name: str, entry: dict[str, Any]) -> Outcome:
    folder = plan.root / name
    try:
        run = read_run(folder)
    except NoRuns:
        return Outcome(name, folder, entry["stage"], entry["state"], entry.get("note", ""))
    return Outcome(
        name,
        folder,
        entry["stage"],
        entry["state"],
        entry.get("note", ""),
        score=run.final("eval/score"),
        kl=run.final("eval/kl"),
        length=run.final("eval/length"),
        loss=run.final("eval/loss"),
        seconds=math.nan if run.seconds is None else run.seconds,
    )
