"""Where the seconds of a step went, and responses per second."""

from __future__ import annotations

import math

from marlhf.report.bars import stacked_bars
from marlhf.report.charts import legend
from marlhf.report.groups import Group
from marlhf.report.page import figure, grid, section
from marlhf.runs.read import number

PHASES = (
    ("rollout", "var(--t0)"),
    ("score", "var(--t1)"),
    ("credit", "var(--t2)"),
    ("update", "var(--t3)"),
)
"""Greys, as colours are for runs."""


def timing(policies: list[Group]) -> str:
    """Where the seconds of a step went."""
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    rows: list[list[str | float | None]] = []
    for group in policies:
        parts = [(phase, group.mean(f"time/{phase}"), colour) for phase, colour in PHASES]
        parts = [part for part in parts if math.isfinite(part[1]) and part[1] >= 0]
        whole = group.mean("time/step")
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
        stacked_bars(bars, x_label="mean seconds per step"),
        file="seconds per step",
        key=legend([(*each, "") for each in keys]),
        header=["run", "phase", "seconds"],
        rows=rows,
    )
    return section(
        "timing",
        "Time",
        "Each bar is the mean step, split into its phases: sampling responses, scoring them, and "
        "updating the models.",
        grid([chart, _speed_figure(policies)], "two"),
    )


def _speed_figure(policies: list[Group]) -> str:
    """Responses per second, as recorded or else from the batch and the step's seconds."""
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    for group in policies:
        rate = group.mean("time/samples_per_second")
        if not math.isfinite(rate):
            rate = number(group.config.get("batch_size")) / (group.mean("time/step") or math.nan)
        if math.isfinite(rate) and rate > 0:
            bars.append((group.label, [("responses per second", rate, group.colour)]))
    if not bars:
        return ""
    return figure(
        "Responses per second",
        stacked_bars(bars, x_label="responses per second"),
        file="responses per second",
        header=["run", "responses per second"],
        rows=[[label, parts[0][1]] for label, parts in bars],
    )
