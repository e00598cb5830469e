"""Trains what is not finished, several runs at a time, and sums up what came of it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from marlhf.evaluate.results import text_table
from marlhf.report.write import write_report
from marlhf.runs.layout import CHECKPOINTS
from marlhf.runs.read import NoRuns, read_run
from marlhf.runs.write import is_finished
from marlhf.runtime.progress import console, say
from marlhf.sweep import jobs as processes
from marlhf.sweep.jobs import TrainingJob
from marlhf.sweep.plan import Plan, Training, make_plan
from marlhf.sweep.sweep_state import SweepState, locked
from marlhf.train.recipe import ConfigError, Stage

POLL = 0.1
"""Seconds between looks at the processes."""
SAVING = 60.0
"""Seconds that trainings have to save after the deadline."""
WITH_RANGE = ("score", "loss")
"""Columns whose mean over seeds is shown with the lowest and the highest."""


@dataclass(frozen=True)
class TrainingOutcome:
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
class SweepResult:
    """What a sweep has come to: all trainings of its folder, those of earlier calls included."""

    plan: Plan
    outcomes: tuple[TrainingOutcome, ...]
    report: Path | None

    @property
    def failed(self) -> list[TrainingOutcome]:
        """Those that this call tried in vain."""
        return [each for each in self._mine if each.state == "failed"]

    @property
    def left(self) -> list[TrainingOutcome]:
        """Those that this call stopped or did not begin, because of its deadline."""
        return [each for each in self._mine if each.state in ("stopped", "waiting")]

    @property
    def _mine(self) -> list[TrainingOutcome]:
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
) -> SweepResult:
    """Train every point of a recipe that is not finished, then write the report over all of them.

    `overrides` are those of the command line: one with several values (`"seed=0,1,2"`) is an axis.
    A training that fails is noted and does not stop the others. `deadline` is in minutes from now:
    what is running then saves and ends, and nothing more begins. `only` names the stages to train,
    as in `["ppo*"]`; those that they need come along.
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
    from marlhf.train.preflight import check_stages  # torch is not needed to plan

    check_stages([_as_stage(run, plan.root) for run in plan.runs])
    with locked(plan.root, notice) as lock:
        plan = make_plan(recipe, overrides, only)  # now that nobody else changes what is there
        state = SweepState(plan)
        state.write()
        Scheduler(plan, state, jobs, end, lock, notice).run()
        outcomes = tuple(_outcome(plan, name, entry) for name, entry in state.runs.items())
        try:
            report = write_report([plan.root], plan.root / "report.html")
        except NoRuns:  # nothing got as far as a first number
            report = None
    return SweepResult(plan, outcomes, report)


def _as_stage(training: Training, root: Path) -> Stage:
    """A training under the name of its folder, which says at which point a check fails."""
    name = str(training.folder.relative_to(root))
    return Stage(name, training.kind, training.config, name)


def _outcome(plan: Plan, name: str, entry: dict[str, Any]) -> TrainingOutcome:
    folder, numbers = plan.root / name, dict[str, float]()
    try:
        run = read_run(folder)
        numbers = {key: run.final(f"eval/{key}") for key in ("score", "kl", "length", "loss")}
        numbers["seconds"] = math.nan if run.seconds is None else run.seconds
    except NoRuns:  # it has not begun
        pass
    note = entry.get("note", "")
    return TrainingOutcome(name, folder, entry["stage"], entry["state"], note, **numbers)


@dataclass
class Scheduler:
    """What waits and what runs: each training starts once the models it needs are there."""

    plan: Plan
    state: SweepState
    num_jobs: int
    deadline: float
    """The end on the clock of `time.monotonic`; infinite for none."""
    lock: int | None
    notice: Callable[[str], None]
    waiting: list[Training] = field(default_factory=list)
    running: list[TrainingJob] = field(default_factory=list)
    failed: set[Path] = field(default_factory=set)

    def run(self) -> None:
        """Work until all is finished, has failed, or the deadline has come."""
        total = len(self.plan.runs)
        self.waiting = [t for t in self.plan.runs if not self.state.is_finished(t.folder)]
        if len(self.waiting) < total:
            self.notice(f"{total - len(self.waiting)} of {total} trainings are finished already")
        live = Live(console=console, auto_refresh=False, transient=True)
        try:
            with live:
                while self._step():
                    self._show(live)
                    time.sleep(POLL)
        except BaseException:
            self._stop()
            raise

    def _step(self) -> bool:
        """Start what may start and note what has ended; whether anything is running."""
        while len(self.running) < self.num_jobs and (training := self._next()) is not None:
            self._start(training)
        for job in [job for job in self.running if job.process.poll() is not None]:
            self._settle(job)
        self._drop_hopeless()
        if self.running and time.monotonic() > self.deadline:
            self.notice("the deadline has come: trainings save and end")
            self._stop(patience=SAVING)
        return bool(self.running) or self._next() is not None

    def _drop_hopeless(self) -> None:
        """Give up what would start from the model of a training that failed."""
        for training in list(self.waiting):
            broken = [need for need in training.needs if need in self.failed]
            if broken:
                note = f"{self.state.short(broken[0])} failed, whose model it starts from."
                self.failed.add(training.folder)
                self.state.mark(training, "failed", note)
                self.waiting.remove(training)

    def _next(self) -> Training | None:
        """The first training whose models are there, unless the deadline has come."""
        if time.monotonic() > self.deadline:
            return None
        ready = (t for t in self.waiting if all(map(self.state.is_finished, t.needs)))
        return next(ready, None)

    def _start(self, training: Training) -> None:
        resumed = (training.folder / CHECKPOINTS).is_dir()
        name = self.state.short(training.folder)
        self.notice(f"{name} {'resumes' if resumed else 'begins'}")
        self.waiting.remove(training)
        slot = processes.free_slot(self.running)
        self.running.append(processes.start_job(training, slot, self.num_jobs, self.lock))
        self.state.mark(training, "running")

    def _settle(self, job: TrainingJob) -> None:
        """Note how a process has ended."""
        self.running.remove(job)
        training, name = job.training, self.state.short(job.training.folder)
        if job.process.poll() == 0 and is_finished(training.folder):
            self.state.mark(training, "finished", seconds=job.seconds)
            numbers = _main_numbers(read_run(training.folder).summary)
            said = f"finished in {job.seconds:.0f} s  {numbers}".rstrip()
        else:
            self.failed.add(training.folder)
            self.state.mark(training, "failed", job.failure_reason(), seconds=job.seconds)
            said = f"failed: {self.state.note(training)}"
        total = len(self.plan.runs)
        done = total - len(self.waiting) - len(self.running)
        self.notice(f"[{done}/{total}] {name} {said}")

    def _stop(self, patience: float = math.inf) -> None:
        """Ask all trainings to save; the same command resumes them."""
        processes.stop(self.running, patience)
        for job in self.running:
            ended = is_finished(job.training.folder)
            state = "finished" if ended else "stopped"
            self.state.mark(job.training, state, seconds=job.seconds)
        self.running.clear()

    def _show(self, live: Live) -> None:
        """The last line of every training, where there is a terminal to show it on."""
        if not console.is_terminal or console.is_dumb_terminal:
            return
        lines = [f"{self.state.short(j.training.folder)}  {j.last_line}" for j in self.running]
        live.update(Group(*(Text(line[: console.width]) for line in lines)), refresh=True)


def _main_numbers(summary: dict[str, Any]) -> str:
    """The numbers of a finished run that a line has room for."""
    keys = ("eval/score", "eval/kl", "eval/length", "eval/loss", "eval/accuracy")
    numbers = [(key[5:], summary[key]) for key in keys if isinstance(summary.get(key), float)]
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers)


def describe(result: SweepResult) -> list[str]:
    """The table of a sweep: a row per training of the stages that no other starts from.

    A second one has the means of settings that were trained with several seeds.
    """
    needed = {folder for run in result.plan.runs for folder in run.needs}
    stages = {run.stage for run in result.plan.runs if run.folder in needed}
    rows = [each for each in result.outcomes if each.stage not in stages] or list(result.outcomes)
    columns = {"score": "score", "kl": "KL", "length": "length", "loss": "loss", "seconds": "s"}
    used = [c for c in columns if any(math.isfinite(getattr(row, c)) for row in rows)]
    if "score" in used and "loss" in used and all(math.isfinite(row.score) for row in rows):
        used.remove("loss")
    cells = [["run", "state", *(columns[c] for c in used)]]
    for row in rows:
        numbers = [getattr(row, c) for c in used]
        cells.append([row.name, row.state, *(_number(x, c) for x, c in zip(numbers, used))])
    lines = text_table(cells[0], cells[1:], words=2).split("\n")
    if means := _means_over_seeds(rows, used):
        ranged = {c: f"{columns[c]} [min, max]" for c in WITH_RANGE}
        header = ["mean over seeds", "seeds", *(ranged.get(c, columns[c]) for c in used)]
        lines += ["", *text_table(header, means).split("\n")]
    for each in result.failed:
        lines.append(f"{each.name} failed: {each.note}")
    return lines


def _means_over_seeds(rows: Sequence[TrainingOutcome], columns: Sequence[str]) -> list[list[str]]:
    """One row per setting, named by its folder: seeds are folders above. Empty without seeds."""
    settings: dict[str, list[TrainingOutcome]] = {}
    for row in rows:
        if row.state == "finished":
            settings.setdefault(row.folder.name, []).append(row)
    if all(len(seeds) < 2 for seeds in settings.values()):
        return []
    cells: list[list[str]] = []
    for name, seeds in settings.items():
        row = [name, str(len(seeds))]
        for column in columns:
            values = [getattr(seed, column) for seed in seeds]
            shown = _number(sum(values) / len(values), column)
            if column in WITH_RANGE:
                shown += f" [{_number(min(values), column)}, {_number(max(values), column)}]"
            row.append(shown)
        cells.append(row)
    return cells


def _number(value: float, column: str) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if column == "seconds" else f"{value:.3f}"
