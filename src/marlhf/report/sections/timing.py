"""Where the seconds of a step went, and responses per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from marlhf.intervals import quantiles
from marlhf.report.bars import stacked_bars
from marlhf.report.charts import legend
from marlhf.report.groups import Group
from marlhf.report.page import Cell, duration, figure, grid, section, text
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


def timing(policies: list[Group]) -> str:
    """The phases of the median step, and responses per second."""
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    rows: list[list[Cell]] = []
    for group in policies:
        parts = [(phase, _median(group, f"time/{phase}"), colour) for phase, colour in PHASES]
        parts = [part for part in parts if math.isfinite(part[1]) and part[1] >= 0]
        whole = _median(group, "time/step")
        rest = whole - sum(value for _, value, _ in parts)
        if parts and rest > 0.005 * whole:
            parts.append(("rest", rest, "var(--t4)"))
        if parts:
            bars.append((group.label, parts))
            rows += [[group.label, phase, seconds] for phase, seconds, _ in parts]
    if not bars:
        return ""
    keys = dict.fromkeys((phase, colour) for _, parts in bars for phase, _, colour in parts)
    chart = figure(
        "Seconds per step",
        stacked_bars(bars, x_label="median seconds per step"),
        file="seconds per step",
        key=legend([(*each, "") for each in keys]),
        header=["run", "phase", "seconds"],
        rows=rows,
    )
    return section(
        "timing",
        "Time",
        "Medians over steps, by phase: sampling responses, scoring them, and updating the models. "
        "Responses per second are all responses over all seconds of the steps on record, "
        "evaluations aside.",
        grid([chart, _speed_figure(policies)], "two"),
    )


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


def _speed_figure(policies: list[Group]) -> str:
    speeds = [(group, times) for group in policies if (times := speed(group)).per_second > 0]
    if not speeds:
        return ""
    scattered = [
        f'<span class="warn">Steps of {text(group.label)} scatter:</span> the median takes '
        f"{duration(times.median_step)}, one in twenty {duration(times.slow_step)} or more."
        for group, times in speeds
        if times.slow_step > SCATTER * times.median_step
    ]
    name = "responses per second"
    return figure(
        "Responses per second",
        stacked_bars(
            [(group.label, [(name, times.per_second, group.colour)]) for group, times in speeds],
            x_label=name,
        ),
        file=name,
        note=" ".join(scattered),
        header=["run", name, "median step", "95% of steps within", "steps"],
        rows=[
            [group.label, times.per_second, times.median_step, times.slow_step, times.num_steps]
            for group, times in speeds
        ],
    )
