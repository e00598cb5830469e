"""Trainings in processes of their own, so that none leaves memory, caches or a crash to the next.

Each is `marlhf ppo file.yaml` on the settings of one run, its output in a log beside the folder:

    runs/toy-sweep/ppo,n=5.yaml
    runs/toy-sweep/ppo,n=5.log
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from marlhf.runs.write import explained_writes, write_whole
from marlhf.settings import to_raw
from marlhf.sweep.plan import Run

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
"""Bytes of a log in which its last line is looked for."""


class Process(Protocol):
    """As much of `subprocess.Popen` as a sweep needs."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def wait(self) -> int: ...


@dataclass
class Job:
    """A training under way."""

    run: Run
    process: Process
    slot: int
    log: Path
    begin: int
    """Where this attempt's output begins in the log."""
    started: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def last_line(self) -> str:
        return (self._lines(most=TAIL) or [""])[-1]

    def complaint(self) -> str:
        """Why it ended, from what it said last: a sentence with its indented list, if any."""
        status, lines = self.process.poll() or 0, self._lines()
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

    def _lines(self, most: int | None = None) -> list[str]:
        """What it said in this attempt; only the last so many bytes of it, if given."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(self.begin if most is None else max(self.begin, end - most))
            text = file.read().decode("utf-8", errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()]


def begin(run: Run, slot: int, jobs: int, lock: int | None) -> Job:
    """Start a training, or go on with one."""
    beside = run.folder.parent
    recipe = beside / f"{run.folder.name}.yaml"
    log = beside / f"{run.folder.name}.log"
    with explained_writes(beside):
        beside.mkdir(parents=True, exist_ok=True)
        write_whole(recipe, yaml.safe_dump(to_raw(run.config), sort_keys=False, allow_unicode=True))
        log.touch()
    offset = log.stat().st_size
    environment = os.environ | surroundings(slot, jobs, run.config.device)
    process = start([run.kind, str(recipe)], log, environment, lock)
    return Job(run, process, slot, log, offset, time.monotonic())


def start(words: list[str], log: Path, environment: dict[str, str], lock: int | None) -> Process:
    """The command line in a session of its own: Ctrl-C is the sweep's to pass on."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )


def surroundings(slot: int, jobs: int, device: str) -> dict[str, str]:
    """Environment variables that divide this machine among jobs: its cores, and its GPUs if any."""
    found: dict[str, str] = {}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    gpus = visible_gpus() if jobs > 1 and device == "auto" else []
    if len(gpus) > 1:
        found["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return found


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def end(jobs: Sequence[Job]) -> None:
    """Ask all to save and end, and wait; to be interrupted again ends them at once."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        for job in jobs:
            if job.process.poll() is None:
                job.process.send_signal(number)
        try:
            for job in jobs:
                job.process.wait()
            return
        except KeyboardInterrupt:
            continue


def free_slot(jobs: Sequence[Job]) -> int:
    taken = {job.slot for job in jobs}
    return next(i for i in range(len(jobs) + 1) if i not in taken)


def brief(summary: dict[str, Any]) -> str:
    """The numbers of a finished run that a line has room for."""
    keys = ("eval/score", "eval/kl", "eval/length", "eval/loss", "eval/accuracy")
    found = [(key[5:], summary[key]) for key in keys if isinstance(summary.get(key), float)]
    return "  ".join(f"{name} {value:.4g}" for name, value in found)
