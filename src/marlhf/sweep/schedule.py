"""Trains what is not finished, several at a time, each as soon as the models it needs are there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from marlhf.runs.layout import CHECKPOINTS
from marlhf.runs.read import read_run
from marlhf.runs.write import is_finished
from marlhf.runtime.progress import console
from marlhf.sweep import jobs as processes
from marlhf.sweep.durations import expected_seconds
from marlhf.sweep.jobs import Job
from marlhf.sweep.plan import Plan, Training
from marlhf.sweep.sweep_state import SweepState

POLL = 0.1
"""Seconds between looks at the processes."""
RECONSIDER = 5.0
"""Seconds after which a training that seemed too long is looked at again: others may have sped up
since there are fewer of them."""
SAVING = 60.0
"""Seconds that trainings have to save after the deadline."""


@dataclass
class Schedule:
    """What waits and what runs."""

    plan: Plan
    state: SweepState
    num_jobs: int
    deadline: float
    """The end on the clock of `time.monotonic`; infinite for none."""
    lock: int | None
    notice: Callable[[str], None]
    waiting: list[Training] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    failed: set[Path] = field(default_factory=set)
    too_long: dict[Path, float] = field(default_factory=dict)
    """Trainings that the deadline is too near for, and when that was found."""

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
        """The first training whose models are there and which the deadline leaves time for."""
        now = time.monotonic()
        left = self.deadline - now
        for training in self.waiting if left > 0 else ():
            if not all(map(self.state.is_finished, training.needs)):
                continue
            if now < self.too_long.get(training.folder, -math.inf) + RECONSIDER:
                continue
            if left == math.inf:
                return training
            seconds = expected_seconds(training, self.plan.runs, self.state, self.running)
            if seconds is None or seconds <= left:
                return training
            if training.folder not in self.too_long:
                name = self.state.short(training.folder)
                self.notice(f"{name} waits: {seconds:.0f} s expected, {left:.0f} s left")
            self.too_long[training.folder] = now
        return None

    def _start(self, training: Training) -> None:
        resumed = (training.folder / CHECKPOINTS).is_dir()
        name = self.state.short(training.folder)
        self.notice(f"{name} {'resumes' if resumed else 'begins'}")
        self.waiting.remove(training)
        slot = processes.free_slot(self.running)
        self.running.append(processes.start_job(training, slot, self.num_jobs, self.lock))
        self.state.mark(training, "running")

    def _settle(self, job: Job) -> None:
        """Note how a process has ended."""
        self.running.remove(job)
        training, name = job.training, self.state.short(job.training.folder)
        if job.process.poll() == 0 and is_finished(training.folder):
            self.state.mark(training, "finished", seconds=job.seconds)
            numbers = processes.main_numbers(read_run(training.folder).summary)
            said = f"finished in {job.seconds:.0f} s  {numbers}".rstrip()
        else:
            self.failed.add(training.folder)
            self.state.mark(training, "failed", job.complaint(), seconds=job.seconds)
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
