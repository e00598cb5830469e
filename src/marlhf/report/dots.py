"""Figures of single numbers: dots with intervals, dots along a setting, bars, heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from marlhf.intervals import Interval
from marlhf.report import charts
from marlhf.report.charts import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Scale, frame, shorten, span, svg
from marlhf.report.numbers import num, percent
from marlhf.report.page import part
from marlhf.report.tables import Cell, figure

ROW = 38
Bars = list[tuple[str, list[tuple[str, float, str]]]]
"""Horizontal bars by name, each made of (part, value, colour)."""
PALE = {"var(--t2)", "var(--t3)", "var(--t4)"}
"""Greys light enough for dark numbers."""


@dataclass(frozen=True)
class Dot:
    """A number with its interval, and the seeds behind it as small dots."""

    label: str
    value: Interval
    colour: str
    seeds: Sequence[float] = ()

    def within(self, low: float, high: float) -> Dot:
        """The same with its interval cut to what a share can be."""
        mean, *edges, size = self.value
        cut = [edge if math.isnan(edge) else min(max(edge, low), high) for edge in edges]
        return replace(self, value=Interval(mean, cut[0], cut[1], size))

    @property
    def numbers(self) -> list[float]:
        return [*self.value[:3], *self.seeds]

    @property
    def has_bounds(self) -> bool:
        return math.isfinite(self.value.low) and math.isfinite(self.value.high)

    @property
    def drawn_seeds(self) -> list[float]:
        return [seed for seed in self.seeds if math.isfinite(seed)] if len(self.seeds) > 1 else []

    def words(self) -> str:
        return f"{self.label}: {self.value.text('{:.4g}'.format)}".replace("inf", "\u221e")


@dataclass(frozen=True)
class Trail:
    """The dots of one line of a sweep, each at its place on the axis."""

    label: str
    colour: str
    dots: Sequence[tuple[int, Dot]]
    dash: str = ""


def dots_figure(
    title: str, dots: Sequence[Dot], *, x_label: str, names: str = "run", note: str = "", **how: Any
) -> Markup:
    """Rows of dots with their data: `names` says what has a row, `how` is for `dot_rows`."""
    rows: list[list[Cell]] = [
        [dot.label, *("never" if math.isinf(value) else value for value in dot.value[:3])]
        for dot in dots
    ]
    header = [names, x_label, "low", "high"]
    if any(dot.seeds for dot in dots):
        header.append("seeds")
        rows = [[*row, len(dot.seeds)] for row, dot in zip(rows, dots)]
    chart = dot_rows(dots, x_label=x_label, **how)
    return figure(title, chart, note=note, header=header, rows=rows)


def dot_rows(
    dots: Sequence[Dot],
    *,
    x_label: str,
    zero: bool = False,
    is_share: bool = False,
    width: int = WIDTH,
) -> Markup:
    """One row per dot, its name above it and its number at the end; `zero` draws a line at zero."""
    dots = [dot.within(0.0, 1.0) for dot in dots] if is_share else dots
    height = TOP + BOTTOM + ROW * len(dots)
    values = [number for dot in dots for number in dot.numbers]
    x_axis = Scale(*span([*values, 0.0] if zero else values), 18.0, width - 62.0)
    y_axis = Scale(0.0, 1.0, height - BOTTOM, TOP)
    form = charts.percent_text if is_share else charts.tick_text
    drawn = [frame(x_axis, y_axis, x_label, "", x_format=form)]
    if zero:
        drawn.append(part("zero", x=x_axis, y=y_axis))
    for i, dot in enumerate(dots):
        name = shorten(dot.label, width * 46 // 340)
        shown, ends = _value_text(dot.value.mean, is_share), _whisker(dot, x_axis)
        drawn.append(part("dot_row", dot, name, shown, x_axis, TOP + ROW * i, ends, width - 4))
    return svg(x_label, drawn, (width, height))


def _value_text(value: float, is_share: bool) -> str:
    if not math.isfinite(value):
        return ""
    if is_share:
        return percent(value)
    return f"{value:.0f}" if value == round(value) and abs(value) >= 1 else num(value)


def _whisker(dot: Dot, axis: Scale) -> list[float]:
    low, high = dot.value.low, dot.value.high
    if math.isnan(low) or (math.isinf(low) and math.isinf(high)):
        return []
    return [float(axis(min(max(edge, axis.low), axis.high))) for edge in (low, high)]


def sweep_chart(
    trails: Sequence[Trail],
    places: Sequence[str],
    *,
    x_label: str,
    y_label: str,
    is_share: bool = False,
) -> Markup:
    """Dots with whiskers at evenly spaced places, joined along each line of the sweep."""
    has_names = len(trails) > 1 and charts.is_labelled(trails)
    names = [trail.label for trail in trails] if has_names else []
    if is_share:
        trails = [replace(t, dots=[(x, dot.within(0.0, 1.0)) for x, dot in t.dots]) for t in trails]
    values = [number for trail in trails for _, dot in trail.dots for number in dot.numbers]
    x_axis = Scale(-0.4, max(len(places) - 0.6, 0.6), LEFT, WIDTH - charts.margin_for(names))
    y_axis = Scale(*span(values), HEIGHT - BOTTOM, TOP)
    form = charts.percent_text if is_share else charts.tick_text
    drawn = [frame(x_axis, y_axis, x_label, y_label, form, x_ticks=list(enumerate(places)))]
    for at, trail in enumerate(trails):
        # Lines of a product share their places: each is moved a little to the side.
        shift = (at - (len(trails) - 1) / 2) * min(0.09, 0.5 / len(trails))
        known = [(x + shift, dot) for x, dot in trail.dots if math.isfinite(dot.value.mean)]
        path = charts.path_of([(x, dot.value.mean) for x, dot in known], x_axis, y_axis)
        drawn.append(part("trail", known, trail.colour, path, x_axis, y_axis))
    if names:
        ends = [
            (trail.label, trail.colour, float(place), dot.value.mean)
            for trail in trails
            for place, dot in trail.dots[-1:]
        ]
        drawn.append(charts.end_labels(ends, (x_axis, y_axis)))
    return svg(f"{y_label} by {x_label}", drawn)


def stacked_bars(rows: Bars, *, x_label: str, inside: bool = False) -> Markup:
    """One bar per row, with its name above it.

    With `inside`, each part shows its number where it fits; else the sum is shown at the end.
    """
    totals = [sum(value for _, value, _ in parts) for _, parts in rows]
    width, height = charts.LARGE[0], TOP + BOTTOM + 44 * len(rows)
    longest = max((len(f"{total:.3g}") for total in totals), default=0)
    room = 40.0 if inside else max(40.0, 10 + 9 * longest)  # for the sum; phones draw it larger
    x_axis = Scale(0.0, max(totals, default=0.0) * 1.02 or 1.0, 16.0, width - room)
    drawn = [frame(x_axis, Scale(0.0, 1.0, height - BOTTOM, TOP), x_label, "")]
    for i, ((label, parts), total) in enumerate(zip(rows, totals)):
        pieces: list[tuple[str, float, str, float, float]] = []
        done = 0.0
        for name, value, colour in parts:
            ends = float(x_axis(done)), float(x_axis(done + value))
            pieces.append((name, value, colour, *ends))
            done += value
        name, end = shorten(label, 66), float(x_axis(done))
        drawn.append(part("bar", label, name, TOP + 44 * i, pieces, end, total, inside, PALE))
    return svg(x_label, drawn, (width, height))


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    x_label: str,
    y_label: str,
) -> Markup:
    """Cells with their number in them, the darker the higher."""
    finite = [value for row in values for value in row if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    cells = [
        (i, j, value, 0.06 + 0.54 * (value - low) / ((high - low) or 1.0))
        for i, row in enumerate(values)
        for j, value in enumerate(row)
        if math.isfinite(value)
    ]
    width = max(44, min(80, 380 // max(1, len(columns))))
    return part("heat_map", rows, columns, cells, x_label, y_label, width)
