"""The pool of fork servers, and the loop that feeds and watches them."""

from __future__ import annotations

import os
import selectors
import site
import sys
import sysconfig
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

from marlhf.errors import MarlhfError
from marlhf.reward.sandbox.protocol import Call, Case, Outcome, Program, Suite
from marlhf.reward.sandbox.worker import Job, Run, Worker, WorkerDied

PRELOAD = (
    *("array", "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools"),
    *("hashlib", "heapq", "itertools", "json", "math", "operator", "queue", "random", "re"),
    *("statistics", "string", "tempfile", "typing", "numpy"),
)
"""Loaded once, before any program; those that are not installed are left out."""

_PLANS = (
    {"namespaces": True, "landlock": True, "seccomp": True},
    {"namespaces": False, "landlock": True, "seccomp": True},
)
"""What a server is told to put up; the second where the first fails, and that is said aloud."""
_PROBE = """
import os, socket
def leaks():
    found = []
    def attempt(name, deed):
        try:
            deed()
        except Exception:
            return
        found.append(name)
    attempt("files", lambda: open("/etc/passwd").read())
    attempt("folders", lambda: os.listdir("/etc"))
    attempt("network", socket.socket)
    attempt("processes", lambda: os.fork() or os._exit(0))
    attempt("signals", lambda: os.kill(os.getppid(), 0))
    attempt("programs", lambda: os.execv("/bin/true", ["true"]))
    return found
"""
_REMEDY = (
    "A Linux of 5.13 or later has both (x86_64 or aarch64). In a container, allow user namespaces "
    "or Landlock: with Docker, a seccomp profile that permits them, or a newer Docker. "
    "`allow_weak=True` runs programs all the same, with what there is: only where nothing of "
    "worth can be reached from this machine."
)


class SandboxUnavailable(MarlhfError, RuntimeError):
    """This machine cannot hold untrusted programs."""


class SandboxWarning(UserWarning):
    """The sandbox is weaker than it could be."""


class Sandbox:
    """A pool of fork servers, one a processor unless `workers` says otherwise.

    `layers` has the walls that are up. `memory_mb` is what a program may take on top of what
    Python has at its start; `output_bytes` holds for each of its outputs.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        memory_mb: int = 512,
        seconds: float = 5.0,
        output_bytes: int = 1 << 20,
        preload: Sequence[str] = PRELOAD,
        allow_weak: bool = False,
    ) -> None:
        self.seconds, self.output_bytes = seconds, output_bytes
        self._settings: dict[str, Any] = {
            "memory_mb": memory_mb,
            "preload": list(preload),
            "packages": _packages(),
            "readable": _readable(),
        }
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._workers: list[Worker] = []
        first = self._found(allow_weak)
        count = workers or (len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)
        try:
            self._workers = [first, *(Worker(self._settings) for _ in range(count - 1))]
            for worker in self._workers[1:]:
                self._await(worker)
            if not self._weak:
                self._probe()
        except BaseException:
            self.close()
            raise

    def _found(self, allow_weak: bool) -> Worker:
        """The first server, with every layer that this machine allows."""
        if sys.platform != "linux":
            raise SandboxUnavailable(f"The sandbox needs Linux, and this is {sys.platform}.")
        missing: dict[str, str] = {}
        for plan in _PLANS:
            self._settings |= plan
            worker = Worker(self._settings)
            try:
                self.layers: dict[str, bool | str] = worker.layers()
                break
            except OSError as error:
                worker.close()
                missing["namespaces" if plan["namespaces"] else "server"] = str(error)
        else:
            raise SandboxUnavailable(f"The sandbox could not start: {_listed(missing)}. {_REMEDY}")
        for layer in ("namespaces", "landlock", "seccomp"):
            if not self.layers[layer]:
                missing.setdefault(layer, "this kernel does not offer it to this process")
        self.layers |= {f"no {layer}": why for layer, why in missing.items()}
        self._weak = "seccomp" in missing or {"namespaces", "landlock"} <= missing.keys()
        if self._weak and not allow_weak:
            worker.close()
            raise SandboxUnavailable(
                "The sandbox needs seccomp, and namespaces or Landlock. "
                f"Missing here: {_listed(missing)}. {_REMEDY}"
            )
        if self._weak:
            text = f"UNTRUSTED PROGRAMS RUN ALMOST FREELY. Missing: {_listed(missing)}."
            warnings.warn(text, SandboxWarning, stacklevel=3)
        elif "namespaces" in missing:
            text = f"Landlock and seccomp alone hold the programs: {_listed(missing)}."
            warnings.warn(text, SandboxWarning, stacklevel=3)
        return worker

    def _probe(self) -> None:
        """Harmless attempts at what no program may do, before the first one is let in."""
        for outcome in self.run([Program(_PROBE, calls=[Call("leaks")])] * len(self._workers)):
            if outcome.status != "ok":
                raise SandboxUnavailable(
                    f"The sandbox does not run a plain program: {outcome.status}, "
                    f"{outcome.stderr.strip() or 'no message'}. Raise `memory_mb` if it is small."
                )
            if outcome.returned != [[]]:
                raise SandboxUnavailable(
                    f"The sandbox leaks {outcome.returned} with layers {self.layers}. {_REMEDY}"
                )

    def run(self, programs: Sequence[Program]) -> list[Outcome]:
        """Each program once, spread over the workers; outcomes in the order given."""
        suites = [Suite(p.source, [Case(p.stdin, p.calls)], p.seconds) for p in programs]
        return [outcome for [outcome] in self.run_suites(suites)]

    def run_suites(self, suites: Sequence[Suite]) -> list[list[Outcome]]:
        """Each source with its cases, spread over the workers by source.

        A source that does not compile gives every case that one outcome.
        """
        if self._owner != os.getpid():
            raise RuntimeError(
                "This sandbox belongs to the process that made it, and this one is a fork of it. "
                "Make a Sandbox here."
            )
        with self._lock:
            if not self._workers:
                raise RuntimeError("This sandbox is closed. Make a new one.")
            jobs = [Job(suite) for suite in suites]
            try:
                _Loop(self, [job for job in jobs if job.suite.cases]).run()
            finally:
                for job in jobs:
                    job.close()
            return [job.outcomes for job in jobs]

    def close(self) -> None:
        """End the workers. Nothing of them or of a program is left when this returns."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close() if self._owner == os.getpid() else worker.forget()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_workers"):
            self.close()

    def _replace(self, worker: Worker) -> Worker:
        """A new server in the place of one that died, behind the same walls."""
        worker.close()
        new = Worker(self._settings)
        self._workers[self._workers.index(worker)] = new
        self._await(new)
        return new

    def _await(self, worker: Worker) -> None:
        try:
            layers = worker.layers()
        except OSError as error:
            raise SandboxUnavailable(f"A fork server could not start: {error}") from error
        if any(self.layers[name] != told for name, told in layers.items()):
            raise SandboxUnavailable(
                f"A fork server has other layers than the first one: {layers}, not {self.layers}."
            )


class _Loop:
    """One call of `run_suites`: jobs to idle workers, and an eye on what runs."""

    def __init__(self, sandbox: Sandbox, jobs: list[Job]) -> None:
        self.sandbox, self.waiting = sandbox, deque(jobs)
        self.selector = selectors.DefaultSelector()
        self.running: set[Run] = set()

    def run(self) -> None:
        workers = list(self.sandbox._workers)
        try:
            for worker in workers:
                self._next(worker)
            while self.running:
                now = time.monotonic()
                for run in [run for run in self.running if run.deadline <= now]:
                    self._overdue(run)
                wait = min((run.deadline for run in self.running), default=now) - now
                for key, _ in self.selector.select(max(wait, 0.0)):
                    self._serve(*key.data)
        except BaseException:  # Ctrl-C above all: the programs end, and the pool can be used again
            for run in list(self.running):
                self._stop_watching(run)
                run.close()
                self.sandbox._replace(run.worker)
            raise
        finally:
            self.selector.close()

    def _next(self, worker: Worker, job: Job | None = None) -> None:
        while job or self.waiting:
            job = job or self.waiting.popleft()
            seconds = job.suite.seconds or self.sandbox.seconds
            run = Run(worker, job, seconds, self.sandbox.output_bytes)
            if run.started:
                break
            run.close()
            worker = self._bury(worker, job)
            job = None if job.done else job
        else:
            return
        self.running.add(run)
        self.selector.register(worker.socket, selectors.EVENT_READ, (run, None))
        for fd in run.pipes:
            self.selector.register(fd, selectors.EVENT_READ, (run, fd))

    def _serve(self, run: Run, fd: int | None) -> None:
        if run not in self.running:
            return  # ended earlier in this round
        if fd is not None:
            if not run.read(fd):
                self.selector.unregister(fd)
            return
        try:
            if run.hear():
                self._ended(run)
        except (WorkerDied, ConnectionError):
            self._died(run)

    def _ended(self, run: Run) -> None:
        self._stop_watching(run)
        outcome, job = run.finish(), run.job
        job.outcomes.append(outcome)
        if outcome.status == "compile_error" and not job.suite.stop_early:
            job.outcomes += [outcome] * (len(job.suite.cases) - len(job.outcomes))
        if job.done:
            job.close()  # one descriptor less: a batch may have thousands of sources
        self._next(run.worker, None if job.done else job)

    def _overdue(self, run: Run) -> None:
        if run.killed:  # and still there: what is stuck is left to its server's end
            self._died(run)
        else:
            run.kill("timeout")

    def _died(self, run: Run) -> None:
        self._stop_watching(run)
        run.close()
        job = run.job
        worker = self._bury(run.worker, job)
        self._next(worker, None if job.done else job)

    def _bury(self, worker: Worker, job: Job) -> Worker:
        """A fresh worker; the program in hand is tried once more, then given up."""
        job.deaths += 1
        if job.deaths > 1:
            told = "The fork server died twice under this program, for want of memory perhaps."
            job.outcomes.append(Outcome("sandbox_error", stderr=told))
            job.deaths = 0
        return self.sandbox._replace(worker)

    def _stop_watching(self, run: Run) -> None:
        self.running.discard(run)
        watched = self.selector.get_map()
        for file in (run.worker.socket, *run.pipes):
            if file in watched:
                self.selector.unregister(file)


def _packages() -> list[str]:
    """Where installed packages lie."""
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]


def _readable() -> list[str]:
    """What a program may read: Python, its packages, and the system's shared libraries."""
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    found = (*system, *python, os.path.join(sys.base_prefix, "lib"), *_packages())
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]


def _listed(missing: dict[str, str]) -> str:
    return "; ".join(f"{layer}: {why}" for layer, why in missing.items())
