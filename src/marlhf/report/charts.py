"""Figures as SVG: no plotting library, nothing to load, sharp at any size.

Every function is pure: numbers in, one `<svg>` out. Python computes positions, the marks are in
`templates/charts.svg.j2`. Colours are CSS variables, so that a figure follows the page into dark
mode; numbers that are not finite leave a gap.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from marlhf.intervals import mean, thin
from marlhf.report.numbers import num, percent
from marlhf.report.page import part

WIDTH, HEIGHT = 340, 224
LARGE = (460, 290)
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 40
MAX_MARKS = 40
"""A line with more points than this has tooltips at evenly spaced ones only."""
MAX_LABELS = 7
"""As many lines are named at their ends; more have a key above the figure."""
MAX_LABEL_CHARS = 20
MAX_COLUMNS = 40
MAX_ROWS = 10
"""With more lines than this, a box of values would cover the figure: points have tooltips."""
LINE_HEIGHT = 14

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line or cloud: (x, y) points, and where there are seeds (x, low, high) around them."""

    label: str
    points: Points
    colour: str
    band: Sequence[tuple[float, float, float]] = ()
    dash: str = ""
    notes: Sequence[str] = ()
    """One tooltip per point, in place of its coordinates."""
    raw: Points = ()
    """What a smoothed line was made from, drawn faintly behind it."""


@dataclass(frozen=True)
class Scale:
    """A linear scale from numbers to pixels, with round ticks inside its range."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{self.start + share * (self.end - self.start):.1f}".removesuffix(".0")

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2

    def ticks(self, form: Callable[[float, float], str], count: int = 5) -> list[tuple[float, str]]:
        """Places and their numbers as text."""
        places = nice_ticks(self.low, self.high, count)
        step = places[1] - places[0] if len(places) > 1 else 0.0
        return [(place, form(place, step)) for place in places]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) from low to high."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's number with just the decimals that tell it from its neighbours."""
    size = max(abs(value), abs(step))
    if size >= 1e6 or 0 < step < 1e-4:
        digits, power = f"{value:.1e}".split("e")
        short = f"{digits.removesuffix('.0')}e{int(power)}" if value else "0"
        return short.replace("-", "\u2212")
    if size >= 1e4:
        return f"{value / 1000:g}k"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 2
    return f"{value:.{decimals}f}".replace("-", "\u2212")


def percent_text(value: float, step: float) -> str:
    return f"{tick_text(value * 100, step * 100)}%"


def span(values: Sequence[float], *, margin: float = 0.05) -> tuple[float, float]:
    """A range that holds all finite values, with room around a constant or a single one."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = abs(low) * 0.1 or 0.5
        return low - half, high + half
    room = (high - low) * margin
    # Counts and lengths that reach down to nothing start the axis at nothing.
    return (low if low == 0 else low - room), high + room


def svg(name: str, drawn: Sequence[Markup], size: tuple[int, int] = (WIDTH, HEIGHT)) -> Markup:
    return part("svg", name, drawn, *size, is_large=size[0] >= LARGE[0])


def frame(
    x_axis: Scale,
    y_axis: Scale,
    x_label: str,
    y_label: str,
    y_format: Callable[[float, float], str] = tick_text,
    *,
    x_format: Callable[[float, float], str] = tick_text,
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> Markup:
    """Grid lines, tick numbers and axis names; no y axis where it has no name."""
    if x_ticks is None:
        x_ticks = x_axis.ticks(x_format, 4 if x_axis.end - x_axis.start < 240 else 5)
    y_ticks = y_axis.ticks(y_format) if y_label else []
    below = y_axis.start + BOTTOM - 6
    return part("frame", x_axis, y_axis, x_ticks, y_ticks, x_label=x_label, below=below)


def path_of(points: Points, x_axis: Scale, y_axis: Scale) -> str:
    """A line through points, broken where a number is missing."""
    drawn: list[str] = []
    pen = "M"
    for x, y in points:
        if math.isfinite(x + y):
            drawn.append(f"{pen}{x_axis(x)} {y_axis(y)}")
        pen = "L" if math.isfinite(x + y) else "M"
    return "".join(drawn)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    is_share: bool = False,
) -> Markup:
    """Lines over a shared axis; the band around one is the range over its seeds.

    `size` is in the figure's own units: it scales to the page, so a larger size is one
    with relatively smaller text. Shares are shown in per cent and never beyond 0 to 100.
    """
    ys = [y for s in series for _, y in (*s.points, *s.raw)]
    ys += [edge for s in series for _, low, high in s.band for edge in (low, high)]
    low, high = span(ys)
    if is_share and low < 1 and high > 0:
        low, high = max(low, 0.0), min(high, 1.0)
    names = [s.label for s in series] if is_labelled(series) else []
    xs = span([x for s in series for x, _ in s.points], margin=0.02)
    right = size[0] - margin_for(names, size)
    axes = Scale(*xs, LEFT, right), Scale(low, high, size[1] - BOTTOM, TOP)
    drawn = [frame(*axes, x_label, y_label, percent_text if is_share else tick_text)]
    drawn += [_band(s, *axes) for s in series if s.band or s.raw]
    # Lines that double back, or too many of them, have a tooltip per point instead of a box.
    by_column = len(series) <= MAX_ROWS and not any(s.notes for s in series)
    drawn += [_line(s, *axes, has_tips=not by_column) for s in series]
    if names:
        drawn.append(end_labels([(s.label, s.colour, *_last(s.points)) for s in series], axes))
    if by_column:
        form = percent if is_share else "{:.4g}".format
        lines = [(s.label, s.colour, s.points) for s in series]
        drawn.append(columns(lines, axes, x_label=x_label, form=form))
    return svg(f"{y_label} by {x_label}", drawn, size)


def _line(series: Series, x_axis: Scale, y_axis: Scale, *, has_tips: bool) -> Markup:
    """The line, and dots or tooltips at (some of) its points."""
    notes = series.notes or [f"{x:.4g}: {y:.4g}" for x, y in series.points]
    marks = [
        (x_axis(x), y_axis(y), note)
        for (x, y), note in zip(series.points, notes)
        if math.isfinite(x + y)
    ]
    path, shown = path_of(series.points, x_axis, y_axis), thin(marks, MAX_MARKS)
    return part("line", series, path, shown, len(marks) <= 30, has_tips, x_axis, y_axis)


def _band(series: Series, x_axis: Scale, y_axis: Scale) -> Markup:
    """The range over seeds, and what a smoothed line was made from."""
    edges = [edge for edge in series.band if all(map(math.isfinite, edge))]
    around = [(x, high) for x, _, high in edges] + [(x, low) for x, low, _ in reversed(edges)]
    paths = path_of(around, x_axis, y_axis), path_of(series.raw, x_axis, y_axis)
    return part("band", series.colour, *paths)


def columns(
    lines: Sequence[tuple[str, str, Points]],
    axes: tuple[Scale, Scale],
    *,
    x_label: str,
    form: Callable[[float], str],
) -> Markup:
    """A hidden crosshair for each column of a figure; lines are (label, colour, points by x)."""
    known = [
        (label, colour, sorted((x, y) for x, y in points if math.isfinite(x + y)))
        for label, colour, points in lines
    ]
    xs = thin(sorted({x for *_, points in known for x, _ in points}), MAX_COLUMNS)
    if not xs:
        return Markup()
    x_axis, y_axis = axes
    reach = max((b - a for a, b in pairwise(xs)), default=math.inf)
    centres = [float(x_axis(x)) for x in xs]
    edges = [x_axis.start, *((a + b) / 2 for a, b in pairwise(centres)), x_axis.end]
    shown: list[dict[str, object]] = []
    for x, centre, between in zip(xs, centres, pairwise(edges)):
        readings = [
            (float(x_axis(near[0])), float(y_axis(near[1])), f"{label} {form(near[1])}", colour)
            for label, colour, points in known
            if (near := _nearest(points, x, reach))
        ]
        head = f"{x_label.partition(' (')[0]} {x:.4g}"
        width = 6.1 * max(len(head), *(len(words) + 2 for _, _, words, _ in readings), 1) + 14
        fits_right = centre + 8 + width <= x_axis.end
        left = centre + 8 if fits_right else max(0.0, centre - 8 - width)
        column = {"x": centre, "edges": between, "left": left, "width": width}
        shown.append({**column, "head": head, "readings": readings})
    return part("columns", shown, y_axis.end, y_axis.start, LINE_HEIGHT)


def _nearest(points: Points, x: float, reach: float) -> tuple[float, float] | None:
    after = bisect_left(points, (x, -math.inf))
    beside = points[max(0, after - 1) : after + 1]
    near = min(beside, key=lambda point: abs(point[0] - x), default=None)
    return near if near and abs(near[0] - x) <= reach else None


def is_labelled(series: Sequence[object]) -> bool:
    """Whether lines are named at their ends, so that no key is needed."""
    return len(series) <= MAX_LABELS


def margin_for(names: Sequence[str], size: tuple[int, int] = (WIDTH, HEIGHT)) -> float:
    """Room on the right for names at the ends of lines, in the size of phones and paper."""
    longest = max((min(len(name), MAX_LABEL_CHARS) for name in names), default=0)
    width = 9.0 if size[0] >= LARGE[0] else 7.2
    return 22 + width * longest if longest else RIGHT


def end_labels(ends: Sequence[tuple[str, str, float, float]], axes: tuple[Scale, Scale]) -> Markup:
    """Names beside the ends of lines, (label, colour, x, y), moved apart where they would meet."""
    gap = 13.0
    x_axis, y_axis = axes
    known = sorted(
        (float(y_axis(y)), float(x_axis(x)), label, colour)
        for label, colour, x, y in ends
        if math.isfinite(x) and math.isfinite(y)
    )
    places = [max(y, y_axis.end + 4) for y, *_ in known]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    limit = y_axis.start
    for i in reversed(range(len(places))):
        places[i] = max(min(places[i], limit), y_axis.end + 4)
        limit = places[i] - gap
    shown = [
        (x, y, place, colour, label, shorten(label, MAX_LABEL_CHARS))
        for place, (y, x, label, colour) in zip(places, known)
    ]
    return part("end_labels", shown, right=x_axis.end + 7)


def shorten(label: str, limit: int) -> str:
    """A name that fits: what tells runs apart is at its end as often as at its start."""
    if len(label) <= limit:
        return label
    half = (limit - 1) // 2
    return f"{label[: limit - 1 - half]}\u2026{label[-half:]}"


def _last(points: Points) -> tuple[float, float]:
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return finite[-1] if finite else (math.nan, math.nan)


def distribution(series: Sequence[tuple[str, Sequence[float], str]], *, x_label: str) -> Markup:
    """One histogram above the other in shared bins, each named, with a line at its mean."""
    edges, shares = histogram([values for _, values, _ in series])
    top = max((share for row in shares for share in row), default=1.0) or 1.0
    row_height = 62.0
    height = round(TOP + BOTTOM + row_height * len(series))
    x_axis = Scale(edges[0], edges[-1], 18.0, WIDTH - 18.0)
    drawn = [frame(x_axis, Scale(0.0, 1.0, height - BOTTOM, TOP), x_label, "")]
    for i, ((label, values, colour), row) in enumerate(zip(series, shares)):
        base = TOP + row_height * (i + 1)
        y_axis = Scale(0.0, top, base, base - row_height + 17)
        middle = mean(values)
        heights = [f"V{y_axis(share)}H{x_axis(edge)}" for edge, share in zip(edges[1:], row)]
        path = f"M{x_axis(edges[0])} {y_axis(0)}{''.join(heights)}V{y_axis(0)}Z"
        at_mean = f"M{x_axis(middle)} {base:g}V{y_axis.end:g}" if math.isfinite(middle) else ""
        words = {"highest": max(row, default=0.0), "middle": num(middle), "line": at_mean}
        name = shorten(label, 40)
        drawn.append(part("ridge", label, name, colour, path, top=base - row_height + 13, **words))
    return svg(f"distribution of {x_label}", drawn, (WIDTH, height))


def histogram(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Shared bin edges, and for each row the share of its finite values in each bin."""
    finite = [[value for value in row if math.isfinite(value)] for row in rows]
    low, high = span([value for row in finite for value in row], margin=0.0)
    bins = min(32, max(6, round(math.sqrt(max(map(len, finite), default=1)) * 1.5)))
    width = (high - low) / bins
    edges = [low + i * width for i in range(bins)] + [high]
    shares: list[list[float]] = []
    for row in finite:
        counts = [0] * bins
        for value in row:
            counts[min(bins - 1, int((value - low) / width))] += 1
        shares.append([count / len(row) if row else 0.0 for count in counts])
    return edges, shares


def scatter(points: Points, colour: str, *, x_label: str, y_label: str) -> Markup:
    """A cloud on equal axes with its diagonal: above it, y is the larger."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    low, high = span([value for point in points for value in point])
    size = (WIDTH, 300)
    axes = Scale(low, high, LEFT, WIDTH - RIGHT), Scale(low, high, size[1] - BOTTOM, TOP)
    cloud = part("cloud", thin(points, 400), low, high, colour, *axes)
    return svg(f"{y_label} by {x_label}", [frame(*axes, x_label, y_label), cloud], size)


def legend_of(lines: Sequence[Any]) -> str:
    """A colour key where lines, or trails of dots, are too many to be named at their ends."""
    return "" if is_labelled(lines) else part("legend", lines)
