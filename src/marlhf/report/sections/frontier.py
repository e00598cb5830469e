"""Reward against KL, the score at equal KL, and how soon a score was reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from marlhf.intervals import Interval, interval, thin
from marlhf.report.charts import LARGE, Series, legend_of, line_chart
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.findings import first_reaching
from marlhf.report.groups import Group, measured_alike
from marlhf.report.page import (
    Cell,
    chip,
    csv_link,
    duration,
    figure,
    grid,
    num,
    section,
    table,
    text,
)
from marlhf.report.resample import Curve, Resampled

MAX_POINTS = 400
MAX_PAIRED = 4
"""Up to so many settings, every pair of them is compared; of more, each with the first."""
SHARES = (0.5, 0.75, 1.0)
"""How much of the first setting's gain is to be reached."""


def frontier(policies: list[Group]) -> str:
    """The frontier; then, for settings scored alike, who is ahead at equal KL, and who sooner."""
    figures = [
        _frontier_figure(policies, "Score against KL", "eval/score"),
        _frontier_figure(policies, "Gold score against KL", "eval/gold"),
    ]
    alike = [group for group in policies if group.curve("eval/score")]
    alike = [group for group in alike if measured_alike(alike[0], group)]
    compared = Resampled(alike) if len(alike) > 1 else None
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
        line_chart(lines, x_label="KL (nats a response)", y_label=title, size=LARGE),
        file=title,
        key=legend_of(lines),
        header=["run", "step", "eval/kl", key],
        rows=rows,
    )


def at_kl(curve: Curve, level: float) -> float:
    """The score where a curve first passes a KL, read between evaluations.

    A draw of seeds and prompts may end just short of a level that all of them together reach:
    its last score stands.
    """
    for a, b in pairwise(curve):
        if a.kl <= level <= b.kl:
            share = (level - a.kl) / (b.kl - a.kl) if b.kl > a.kl else 1.0
            return a.score + share * (b.score - a.score)
    return curve[-1].score if curve and curve[-1].kl < level else math.nan


def common_kl(curves: Sequence[Curve]) -> float:
    """The largest KL that every curve reached, with two digits, so that it reads well."""
    reached = [max((m.kl for m in curve if math.isfinite(m.kl)), default=0.0) for curve in curves]
    most = min(reached, default=0.0)
    if most <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(most)) - 1)
    return round(math.floor(most / unit + 1e-9) * unit, 12)


def equal_kl(compared: Resampled) -> str:
    """Scores at the same KL with intervals, and the difference of each pair of settings."""
    groups = compared.groups
    most = common_kl(compared.curves())
    if most <= 1e-3:
        return ""
    levels = [most / 3, 2 * most / 3, most]
    found = compared.intervals(lambda cs: [at_kl(c, level) for c in cs for level in levels])
    rows: list[list[str]] = []
    data: list[list[Cell]] = []
    for i, group in enumerate(groups):
        cells = found[i * len(levels) : (i + 1) * len(levels)]
        rows.append([chip(group.label, group.colour), *map(_bounded, cells)])
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


def _differences(compared: Resampled, level: float) -> str:
    """How far one setting is ahead of another at a KL, pair by pair."""
    count = len(compared.groups)
    pairs = list(combinations(range(count), 2))
    if count > MAX_PAIRED:
        pairs = [(0, i) for i in range(1, count)]

    def ahead(curves: list[Curve]) -> list[float]:
        scores = [at_kl(curve, level) for curve in curves]
        return [scores[b] - scores[a] for a, b in pairs]

    found = compared.intervals(ahead)
    dots = [
        Dot(f"{groups_b.label} \u2212 {groups_a.label}", value, groups_b.colour)
        for (a, b), value in zip(pairs, found)
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


def reaching(curve: Curve, target: float) -> tuple[float, float]:
    """(step, seconds) of the first evaluation at or above a score; infinity if there is none."""
    for moment in curve:
        if moment.score >= target:
            return float(moment.step), moment.seconds
    return math.inf, math.inf


def time_to_score(compared: Resampled) -> str:
    """Steps and seconds to the first setting's final score: what "faster" means here."""
    groups = compared.groups
    base = compared.curves()[0]
    gains = base[0].step == 0 and base[-1].score > base[0].score
    shares = SHARES if gains else (1.0,)

    def times(curves: list[Curve]) -> list[float]:
        """For each setting: steps and seconds to each target, then how much sooner than base."""
        first, last = curves[0][0].score, curves[0][-1].score
        targets = [last if share == 1 else first + share * (last - first) for share in shares]
        reached = [[reaching(curve, target) for target in targets] for curve in curves]
        numbers: list[float] = []
        for each in reached:
            numbers += [x for pair in each for x in pair]
            numbers += [_ratio(b, a) for b, a in zip(reached[0][-1], each[-1])]
        return numbers

    if not all(compared.curves()):
        return ""
    found = compared.intervals(times)
    width = 2 * len(shares) + 2
    by_group = [found[i : i + width] for i in range(0, len(found), width)]
    goal = base[-1].score
    rows: list[list[str]] = []
    data: list[list[Cell]] = []
    for group, numbers in zip(groups, by_group):
        reached = [each for run in group.runs if (each := first_reaching(run, goal))]
        cells = [
            _bounded(steps, _steps) + f"<small>{_when(seconds)}</small>"
            for steps, seconds in zip(numbers[:-2:2], numbers[1:-2:2])
        ]
        faster = [
            _bounded(x, _times) if group is not groups[0] else num(None) for x in numbers[-2:]
        ]
        there = interval([each.kl for each in reached]).mean
        count = f"{len(reached)} of {len(group.runs)}"
        rows.append([chip(group.label, group.colour), *cells, *faster, num(there), count])
        for share, steps, seconds in zip(shares, numbers[:-2:2], numbers[1:-2:2]):
            data.append([group.label, share, *map(_known, (*steps[:3], *seconds[:3]))])
    header = ["Run", *(f"{share:.0%} of the gain" for share in shares)]
    header += ["Times fewer steps", "Times less time", "KL there", "Seeds that got there"]
    names = ["run", "share of gain", "steps", "low", "high", "seconds", "low", "high"]
    over = compared.over()
    lead = (
        f"The first evaluation of the mean over seeds at or above {num(goal)}, and at or above "
        f"parts of the way there from the start; read only as finely as evaluations were made. "
        f"{f'Brackets are 95% intervals over {over}.' if over else ''}"
    )
    return (
        f"<h3>How soon each reached the final score of {text(groups[0].label)}</h3>"
        f'<p class="lead">{lead}</p>'
        + grid(_time_figures(groups, by_group))
        + table(header, rows, csv=csv_link("time to score", names, data))
    )


def _time_figures(groups: Sequence[Group], by_group: Sequence[Sequence[Interval]]) -> list[str]:
    figures: list[str] = []
    for at, unit in ((-4, "steps"), (-3, "seconds")):
        dots = [Dot(g.label, numbers[at], g.colour) for g, numbers in zip(groups, by_group)]
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
                rows=[[dot.label, *map(_known, dot.value[:3])] for dot in dots],
            )
        )
    return figures


def _ratio(base: float, other: float) -> float:
    if math.isinf(base) and math.isinf(other):
        return math.nan
    return base / other if other else math.nan


def _known(value: float) -> Cell:
    return "never" if value == math.inf else value


def _steps(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"


def _when(value: Interval) -> str:
    return "" if math.isinf(value.mean) else duration(value.mean)


def _times(value: float) -> str:
    """How many times sooner; 0 times is never."""
    return "never" if value == 0 else "\u221e" if math.isinf(value) else f"{value:.2f}"


def _bounded(value: Interval, form: Callable[[float], str] = num) -> str:
    """A number with its interval below it, in brackets."""
    if math.isnan(value.mean):
        return num(None)
    bounds = ""
    if not math.isnan(value.low):
        bounds = f"<small>[{form(value.low)}, {form(value.high)}]</small>"
    return f"{form(value.mean)}{bounds}"
