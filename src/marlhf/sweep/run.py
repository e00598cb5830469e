"""Runs a sweep: each training that is not finished, in an order that suits, several at a time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from marlhf.config import ConfigError
from marlhf.report.write import write_report
from marlhf.runs.read import NoRuns, read_run
from marlhf.sweep import jobs as processes
from marlhf.sweep.jobs import Job
from marlhf.sweep.plan import Plan, Run, make_plan
from marlhf.sweep.sweep_state import Book, finished, locked
from marlhf.train.progress import console, say

POLL = 0.1
"""Seconds between looks at the processes."""


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
        mine = {run.folder for run in self.plan.runs}
        return [each for each in self.outcomes if each.state == "failed" and each.folder in mine]


def sweep(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    jobs: int = 1,
    notice: Callable[[str], None] = say,
) -> Sweep:
    """Train every point of a recipe that is not finished, then write the report over all of them.

    `overrides` are those of the command line: one with several values (`"seed=0,1,2"`) is an axis.
    A training that fails is noted and does not stop the others.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1; got {jobs}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "A sweep starts processes of its own: run it without torchrun. With several GPUs "
            "--jobs gives each its own."
        )
    plan = make_plan(recipe, overrides)
    with locked(plan.root, notice) as lock:
        plan = make_plan(recipe, overrides)  # now that nobody else changes what is there
        book = Book(plan)
        book.write()
        _work(plan, book, jobs, lock, notice)
        outcomes = tuple(_outcome(plan, name, book.runs[name]) for name in book.runs)
        try:
            report = write_report([plan.root], plan.root / "report.html")
        except NoRuns:  # nothing got as far as a first number
            report = None
    return Sweep(plan, outcomes, report)


def _work(
    plan: Plan, book: Book, jobs: int, lock: int | None, notice: Callable[[str], None]
) -> None:
    waiting = [run for run in plan.runs if book.state_in(run.folder) != "finished"]
    total, running = len(plan.runs), list[Job]()
    failed: set[Path] = set()
    if len(waiting) < total:
        notice(f"{total - len(waiting)} of {total} trainings are finished already")
    live = Live(console=console, auto_refresh=False, transient=True)
    shown = console.is_terminal and not console.is_dumb_terminal
    try:
        with live:
            while waiting or running:
                for run in list(waiting):
                    lacking = [need for need in run.needs if book.state_in(need) != "finished"]
                    if broken := [need for need in run.needs if need in failed]:
                        failed.add(run.folder)
                        note = f"{book.short(broken[0])} failed, whose model it starts from."
                        book.mark(run, "failed", note)
                        waiting.remove(run)
                    elif not lacking and len(running) < jobs:
                        waiting.remove(run)
                        verb = "goes on" if (run.folder / "checkpoints").is_dir() else "begins"
                        notice(f"{book.short(run.folder)} {verb}")
                        slot = processes.free_slot(running)
                        running.append(processes.begin(run, slot, jobs, lock))
                        book.mark(run, "running")
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    if not _settle(job, book):
                        failed.add(job.run.folder)
                    left = len(waiting) + len(running)
                    notice(f"[{total - left}/{total}] {_told(job, book)}")
                if shown:
                    lines = [f"{book.short(j.run.folder)}  {j.last_line}" for j in running]
                    width = console.width
                    live.update(Group(*(Text(line[:width]) for line in lines)), refresh=True)
                if running:
                    time.sleep(POLL)
    except BaseException:
        processes.end(running)
        for job in running:
            book.mark(job.run, "finished" if finished(job.run.folder) else "stopped")
        raise


def _settle(job: Job, book: Book) -> bool:
    """Whether a process that has ended did what it was for; the book says so either way."""
    if job.process.poll() == 0 and finished(job.run.folder):
        book.mark(job.run, "finished")
        return True
    book.mark(job.run, "failed", job.complaint())
    return False


def _told(job: Job, book: Book) -> str:
    name = book.short(job.run.folder)
    if book.state_in(job.run.folder) == "failed":
        return f"{name} failed: {book.note(job.run)}"
    numbers = processes.brief(read_run(job.run.folder).summary)
    return f"{name} finished in {job.seconds:.0f} s  {numbers}".rstrip()


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


def describe_plan(plan: Plan) -> list[str]:
    """What `--dry-run` tells: the points, and what is left to train for each."""
    width = max(len(point.name) for point in plan.points)
    known: set[Path] = {run.folder for run in plan.runs if finished(run.folder)}
    left = len(plan.runs) - len(known)
    lines = [
        f"{len(plan.points)} points in {plan.root}: {len(plan.runs)} trainings, {left} of them left"
    ]
    by_folder: dict[Path, Run] = {run.folder: run for run in plan.runs}
    told: set[Path] = set()
    for point in plan.points:
        mine = [by_folder[folder] for folder in point.runs]
        shown = [
            f"{run.folder.relative_to(plan.root)}{' (finished)' * (run.folder in known)}"
            for run in mine
            if run.folder not in told
        ]
        told |= set(point.runs)
        lines.append(f"{point.name:{width}}  {'  '.join(shown)}".rstrip())
    return lines


def describe(found: Sweep) -> list[str]:
    """The table of a sweep: a row a training of the stages that no other starts from."""
    needed = {folder for run in found.plan.runs for folder in run.needs}
    stages = {run.stage for run in found.plan.runs if run.folder in needed}
    rows = [each for each in found.outcomes if each.stage not in stages] or list(found.outcomes)
    columns = {"score": "score", "kl": "KL", "length": "length", "loss": "loss", "seconds": "s"}
    used = [c for c in columns if any(math.isfinite(getattr(row, c)) for row in rows)]
    if "score" in used and "loss" in used and all(math.isfinite(row.score) for row in rows):
        used.remove("loss")
    cells = [["run", "state", *(columns[c] for c in used)]]
    for row in rows:
        numbers = [getattr(row, c) for c in used]
        cells.append([row.name, row.state, *(_number(x, c) for x, c in zip(numbers, used))])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in cells
    ]
    for each in found.failed:
        lines.append(f"{each.name} failed: {each.note}")
    return lines


def _number(value: float, column: str) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if column == "seconds" else f"{value:.3f}"
