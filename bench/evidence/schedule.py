"""Jobs side by side on one GPU, each in a process of its own, until all are done or time is up.

A job that is done says so in `state/`, which is all that the next call looks at. At the end of its
time a process is asked to stop: marlhf saves the step it is at, and the next call goes on there.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evidence.jobs import Job
from evidence.settings import Settings

STOPPED = 75
"""How a child ends that was asked to, everything saved."""
SAVING = 40
"""Seconds a child has to save what it is at."""
POLL = 0.2
PR_SET_PDEATHSIG = 1
TRIES = 2


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    began: float


@dataclass
class Schedule:
    """What is running, what failed how often, and until when to go on."""

    settings: Settings
    jobs: Sequence[Job]
    slots: int
    deadline: float
    command: Sequence[str]
    running: list[Running] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)

    def run(self) -> bool:
        """Go through the jobs; whether all of them are done."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, self._asked) for number in numbers]
        try:
            return self._work()
        finally:
            for number, handler in zip(numbers, before):
                signal.signal(number, handler)

    def _work(self) -> bool:
        while True:
            self._reap()
            if time.monotonic() > self.deadline - SAVING:
                self._stop()
                break
            while (job := self._next()) is not None:
                self._start(job)
            if not self.running:
                break
            time.sleep(POLL)
        return all(is_done(self.settings, job.name) for job in self.jobs)

    def _next(self) -> Job | None:
        """The first job that may start now; one that wants to be alone holds back the rest."""
        busy = {each.job.name for each in self.running}
        if len(self.running) >= self.slots or any(each.job.alone for each in self.running):
            return None
        for job in self.jobs:
            waiting = not all(is_done(self.settings, name) for name in job.needs)
            if job.name in busy or waiting or is_done(self.settings, job.name):
                continue
            if self.failures.get(job.name, 0) >= TRIES:
                continue
            return None if job.alone and self.running else job
        return None

    def _start(self, job: Job) -> None:
        log = Path(self.settings.out) / "logs" / f"{job.name.replace('/', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        budget = self.settings.token_budget >> self.failures.get(job.name, 0)
        words = [*self.command, "--job", job.name, "--token-budget", str(budget)]
        with log.open("ab") as out:
            process = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                preexec_fn=_die_with_parent,
            )
        self.running.append(Running(job, process, time.monotonic()))
        self._say(f"{job.name} begins")

    def _environment(self) -> dict[str, str]:
        """Cores are shared, and what one process has compiled the others find."""
        cores = os.cpu_count() or 1
        defaults = {
            "OMP_NUM_THREADS": str(max(1, cores // self.slots)),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(self.settings.out).resolve() / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(4, cores // 4))),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        return defaults | dict(os.environ)

    def _reap(self) -> None:
        for each in list(self.running):
            code = each.process.poll()
            if code is None:
                continue
            self.running.remove(each)
            name, seconds = each.job.name, time.monotonic() - each.began
            if code == 0:
                mark_done(self.settings, name, seconds)
                for spent in ("checkpoints", *(["model"] if "/try-" in name else [])):
                    shutil.rmtree(self.settings.folder(name) / spent, ignore_errors=True)
                self._say(f"{name} done in {seconds:.0f} s")
            elif code == STOPPED or -code in (signal.SIGTERM, signal.SIGINT):
                self._say(f"{name} stopped")
            else:
                self.failures[name] = self.failures.get(name, 0) + 1
                self._say(f"{name} FAILED with {code}; see logs/{name.replace('/', '-')}.log")

    def _stop(self) -> None:
        for each in self.running:
            each.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + SAVING
        while self.running and time.monotonic() < until:
            self._reap()
            time.sleep(POLL)
        for each in self.running:
            each.process.kill()
            each.process.wait()
        self._reap()

    def _asked(self, number: int, _: object) -> None:
        self._say(f"asked to stop by {signal.Signals(number).name}")
        self.deadline = 0.0

    def _say(self, words: str) -> None:
        left = self.deadline - time.monotonic()
        until = f" ({left:.0f} s left)" if 0 < left < 1e6 else ""
        print(f"{time.strftime('%H:%M:%S')} {words}{until}", flush=True)
        sys.stdout.flush()


def _die_with_parent() -> None:
    """A killed schedule leaves nobody behind who would hold the run's folder or the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _state(settings: Settings, name: str) -> Path:
    return Path(settings.out) / "state" / f"{name.replace('/', '-')}.json"


def is_done(settings: Settings, name: str) -> bool:
    return _state(settings, name).is_file()


def mark_done(settings: Settings, name: str, seconds: float) -> None:
    file = _state(settings, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"job": name, "seconds": round(seconds, 1)}) + "\n", "utf-8")
    new.replace(file)
