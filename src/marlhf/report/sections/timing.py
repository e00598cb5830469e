"""Where the seconds of a step went, and responses per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from marlhf.intervals import quantiles
from marlhf.report.dots import stacked_bars
from marlhf.report.groups import Group
from marlhf.report.page import Cell, duration, figure, grid, part, section, warn
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


@dataclass(frozen=True)
class Speed:
    """Responses over all steps on record, and how long steps took."""

    per_second: float
    median_step: float
    slow_step: float
    """Seconds of the slowest twentieth of the steps, or more."""
    num_steps: int


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
    keys = dict.fromkeys((phase, colour, "") for _, parts in bars for phase, _, colour in parts)
    rows: list[list[Cell]] = [[run, *each[:2]] for run, parts in bars for each in parts]
    chart = figure(
        "Seconds per step",
        stacked_bars(bars, x_label="median seconds per step"),
        key=part("legend", entries=list(keys)),
        header=["run", "phase", "seconds"],
        rows=rows,
    )
    return section("timing", grid([chart, _speed_figure(policies)], "two"))


def _median(group: Group, key: str) -> float:
    return quantiles([value for run in group.runs for *_, value in run.curve(key)], [0.5])[0]


def speed(group: Group) -> Speed:
    """Of all seeds together. A mean of the rates of steps would count fast steps too often."""
    responses = 0.0
    seconds: list[float] = []
    batch = number(group.config.get("batch_size"))
    for run in group.runs:
        rates = {step: rate for step, _, rate in run.curve("time/samples_per_second")}
        for step, _, took in run.curve("time/step"):
            seconds.append(took)
            responses += rates[step] * took if step in rates else batch
    median, slow = quantiles(seconds, [0.5, 0.95])
    rate = responses / sum(seconds) if sum(seconds) else math.nan
    return Speed(rate, median, slow, len(seconds))


def _speed_figure(policies: list[Group]) -> Markup:
    speeds = [(group, times) for group in policies if (times := speed(group)).per_second > 0]
    if not speeds:
        return Markup()
    scattered = [
        warn(f"Steps of {group.label} scatter:")
        + f" the median takes {duration(times.median_step)}, "
        + f"one in twenty {duration(times.slow_step)} or more."
        for group, times in speeds
        if times.slow_step > SCATTER * times.median_step
    ]
    name = "responses per second"
    bars = [(group.label, [(name, times.per_second, group.colour)]) for group, times in speeds]
    return figure(
        "Responses per second",
        stacked_bars(bars, x_label=name),
        note=Markup(" ").join(scattered),
        header=["run", name, "median step", "95% of steps within", "steps"],
        rows=[
            [group.label, times.per_second, times.median_step, times.slow_step, times.num_steps]
            for group, times in speeds
        ],
    )
