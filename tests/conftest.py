"""The environment of tests, their order, which may be skipped, and what every test starts with."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

gc.disable()  # until all is imported: see pytest_collection_finish
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start; models here are minuscule
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # as the command line has it
REAL_FSYNC = os.fsync
os.fsync = os.fstat  # a run waits for the disk 40 times; tests of durability have `disk_events`
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and so in processes of tests
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # run under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

EXPECTED_SKIPS = (
    "needs a CUDA device",
    "names no python with vLLM",
    "make test-engines",  # verl has an environment of its own
    "needs SkyRL",  # it cannot be installed beside our torch
    "could not import 'textarena'",  # an extra with a dozen packages of its own
    "the real data is not on this machine",
    "this version of transformers",
    "only a fork of this process",
    "ordinary user",
    "by +SKIP option",  # examples that need a network
    *os.environ.get("MARLHF_EXPECTED_SKIPS", "").split(";"),
)
"""Why tests may be skipped on CI. Any other skip fails it: a check that should run did not."""
_unexpected_skips: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands tests to others does not import torch, which takes seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for name in ("models_for_tests", "small_runs"):
            config.pluginmanager.import_plugin(name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n auto`: one more than cores, for the time in which a test waits.

    It does for other processes, browsers, servers and deadlines, a sixth of the time in all.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return (len(affinity(0)) if affinity else os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first: with a process for each core, none is left to run alone at the end.

    There the other files follow in reverse, since many of the last train, and the doctests, which
    come first otherwise, are short.
    """
    files = {path: number for number, path in enumerate(item.path for item in items)}
    direction = -1 if hasattr(config, "workerinput") else 1

    def place(item: pytest.Item) -> tuple[bool, int]:
        long = any(map(item.get_closest_marker, ("slow", "distributed")))
        return not long, direction * files[item.path]

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """The half a million objects of torch and transformers stay: nothing searches them anew.

    What tests make is mostly freed without the collector, which need not look as often.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file or group run in one process, which sets up once what they share."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFileOrGroup(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.split("::")[0] if group == nodeid else group

    return ByFileOrGroup(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not any(part and part in reason for part in EXPECTED_SKIPS):
            _unexpected_skips[report.nodeid] = reason


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "CI" in os.environ and _unexpected_skips and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that has reported all its tests ends at once."""
    if hasattr(config, "workerinput"):
        from forked import end  # which imports torch

        end(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if "CI" in os.environ and _unexpected_skips:
        terminalreporter.section("skipped, but should run on CI")
        for name, reason in _unexpected_skips.items():
            terminalreporter.line(f"{name}: {reason}")


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """No test leaves its handlers to the next."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None:  # one that was not installed from Python
            signal.signal(number, handler)


@pytest.fixture
def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Syncs, by the real `fsync`, and renames in order: ("sync", path), ("rename", target)."""
    events: list[tuple[str, str]] = []
    rename = os.replace

    def sync(descriptor: int) -> None:
        REAL_FSYNC(descriptor)
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def replace(source: Any, target: Any, **options: Any) -> None:
        rename(source, target, **options)
        events.append(("rename", str(target)))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    return events
