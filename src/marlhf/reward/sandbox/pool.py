"""The pool of fork servers. Each has a thread of the host that gives it programs one by one."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from marlhf.errors import MarlhfError
from marlhf.reward.sandbox import kernel
from marlhf.reward.sandbox.protocol import Call, Case, Outcome, Program, Suite
from marlhf.reward.sandbox.worker import Execution, SuiteRun, Worker, WorkerDied

PRELOAD = (
    *("array", "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools"),
    *("hashlib", "heapq", "itertools", "json", "math", "operator", "queue", "random", "re"),
    *("statistics", "string", "tempfile", "typing", "numpy"),
)
"""Imported once per fork server, before any program; modules that are not installed are skipped."""

_LAYER_CHOICES = (
    {"namespaces": True, "landlock": True, "seccomp": True},
    {"namespaces": False, "landlock": True, "seccomp": True},
)
"""Layers to try, in this order; a warning says when the first choice is not available."""
_PROBE = """
import os, socket
def leaks():
    succeeded = []
    def attempt(name, action):
        try:
            action()
        except Exception:
            return
        succeeded.append(name)
    attempt("files", lambda: open("/etc/passwd").read())
    attempt("folders", lambda: os.listdir("/etc"))
    attempt("network", socket.socket)
    attempt("processes", lambda: os.fork() or os._exit(0))
    attempt("signals", lambda: os.kill(os.getppid(), 0))
    attempt("programs", lambda: os.execv("/bin/true", ["true"]))
    return succeeded
"""
_REMEDY = (
    "Linux 5.13 or later has both (x86_64 or aarch64). In a container, allow user namespaces or "
    "Landlock: with Docker, use a seccomp profile that permits them, or a newer Docker. "
    "`allow_weak=True` runs programs with the layers that there are: use it only if nothing of "
    "value can be reached from this machine."
)


class SandboxUnavailable(MarlhfError, RuntimeError):
    """This machine cannot confine untrusted programs."""


class SandboxWarning(UserWarning):
    """The sandbox lacks a layer."""


class Sandbox:
    """A pool of fork servers, one per processor unless `workers` says otherwise.

    `layers` lists the active layers. `memory_mb` is what a program may allocate beyond what
    Python uses at its start; `output_bytes` limits each of its outputs.
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
        first = self._start_first(allow_weak)
        count = workers or (len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)
        try:
            self._workers = [first, *(Worker(self._settings) for _ in range(count - 1))]
            for worker in self._workers[1:]:
                self._wait_until_ready(worker)
            if not self._weak:
                self._probe()
        except BaseException:
            self.close()
            raise

    def _start_first(self, allow_weak: bool) -> Worker:
        """Start the first server, with every layer that this machine supports."""
        if sys.platform != "linux":
            raise SandboxUnavailable(f"The sandbox needs Linux, and this is {sys.platform}.")
        try:
            os.close(kernel.memory_file(b"probe"))
        except OSError as error:
            raise SandboxUnavailable(
                f"The sandbox needs the system call memfd_create, which fails here ({error}). In a "
                "container, use a seccomp profile that permits it."
            ) from error
        missing: dict[str, str] = {}
        for choice in _LAYER_CHOICES:
            self._settings |= choice
            worker = Worker(self._settings)
            try:
                self.layers: dict[str, bool | str] = worker.layers()
                break
            except OSError as error:
                worker.close()
                missing["namespaces" if choice["namespaces"] else "server"] = str(error)
        else:
            raise SandboxUnavailable(f"The sandbox could not start: {_listed(missing)}. {_REMEDY}")
        for layer in ("namespaces", "landlock", "seccomp"):
            if not self.layers[layer]:
                missing.setdefault(layer, "the kernel does not offer it to this process")
        self.layers |= {f"no {layer}": why for layer, why in missing.items()}
        self._weak = "seccomp" in missing or {"namespaces", "landlock"} <= missing.keys()
        if self._weak and not allow_weak:
            worker.close()
            raise SandboxUnavailable(
                "The sandbox needs seccomp, and namespaces or Landlock. "
                f"Missing here: {_listed(missing)}. {_REMEDY}"
            )
        if self._weak:
            text = f"UNTRUSTED PROGRAMS RUN ALMOST UNCONFINED. Missing: {_listed(missing)}."
            warnings.warn(text, SandboxWarning, stacklevel=3)
        elif "namespaces" in missing:
            text = f"Only Landlock and seccomp confine the programs: {_listed(missing)}."
            warnings.warn(text, SandboxWarning, stacklevel=3)
        return worker

    def _probe(self) -> None:
        """Try, harmlessly, what no program may do, before the first program runs."""
        for outcome in self.run([Program(_PROBE, calls=[Call("leaks")])] * len(self._workers)):
            if outcome.status != "ok":
                raise SandboxUnavailable(
                    f"The sandbox cannot run a simple program: {outcome.status}, "
                    f"{outcome.stderr.strip() or 'no message'}. Raise `memory_mb` if it is small."
                )
            if outcome.returned != [[]]:
                raise SandboxUnavailable(
                    f"The sandbox leaks {outcome.returned} with layers {self.layers}. {_REMEDY}"
                )

    def run(self, programs: Sequence[Program]) -> list[Outcome]:
        """Run each program once, distributed over the workers; outcomes keep the order."""
        suites = [Suite(p.source, [Case(p.stdin, p.calls)], p.seconds) for p in programs]
        return [outcome for [outcome] in self.run_suites(suites)]

    def run_suites(self, suites: Sequence[Suite]) -> list[list[Outcome]]:
        """Run each source with its cases, distributed over the workers by source."""
        if self._owner != os.getpid():
            raise RuntimeError(
                "This sandbox belongs to the process that created it, and this is a fork of that "
                "process. Create a Sandbox here."
            )
        with self._lock:
            if not self._workers:
                raise RuntimeError("This sandbox is closed. Create a new one.")
            jobs = [SuiteRun(suite) for suite in suites]
            waiting = iter([job for job in jobs if job.suite.cases])  # shared by the threads
            stop, places = threading.Event(), range(len(self._workers))
            try:
                with ThreadPoolExecutor(len(places)) as threads:
                    try:
                        list(threads.map(lambda place: self._work(place, waiting, stop), places))
                    finally:
                        stop.set()  # after Ctrl-C: end the programs and leave a usable pool
            finally:
                for job in jobs:
                    job.close()
            return [job.outcomes for job in jobs]

    def _work(self, place: int, waiting: Iterator[SuiteRun], stop: threading.Event) -> None:
        """Run jobs on one worker, in a thread of its own, until none is left."""
        try:
            for job in waiting:
                while not job.done and not stop.is_set():
                    self._run_case(place, job, stop)
                job.close()  # frees a descriptor: a batch may have thousands of sources
        except BaseException:
            stop.set()
            raise

    def _run_case(self, place: int, job: SuiteRun, stop: threading.Event) -> None:
        """Run the next case of a job. A program under which its server dies is tried once more."""
        worker, seconds = self._workers[place], job.suite.seconds or self.seconds
        execution = Execution(worker, job, seconds, self.output_bytes)
        try:
            outcome = execution.follow(stop)
        except (WorkerDied, ConnectionError):
            execution.close()
            worker.close()
            self._workers[place] = new = Worker(self._settings)
            self._wait_until_ready(new)
            job.deaths += 1
            if job.deaths == 1:
                return
            job.deaths = 0
            message = "The fork server died twice under this program, perhaps for lack of memory."
            outcome = Outcome("sandbox_error", stderr=message)
        job.outcomes.append(outcome)

    def close(self) -> None:
        """Stop the workers. None of their processes is left when this returns."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close() if self._owner == os.getpid() else worker.release()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_workers"):
            self.close()

    def _wait_until_ready(self, worker: Worker) -> None:
        try:
            layers = worker.layers()
        except OSError as error:
            raise SandboxUnavailable(f"A fork server could not start: {error}") from error
        if any(self.layers[name] != state for name, state in layers.items()):
            raise SandboxUnavailable(
                f"A fork server has other layers than the first: {layers}, not {self.layers}."
            )


def _packages() -> list[str]:
    """Folders of installed packages."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return [path for path in dict.fromkeys(paths) if os.path.isdir(path)]


def _readable() -> list[str]:
    """Folders that a program may read: Python, its packages, and shared libraries."""
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    paths = (*system, *python, os.path.join(sys.base_prefix, "lib"), *_packages())
    return [path for path in dict.fromkeys(paths) if os.path.isdir(path)]


def _listed(missing: dict[str, str]) -> str:
    return "; ".join(f"{layer}: {why}" for layer, why in missing.items())
