"""How soon each setting reached the final score of the first: what "faster" means here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from marlhf.intervals import Curve, Floats, Interval, first_reaching, mean
from marlhf.report.comparison import Comparison
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group
from marlhf.report.page import (
    Cell,
    chip,
    csv_link,
    duration,
    figure,
    grid,
    interval_cell,
    num,
    signed,
    table,
    text,
)
from marlhf.runs.read import Run, number

SHARES = (0.5, 0.75, 1.0)
"""How much of the first setting's gain is to be reached."""


@dataclass(frozen=True)
class Times:
    """When a setting reached each share of the gain, and how that compares with the base."""

    steps: list[Interval]
    seconds: list[Interval]
    fewer_steps: Interval
    less_time: Interval


@dataclass(frozen=True)
class Reached:
    """The first evaluation of one seed at or above a score."""

    step: int
    seconds: float
    kl: float
    gold: float


def time_to_score(compared: Comparison) -> str:
    """Steps and seconds to the first setting's final score."""
    groups = compared.groups
    if not all(curve.steps.size for curve in compared.measured):
        return ""
    (gain,) = compared.intervals(lambda curves: [curves[0].scores[:, -1] - curves[0].scores[:, 0]])
    title = f"<h3>How soon each reached the final score of {text(groups[0].label)}</h3>"
    if not (gain.low > 0 or (math.isnan(gain.low) and gain.mean > 0)):
        # Whoever starts at the goal is there at once: times would say nothing.
        words = f"{text(groups[0].label)} did not clearly improve: {gain.text(signed)}"
        return f'{title}<p class="lead">No times, as {words}.</p>'
    base = compared.measured[0]
    goal = float(base.scores[0, -1])
    shares = SHARES if base.steps[0, 0] == 0 else (1.0,)
    times = times_to_score(compared, shares)
    rows: list[list[str]] = []
    data: list[list[Cell]] = []
    for group, each in zip(groups, times):
        cells = [
            interval_cell(steps, _steps_text) + f"<small>{_duration(seconds)}</small>"
            for steps, seconds in zip(each.steps, each.seconds)
        ]
        ratios = [
            num(None) if group is groups[0] else interval_cell(ratio, _times_text)
            for ratio in (each.fewer_steps, each.less_time)
        ]
        reached = [there for run in group.runs if (there := first_evaluation_at(run, goal))]
        kl = num(mean([there.kl for there in reached]))
        count = f"{len(reached)} of {len(group.runs)}"
        rows.append([chip(group.label, group.colour), *cells, *ratios, kl, count])
        for share, steps, seconds in zip(shares, each.steps, each.seconds):
            data.append([group.label, share, *map(_cell, (*steps[:3], *seconds[:3]))])
    header = ["Run", *(f"{share:.0%} of the gain" for share in shares)]
    header += ["Times fewer steps", "Times less time", "KL there", "Seeds that reached it"]
    names = ["run", "share of gain", "steps", "low", "high", "seconds", "low", "high"]
    over = compared.over()
    lead = (
        f"The first evaluation of the mean over seeds at or above {num(goal)}, and at or above "
        f"parts of the way there from the start; as precise as evaluations are frequent. "
        f"{f'Brackets are 95% intervals over {over}.' if over else ''}"
    )
    return (
        f'{title}<p class="lead">{lead}</p>'
        + grid(_figures(groups, times))
        + table(header, rows, csv=csv_link("time to score", names, data))
    )


def times_to_score(compared: Comparison, shares: Sequence[float]) -> list[Times]:
    """For each setting, when it reached each share of what the first setting gained."""

    def statistic(curves: list[Curve]) -> list[Floats]:
        first, last = curves[0].scores[:, 0], curves[0].scores[:, -1]
        # The whole gain is the last score itself, not what rounding makes of the sum.
        targets = [last if share == 1 else first + share * (last - first) for share in shares]
        base = first_reaching(curves[0], targets[-1])
        numbers: list[Floats] = []
        for curve in curves:
            reached = [first_reaching(curve, target) for target in targets]
            numbers += [steps for steps, _ in reached]
            numbers += [seconds for _, seconds in reached]
            numbers += [_ratio(theirs, own) for theirs, own in zip(base, reached[-1])]
        return numbers

    each = iter(compared.intervals(statistic))
    count = len(shares)
    return [
        Times(list(islice(each, count)), list(islice(each, count)), next(each), next(each))
        for _ in compared.groups
    ]


def first_evaluation_at(run: Run, target: float) -> Reached | None:
    """When a run's held-out score first met `target`; nothing is read between evaluations."""
    for row in run.evals:
        if number(row.get("eval/score")) >= target:
            seconds, kl, gold = (number(row.get(k)) for k in ("seconds", "eval/kl", "eval/gold"))
            return Reached(row["step"], seconds, kl, gold)
    return None


def _figures(groups: Sequence[Group], times: Sequence[Times]) -> list[str]:
    figures: list[str] = []
    for unit in ("steps", "seconds"):
        last = [(each.steps if unit == "steps" else each.seconds)[-1] for each in times]
        dots = [Dot(group.label, value, group.colour) for group, value in zip(groups, last)]
        if not any(math.isfinite(dot.value.mean) for dot in dots):
            continue
        never = [dot.label for dot in dots if math.isinf(dot.value.mean)]
        figures.append(
            figure(
                f"{unit.capitalize()} to {groups[0].label}'s final score",
                dot_rows(dots, x_label=unit, zero=True),
                file=f"{unit} to score",
                note=f"Never reached by {text(', '.join(never))}." if never else "",
                header=["run", unit, "low", "high"],
                rows=[[dot.label, *map(_cell, dot.value[:3])] for dot in dots],
            )
        )
    return figures


def _ratio(base: Floats, other: Floats) -> Floats:
    """How many times sooner; NaN where neither ever got there, or at once."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(other == 0, np.nan, base / other)


def _cell(value: float) -> Cell:
    return "never" if value == math.inf else value


def _steps_text(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"


def _duration(value: Interval) -> str:
    return "" if math.isinf(value.mean) else duration(value.mean)


def _times_text(value: float) -> str:
    """How many times sooner; 0 times is never."""
    return "never" if value == 0 else "\u221e" if math.isinf(value) else f"{value:.2f}"
