"""Trainings in processes of their own, so that none leaves memory, caches or a crash to the next.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from marlhf.runs.atomic import explain_disk_errors, open_to_append, write_text
from marlhf.sweep.plan import Training

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


class Process(Protocol):
    """As much of `subprocess.Popen` as a sweep needs."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...


@dataclass
class TrainingJob:
    """A training that is running."""

    training: Training
    process: Process
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


def start(words: list[str], log: Path, environment: dict[str, str], lock: int | None) -> Process:
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


def free_slot(jobs: Sequence[TrainingJob]) -> int:
    taken = {job.slot for job in jobs}
    return next(i for i in range(len(jobs) + 1) if i not in taken)
