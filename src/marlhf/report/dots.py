"""Figures of single numbers with their intervals: rows of dots, and dots along a setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from marlhf.intervals import Interval
from marlhf.report.charts import (
    BOTTOM,
    LEFT,
    TOP,
    Axis,
    end_labels,
    frame,
    is_labelled,
    margin_for,
    percent_text,
    shorten,
    span,
    svg,
    tick_text,
)
from marlhf.report.page import class_of, num, percent, text

ROW = 38


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

    def words(self) -> str:
        return f"{self.label}: {self.value.text('{:.4g}'.format)}".replace("inf", "\u221e")


@dataclass(frozen=True)
class Trail:
    """The dots of one line of a sweep, each at its place on the axis."""

    label: str
    colour: str
    dots: Sequence[tuple[int, Dot]]
    dash: str = ""


def dot_rows(
    dots: Sequence[Dot],
    *,
    x_label: str,
    zero: bool = False,
    is_share: bool = False,
    width: int = 340,
) -> str:
    """One row per dot, its name above it and its number at the end; `zero` draws a line at zero."""
    dots = [dot.within(0.0, 1.0) for dot in dots] if is_share else dots
    height = TOP + BOTTOM + ROW * len(dots)
    values = [number for dot in dots for number in dot.numbers]
    low, high = span([*values, 0.0] if zero else values)
    x_axis = Axis(low, high, 18.0, width - 62.0)
    y_axis = Axis(0.0, 1.0, height - BOTTOM, TOP)
    form = percent_text if is_share else tick_text
    drawn = [frame(x_axis, y_axis, x_label, "", x_format=form)]
    if zero:
        drawn.append(f'<path class="zero" d="M{x_axis(0.0)} {y_axis.start:g}V{y_axis.end:g}"/>')
    for i, dot in enumerate(dots):
        y = TOP + ROW * i
        name = text(shorten(dot.label, width * 46 // 340))
        drawn.append(f'<text{class_of(dot.colour, "name")} x="18" y="{y + 13}">{name}</text>')
        drawn.append(_across(dot, x_axis, y + 24))
        if math.isfinite(dot.value.mean):
            whole = dot.value.mean == round(dot.value.mean) and abs(dot.value.mean) >= 1
            plain = f"{dot.value.mean:.0f}" if whole else num(dot.value.mean)
            shown = percent(dot.value.mean) if is_share else plain
            kind = class_of(dot.colour, "value")
            drawn.append(f'<text{kind} x="{width - 4}" y="{y + 28}">{shown}</text>')
    return svg(x_label, drawn, (width, height))


def _across(dot: Dot, axis: Axis, y: float) -> str:
    mean, low, high, _ = dot.value
    drawn = [f'<g{class_of(dot.colour)} stroke="{dot.colour}" fill="{dot.colour}">']
    if not math.isnan(low) and not (math.isinf(low) and math.isinf(high)):
        ends = [float(axis(min(max(edge, axis.low), axis.high))) for edge in (low, high)]
        drawn.append(f'<path class="whisker" d="M{ends[0]:g} {y}H{ends[1]:g}"/>')
        if math.isinf(high):  # never, in some draws
            drawn.append(f'<path class="whisker" d="M{ends[1] - 5:g} {y - 4}l6 4l-6 4"/>')
    for seed in dot.seeds:
        if math.isfinite(seed) and len(dot.seeds) > 1:
            drawn.append(f'<circle class="seed" cx="{axis(seed)}" cy="{y}" r="2.6"/>')
    if math.isfinite(mean):
        drawn.append(f'<circle cx="{axis(mean)}" cy="{y}" r="4.6"/>')
    drawn.append(
        f'<rect class="hit" x="{axis.start:g}" y="{y - 10}" width="{axis.end - axis.start:g}" '
        f'height="20"><title>{text(dot.words())}</title></rect></g>'
    )
    return "".join(drawn)


def sweep_chart(
    trails: Sequence[Trail],
    places: Sequence[str],
    *,
    x_label: str,
    y_label: str,
    is_share: bool = False,
    size: tuple[int, int] = (340, 224),
) -> str:
    """Dots with whiskers at evenly spaced places, joined along each line of the sweep."""
    names = [trail.label for trail in trails] if is_labelled(trails) and len(trails) > 1 else []
    if is_share:
        trails = [replace(t, dots=[(x, dot.within(0.0, 1.0)) for x, dot in t.dots]) for t in trails]
    values = [number for trail in trails for _, dot in trail.dots for number in dot.numbers]
    low, high = span(values)
    x_axis = Axis(-0.4, max(len(places) - 0.6, 0.6), LEFT, size[0] - margin_for(names))
    y_axis = Axis(low, high, size[1] - BOTTOM, TOP)
    form = percent_text if is_share else tick_text
    ticks = list(enumerate(places))
    drawn = [frame(x_axis, y_axis, x_label, y_label, form, x_ticks=ticks)]
    for at, trail in enumerate(trails):
        # Lines of a product share their places: each is moved a little to the side.
        shift = (at - (len(trails) - 1) / 2) * min(0.09, 0.5 / len(trails))
        moved = [(x + shift, dot) for x, dot in trail.dots if math.isfinite(dot.value.mean)]
        line = [f"{x_axis(x)} {y_axis(dot.value.mean)}" for x, dot in moved]
        if len(line) > 1:
            drawn.append(f'<path class="join" stroke="{trail.colour}" d="M{"L".join(line)}"/>')
        drawn += [_upright(dot, x_axis(x), y_axis) for x, dot in moved]
    if names:
        ends = [
            (trail.label, trail.colour, float(place), dot.value.mean)
            for trail in trails
            for place, dot in trail.dots[-1:]
        ]
        drawn.append(end_labels(ends, (x_axis, y_axis)))
    return svg(f"{y_label} by {x_label}", drawn, size)


def _upright(dot: Dot, x: str, axis: Axis) -> str:
    mean, low, high, _ = dot.value
    drawn = [f'<g{class_of(dot.colour)} stroke="{dot.colour}" fill="{dot.colour}">']
    if math.isfinite(low) and math.isfinite(high):
        drawn.append(f'<path class="whisker" d="M{x} {axis(low)}V{axis(high)}"/>')
    for seed in dot.seeds:
        if math.isfinite(seed) and len(dot.seeds) > 1:
            drawn.append(f'<circle class="seed" cx="{x}" cy="{axis(seed)}" r="2.6"/>')
    drawn.append(f'<circle cx="{x}" cy="{axis(mean)}" r="4.2"/>')
    drawn.append(
        f'<circle class="hit" cx="{x}" cy="{axis(mean)}" r="10">'
        f"<title>{text(dot.words())}</title></circle></g>"
    )
    return "".join(drawn)
