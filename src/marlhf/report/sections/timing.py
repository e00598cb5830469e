"""Where the seconds of a step went, and responses per second."""

from __future__ import annotations

import math

from markupsafe import Markup

from marlhf.intervals import quantiles
from marlhf.report.charts import Series
from marlhf.report.dots import stacked_bars
from marlhf.report.formats import duration, warn
from marlhf.report.groups import Group
from marlhf.report.page import Cell, figure, grid, part, section
from marlhf.runs.read import number

PHASES = (
    ("rollout", "var(--t0)"),
    ("score", "var(--t1)"),
    ("credit", "var(--t2)"),
    ("update", "var(--t3)"),
)
"""Greys, as colours are for runs."""
SCATTER = 2.0
"""Steps scatter where the slowest twentieth takes this many times the median."""


def timing(policies: list[Group]) -> Markup:
    """The phases of the median step, and responses per second."""
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    for group in policies:
        parts = [(phase, _median(group, f"time/{phase}"), colour) for phase, colour in PHASES]
        parts = [each for each in parts if each[1] >= 0]
        whole = _median(group, "time/step")
        rest = whole - sum(value for _, value, _ in parts)
        if parts and rest > 0.005 * whole:
            parts.append(("rest", rest, "var(--t4)"))
        if parts:
            bars.append((group.label, parts))
    if not bars:
        return Markup()
    keys = {phase: Series(phase, (), colour) for _, parts in bars for phase, _, colour in parts}
    rows: list[list[Cell]] = [[run, *each[:2]] for run, parts in bars for each in parts]
    chart = figure(
        "Seconds per step",
        stacked_bars(bars, x_label="median seconds per step"),
        key=part("legend", keys.values()),
        header=["run", "phase", "seconds"],
        rows=rows,
    )
    return section("timing", grid([chart, _speed_figure(policies)], "two"))


def _median(group: Group, key: str) -> float:
    return quantiles([value for run in group.runs for *_, value in run.curve(key)], [0.5])[0]


def _speed_figure(policies: list[Group]) -> Markup:
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    rows: list[list[Cell]] = []
    scattered: list[Markup] = []
    name = "responses per second"
    for group in policies:
        seconds = [took for run in group.runs for *_, took in run.curve("time/step")]
        median, slow = quantiles(seconds, [0.5, 0.95])
        rate = _median(group, "time/samples_per_second")
        if math.isnan(rate) and median > 0:
            rate = number(group.config.get("batch_size")) / median
        if rate > 0:
            bars.append((group.label, [(name, rate, group.colour)]))
            rows.append([group.label, rate, median, slow, len(seconds)])
        if slow > SCATTER * median:
            words = f" the median takes {duration(median)}, one in twenty {duration(slow)} or more."
            scattered.append(warn(f"Steps of {group.label} scatter:") + words)
    if not bars:
        return Markup()
    return figure(
        "Responses per second",
        stacked_bars(bars, x_label=f"median {name}"),
        note=Markup(" ").join(scattered),
        header=["run", name, "median step", "95% of steps within", "steps"],
        rows=rows,
    )
