"""Reward against KL, and the score at equal KL."""

from __future__ import annotations

from itertools import combinations

from marlhf.intervals import Curve, Floats, thin
from marlhf.report.charts import LARGE, Series, legend_of, line_chart
from marlhf.report.comparison import Comparison, at_kl, common_kl
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group, measured_alike
from marlhf.report.page import (
    Cell,
    chip,
    csv_link,
    figure,
    grid,
    interval_cell,
    num,
    section,
    table,
)
from marlhf.report.sections.time_to_score import time_to_score

MAX_POINTS = 400
MAX_PAIRED = 4
"""Every pair is compared up to this many settings; beyond it, each with the first."""


def frontier(policies: list[Group]) -> str:
    """The frontier; then, for settings scored alike, who is ahead at equal KL, and who sooner."""
    figures = [
        _frontier_figure(policies, "Score against KL", "eval/score"),
        _frontier_figure(policies, "Gold score against KL", "eval/gold"),
    ]
    alike = [group for group in policies if group.curve("eval/score")]
    alike = [group for group in alike if measured_alike(alike[0], group)]
    compared = Comparison(alike) if len(alike) > 1 else None
    return section(
        "frontier",
        "Reward against KL",
        "Each dot is an evaluation, joined in order of training. The line that lies higher at the "
        "same KL gets more reward for the same distance from the model it began with.",
        grid(figures, "two"),
        equal_kl(compared) if compared else "",
        time_to_score(compared) if compared else "",
    )


def _frontier_figure(policies: list[Group], title: str, key: str) -> str:
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
        return ""
    return figure(
        title,
        line_chart(lines, x_label="KL (nats per response)", y_label=title, size=LARGE),
        file=title,
        key=legend_of(lines),
        header=["run", "step", "eval/kl", key],
        rows=rows,
    )


def equal_kl(compared: Comparison) -> str:
    """Scores at the same KL with intervals, and the difference of each pair of settings."""
    groups = compared.groups
    most = common_kl(compared.measured)
    if most <= 1e-3:
        return ""
    levels = [most / 3, 2 * most / 3, most]
    intervals = compared.intervals(lambda cs: [at_kl(c, level) for c in cs for level in levels])
    rows: list[list[str]] = []
    data: list[list[Cell]] = []
    for i, group in enumerate(groups):
        cells = intervals[i * len(levels) : (i + 1) * len(levels)]
        rows.append([chip(group.label, group.colour), *map(interval_cell, cells)])
        data += [[group.label, level, *cell[:3]] for level, cell in zip(levels, cells)]
    header = ["Run", *(f"Score at KL {num(level)}" for level in levels)]
    link = csv_link("score at equal kl", ["run", "kl", "score", "low", "high"], data)
    over = compared.over()
    lead = (
        f"Read off each line where it first passes that KL; KL {num(most)} is the most that all "
        f"reached. {f'Brackets and bars are 95% intervals over {over}.' if over else ''}"
    )
    return (
        f'<h3>Score at equal KL</h3><p class="lead">{lead}</p><div class="beside">'
        f"{_differences(compared, most)}<div>{table(header, rows, csv=link)}</div></div>"
    )


def _differences(compared: Comparison, level: float) -> str:
    """How far one setting is ahead of another at a KL, pair by pair."""
    count = len(compared.groups)
    pairs = list(combinations(range(count), 2))
    if count > MAX_PAIRED:
        pairs = [(0, i) for i in range(1, count)]

    def ahead(curves: list[Curve]) -> list[Floats]:
        scores = [at_kl(curve, level) for curve in curves]
        return [scores[b] - scores[a] for a, b in pairs]

    intervals = compared.intervals(ahead)
    dots = [
        Dot(f"{groups_b.label} \u2212 {groups_a.label}", value, groups_b.colour)
        for (a, b), value in zip(pairs, intervals)
        for groups_a, groups_b in [(compared.groups[a], compared.groups[b])]
    ]
    rows = [[dot.label.replace("\u2212", "minus"), *dot.value[:3]] for dot in dots]
    return figure(
        f"Difference in score at KL {level:.3g}",
        dot_rows(dots, x_label="difference in score", zero=True),
        file="difference at equal kl",
        header=["pair", "difference", "low", "high"],
        rows=rows,
    )
