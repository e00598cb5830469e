"""Reward against KL: the score at equal KL, and how soon each setting reached a score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, islice

import numpy as np
from markupsafe import Markup

from marlhf.intervals import Curve, Floats, Interval, first_reaching, mean, thin
from marlhf.report.charts import LARGE, Series, legend_of, line_chart
from marlhf.report.dots import Dot, dots_figure
from marlhf.report.groups import Group, measured_alike
from marlhf.report.measures import CurveComparison, at_kl, common_kl
from marlhf.report.numbers import duration, num, signed
from marlhf.report.page import grid, heading, part, section
from marlhf.report.tables import Below, Cell, Chip, Column, csv_link, figure, table
from marlhf.runs.read import Row, Run, number

MAX_POINTS = 400
MAX_PAIRED = 4
"""Every pair is compared up to this many settings; beyond it, each with the first."""
SHARES = (0.5, 0.75, 1.0)
"""How much of the first setting's gain is to be reached."""

Times = list[list[Interval]]
"""Steps and seconds to each share; how many times fewer steps and less time than the first."""


def frontier(policies: list[Group]) -> Markup:
    """The frontier; for settings scored alike, also the score at equal KL and time to a score."""
    figures = [
        _frontier_figure(policies, "Score against KL", "eval/score"),
        _frontier_figure(policies, "Gold score against KL", "eval/gold"),
    ]
    alike = [group for group in policies if group.curve("eval/score")]
    alike = [group for group in alike if measured_alike(alike[0], group)]
    compared = CurveComparison(alike) if len(alike) > 1 else None
    return section(
        "frontier",
        grid(figures, "two"),
        equal_kl(compared) if compared else "",
        time_to_score(compared) if compared else "",
    )


def _frontier_figure(policies: list[Group], title: str, key: str) -> Markup:
    lines: list[Series] = []
    rows: list[list[Cell]] = []
    for group in policies:
        kls = {point.step: point.mean for point in group.curve("eval/kl")}
        points = [(p.step, kls[p.step], p.mean) for p in group.curve(key) if p.step in kls]
        points = thin(points, MAX_POINTS)
        if points:
            notes = [f"step {step}: {value:.3g} at KL {kl:.3g}" for step, kl, value in points]
            line = [(kl, value) for _, kl, value in points]
            lines.append(Series(group.label, line, group.colour, dash=group.dash, notes=notes))
            rows += [[group.label, *point] for point in points]
    if not lines:
        return Markup()
    return figure(
        title,
        line_chart(lines, x_label="KL (nats per response)", y_label=title, size=LARGE),
        key=legend_of(lines),
        header=["run", "step", "eval/kl", key],
        rows=rows,
    )


def equal_kl(compared: CurveComparison) -> Markup:
    """Scores at the same KL with intervals, and the difference of each pair of settings."""
    most = common_kl(compared.measured)
    if most <= 1e-3:
        return Markup()
    levels = [most / 3, 2 * most / 3, most]
    intervals = iter(
        compared.intervals(lambda cs: [at_kl(c, level) for c in cs for level in levels])
    )
    rows: list[list[object]] = []
    data: list[list[Cell]] = []
    for group in compared.groups:
        cells = list(islice(intervals, len(levels)))
        rows.append([Chip(group.label, group.colour), *cells])
        data += [[group.label, level, *cell[:3]] for level, cell in zip(levels, cells)]
    columns = [Column("Run"), *(Column(f"Score at KL {num(level)}") for level in levels)]
    link = csv_link("score at equal kl", ["run", "kl", "score", "low", "high"], data)
    lead = part("lead_equal_kl", most=most, over=compared.over())
    right = table(columns, rows, csv=link)
    left = _differences(compared, most)
    return heading("Score at equal KL", lead) + part("beside", left=left, right=right)


def _differences(compared: CurveComparison, level: float) -> Markup:
    """How far one setting is ahead of another at a KL, pair by pair."""
    groups = compared.groups
    pairs = list(combinations(range(len(groups)), 2))
    if len(groups) > MAX_PAIRED:
        pairs = [(0, i) for i in range(1, len(groups))]

    def ahead(curves: list[Curve]) -> list[Floats]:
        scores = [at_kl(curve, level) for curve in curves]
        return [scores[b] - scores[a] for a, b in pairs]

    dots = [
        Dot(f"{groups[b].label} \u2212 {groups[a].label}", value, groups[b].colour)
        for (a, b), value in zip(pairs, compared.intervals(ahead))
    ]
    return dots_figure(
        f"Difference in score at KL {level:.3g}",
        dots,
        x_label="difference in score",
        names="pair",
        zero=True,
    )


def time_to_score(compared: CurveComparison) -> Markup:
    """Steps and seconds to the first setting's final score: what "faster" means here."""
    groups = compared.groups
    if not all(curve.steps.size for curve in compared.measured):
        return Markup()
    (gain,) = compared.intervals(lambda curves: [curves[0].scores[:, -1] - curves[0].scores[:, 0]])
    title = f"How soon each reached the final score of {groups[0].label}"
    if not (gain.low > 0 or (math.isnan(gain.low) and gain.mean > 0)):
        # Whoever starts at the goal is there at once: times would say nothing.
        words = f"{groups[0].label} did not clearly improve: {gain.text(signed)}"
        return heading(title, f"No times, as {words}.")
    base = compared.measured[0]
    goal = float(base.scores[0, -1])
    shares = SHARES if base.steps[0, 0] == 0 else (1.0,)
    times = times_to_score(compared, shares)
    rows: list[list[object]] = []
    data: list[list[Cell]] = []
    for group, (steps, seconds, ratios) in zip(groups, times):
        cells = [
            Below(step, [] if math.isinf(took.mean) else [duration(took.mean)])
            for step, took in zip(steps, seconds)
        ]
        reached = [row for run in group.runs if (row := first_evaluation_at(run, goal))]
        kl = mean([number(row.get("eval/kl")) for row in reached])
        count = f"{len(reached)} of {len(group.runs)}"
        ratios = [None, None] if group is groups[0] else ratios
        rows.append([Chip(group.label, group.colour), *cells, *ratios, kl, count])
        for share, step, took in zip(shares, steps, seconds):
            numbers = ("never" if x == math.inf else x for x in (*step[:3], *took[:3]))
            data.append([group.label, share, *numbers])
    columns = [Column("Run"), *(Column(f"{share:.0%} of the gain", "", _steps) for share in shares)]
    columns += [Column(f"Times {what}", "", _times) for what in ("fewer steps", "less time")]
    columns += [Column("KL there"), Column("Seeds that reached it")]
    names = ["run", "share of gain", "steps", "low", "high", "seconds", "low", "high"]
    lead = part("lead_time_to_score", goal=goal, over=compared.over())
    link = csv_link("time to score", names, data)
    return heading(title, lead) + grid(_figures(groups, times)) + table(columns, rows, csv=link)


def times_to_score(compared: CurveComparison, shares: Sequence[float]) -> list[Times]:
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
    counts = len(shares), len(shares), 2
    return [[list(islice(each, count)) for count in counts] for _ in compared.groups]


def first_evaluation_at(run: Run, target: float) -> Row | None:
    """The first evaluation whose held-out score is at least `target`."""
    return next((row for row in run.evals if number(row.get("eval/score")) >= target), None)


def _figures(groups: Sequence[Group], times: Sequence[Times]) -> list[Markup]:
    figures: list[Markup] = []
    for i, unit in enumerate(("steps", "seconds")):
        last = [each[i][-1] for each in times]
        dots = [Dot(group.label, value, group.colour) for group, value in zip(groups, last)]
        if any(math.isfinite(dot.value.mean) for dot in dots):
            never = ", ".join(dot.label for dot in dots if math.isinf(dot.value.mean))
            shown = dots_figure(
                f"{unit.capitalize()} to {groups[0].label}'s final score",
                dots,
                x_label=unit,
                note=f"Never reached by {never}." if never else "",
                zero=True,
            )
            figures.append(shown)
    return figures


def _ratio(base: Floats, other: Floats) -> Floats:
    """How many times sooner; NaN if neither got there, or the other was there from the start."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(other == 0, np.nan, base / other)


def _steps(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"


def _times(value: float) -> str:
    """How many times sooner; 0 times is never."""
    return "never" if value == 0 else "\u221e" if math.isinf(value) else f"{value:.2f}"
