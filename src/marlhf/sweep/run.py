"""Trains what is not finished, several runs at a time, and sums up what came of it.

Trainings are processes of their own, so that none leaves memory, caches or a crash to the next.
Each is `marlhf ppo file.yaml` on the settings of one run, its output in a log beside the folder:

    runs/toy-sweep/ppo,n=5.yaml
    runs/toy-sweep/ppo,n=5.log
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group
from rich.live import Live
from rich.text import Text

from marlhf.evaluate.results import text_table
from marlhf.report.write import write_report
from marlhf.runs.atomic import explain_disk_errors, open_to_append, write_text
from marlhf.runs.layout import CHECKPOINTS
from marlhf.runs.read import NoRuns, read_run
from marlhf.runs.write import is_finished
from marlhf.runtime.progress import console, say
from marlhf.sweep.plan import Plan, Training, make_plan
from marlhf.sweep.sweep_state import SweepState, locked
from marlhf.train.recipe import ConfigError, Stage

CHILD = """
import os, signal, threading

def end_with_the_sweep():
    os.read(0, 1)  # returns when whoever holds the other end is gone
    os.kill(os.getpid(), signal.SIGTERM)  # which saves first

threading.Thread(target=end_with_the_sweep, daemon=True).start()
from marlhf.cli import main
main()
"""

TAIL = 4096
"""Bytes of a file in which its last line is looked for."""
STOP_POLL = 0.02
"""Seconds between looks at processes that were asked to end."""
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
class TrainingJob:
    """A training that is running."""

    training: Training
    process: subprocess.Popen[bytes]
    slot: int
    log: Path
    log_start: int
    """Where this attempt's output begins in the log, in bytes."""
    started: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def last_line(self) -> str:
        return (tail(self.log, TAIL, self.log_start) or [""])[-1]

    def failure_reason(self) -> str:
        """Why it ended, from what it said last: a sentence with its indented list, if any."""
        status, lines = self.process.poll() or 0, tail(self.log, start=self.log_start)
        if status < 0:
            name = signal.Signals(-status).name
            hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return f"It was ended by {name}{hint}. See {self.log}."
        if not lines:
            return f"It ended with status {status} and said nothing."
        at = len(lines) - 1
        while at > 0 and lines[at].startswith(" "):
            at -= 1
        said = "\n".join(lines[at:])
        traced = any(line.startswith("Traceback (most") for line in lines)
        return f"{said} See {self.log}." if traced else said


def tail(file: Path, most: int | None = None, start: int = 0) -> list[str]:
    """The lines of a file from an offset on; only those of its last `most` bytes, if given."""
    with file.open("rb") as opened:
        end = opened.seek(0, os.SEEK_END)
        opened.seek(start if most is None else max(start, end - most))
        text = opened.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def start_job(training: Training, slot: int, jobs: int, lock: int | None) -> TrainingJob:
    """Start a training, or resume one."""
    folder, raw = training.folder.parent, training.settings
    recipe = folder / f"{training.folder.name}.yaml"
    log = folder / f"{training.folder.name}.log"
    write_text(recipe, yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))
    with explain_disk_errors(folder), open_to_append(log) as output:
        offset = output.seek(0, os.SEEK_END)
    environment = os.environ | job_environment(slot, jobs, raw["device"])
    process = start([training.kind, str(recipe)], log, environment, lock)
    return TrainingJob(training, process, slot, log, offset, time.monotonic())


def start(
    words: list[str], log: Path, environment: dict[str, str], lock: int | None
) -> subprocess.Popen[bytes]:
    """The command line in a session of its own: Ctrl-C is the sweep's to pass on.

    Modules are found where this process finds them. `python -c` alone would import those of the
    current folder first, such as somebody's typer.py.
    """
    with open_to_append(log) as output:
        return subprocess.Popen(
            [sys.executable, "-c", f"import sys\nsys.path[:] = {sys.path}\n{CHILD}", *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )


def job_environment(slot: int, jobs: int, device: str) -> dict[str, str]:
    """Environment variables that divide this machine among jobs: its cores, and its GPUs if any."""
    environment: dict[str, str] = {}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    gpus = visible_gpus() if jobs > 1 and device == "auto" else []
    if len(gpus) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return environment


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def stop(jobs: Sequence[TrainingJob], patience: float = math.inf) -> None:
    """Ask all to save and end, and wait; what is not over after `patience` seconds is killed.

    Ctrl-C while waiting ends them at once: a training takes a second signal as such.
    """
    until = time.monotonic() + patience
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        for job in jobs:
            if job.process.poll() is None:
                job.process.send_signal(number)
        try:
            while any(job.process.poll() is None for job in jobs):
                if number != signal.SIGKILL and time.monotonic() > until:
                    break
                time.sleep(STOP_POLL)
            else:
                return
        except KeyboardInterrupt:
            continue


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
    running: list[TrainingJob] = field(default_factory=list)

    def run(self) -> None:
        """Work until all is finished, has failed, or the deadline has come."""
        total, finished = len(self.plan.runs), len(self._in_state("finished"))
        if finished:
            self.notice(f"{finished} of {total} trainings are finished already")
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
        if self.running and time.monotonic() > self.deadline:
            self.notice("the deadline has come: trainings save and end")
            self._stop(patience=SAVING)
        return bool(self.running) or self._next() is not None

    def _in_state(self, *states: str) -> list[Training]:
        return [t for t in self.plan.runs if self.state.of(t.folder) in states]

    def _next(self) -> Training | None:
        """The first training whose models are there, unless the deadline has come.

        What would start from the model of a training that failed is given up.
        """
        for training in self._in_state("waiting"):
            needed = {need: self.state.of(need) for need in training.needs}
            broken = [need for need, state in needed.items() if state == "failed"]
            if broken:
                note = f"{self.state.short(broken[0])} failed, whose model it starts from."
                self.state.mark(training, "failed", note)
            elif set(needed.values()) <= {"finished"} and time.monotonic() <= self.deadline:
                return training
        return None

    def _start(self, training: Training) -> None:
        resumed = (training.folder / CHECKPOINTS).is_dir()
        name = self.state.short(training.folder)
        self.notice(f"{name} {'resumes' if resumed else 'begins'}")
        slot = min({*range(self.num_jobs)} - {job.slot for job in self.running})
        self.running.append(start_job(training, slot, self.num_jobs, self.lock))
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
            self.state.mark(training, "failed", job.failure_reason(), seconds=job.seconds)
            said = f"failed: {self.state.note(training)}"
        done = len(self._in_state("finished", "failed"))
        self.notice(f"[{done}/{len(self.plan.runs)}] {name} {said}")

    def _stop(self, patience: float = math.inf) -> None:
        """Ask all trainings to save; the same command resumes them."""
        stop(self.running, patience)
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
