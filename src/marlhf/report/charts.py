"""Figures as SVG text: no plotting library, nothing to load, sharp at any size.

Every function is pure: numbers in, one `<svg>` out. Colours are CSS variables, so that a
figure follows the page into dark mode; numbers that are not finite leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from marlhf.intervals import mean, thin
from marlhf.report.hover import MAX_ROWS, Box, columns, point
from marlhf.report.page import class_of, num, percent, text

WIDTH, HEIGHT = 340, 224
SMALL = (280, 200)
"""(width, height) of a figure that shares a row with three others."""
LARGE = (460, 290)
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 40
MAX_MARKS = 40
"""A line with more points than this has tooltips at evenly spaced ones only."""
MAX_LABELS = 7
"""As many lines are named at their ends; more have a key above the figure."""
MAX_LABEL_CHARS = 20


@dataclass(frozen=True)
class Series:
    """One line or cloud: (x, y) points, and where there are seeds (x, low, high) around them."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    band: Sequence[tuple[float, float, float]] = ()
    dash: str = ""
    notes: Sequence[str] = field(default=())
    """One tooltip per point, in place of its coordinates."""
    raw: Sequence[tuple[float, float]] = ()
    """What a smoothed line was made from, drawn faintly behind it."""


@dataclass(frozen=True)
class Axis:
    """A linear scale from numbers to pixels, with round ticks inside its range."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{self.start + share * (self.end - self.start):.1f}".removesuffix(".0")

    def ticks(self, count: int = 5) -> list[float]:
        return nice_ticks(self.low, self.high, count)


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


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    is_share: bool = False,
) -> str:
    """Lines over a shared axis; the band around one is the range over its seeds.

    `size` is in the figure's own units: it scales to the page, so a larger size is one
    with relatively smaller text. Shares are shown in per cent and never beyond 0 to 100.
    """
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in (*s.points, *s.raw)]
    ys += [edge for s in series for _, low, high in s.band for edge in (low, high)]
    low, high = span(ys)
    if is_share and low < 1 and high > 0:
        low, high = max(low, 0.0), min(high, 1.0)
    names = [s.label for s in series] if is_labelled(series) else []
    x_axis, y_axis = _axes(span(xs, margin=0.02), (low, high), size, margin_for(names, size))
    drawn = [frame(x_axis, y_axis, x_label, y_label, percent_text if is_share else tick_text)]
    drawn += [_band(s, x_axis, y_axis) for s in series if s.band]
    drawn += [_faint(s, x_axis, y_axis) for s in series if s.raw]
    # Lines that double back, or too many of them, have a tooltip per point instead of a box.
    by_column = len(series) <= MAX_ROWS and not any(s.notes for s in series)
    drawn += [_line(s, x_axis, y_axis, with_points=not by_column) for s in series]
    if names:
        ends = [(s.label, s.colour, *_last(s.points)) for s in series]
        drawn.append(end_labels(ends, (x_axis, y_axis)))
    if by_column:
        lines = [(s.label, s.colour, s.points) for s in series]
        form = percent if is_share else "{:.4g}".format
        box = _box(x_axis, y_axis)
        drawn.append(columns(lines, (x_axis, y_axis), box, x_label=x_label, form=form))
    return svg(f"{y_label} by {x_label}", drawn, size)


def _box(x_axis: Axis, y_axis: Axis) -> Box:
    return Box(x_axis.start, x_axis.end, y_axis.end, y_axis.start)


def is_labelled(series: Sequence[object]) -> bool:
    """Whether lines are named at their ends, so that no key is needed."""
    return len(series) <= MAX_LABELS


def margin_for(names: Sequence[str], size: tuple[int, int] = (WIDTH, HEIGHT)) -> float:
    """Room on the right for names at the ends of lines, in the size of phones and paper."""
    longest = max((min(len(name), MAX_LABEL_CHARS) for name in names), default=0)
    width = 9.0 if size[0] >= LARGE[0] else 7.2
    return 22 + width * longest if longest else RIGHT


def end_labels(ends: Sequence[tuple[str, str, float, float]], axes: tuple[Axis, Axis]) -> str:
    """Names beside the ends of lines, (label, colour, x, y), moved apart where they would meet."""
    gap = 13.0
    x_axis, y_axis = axes
    known = [
        (float(y_axis(y)), float(x_axis(x)), label, colour)
        for label, colour, x, y in ends
        if math.isfinite(x) and math.isfinite(y)
    ]
    known.sort()
    places = [max(y, y_axis.end + 4) for y, *_ in known]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    limit = y_axis.start
    for i in reversed(range(len(places))):
        places[i] = max(min(places[i], limit), y_axis.end + 4)
        limit = places[i] - gap
    drawn: list[str] = []
    right = x_axis.end + 7
    for place, (y, x, label, colour) in zip(places, known):
        shown = shorten(label, MAX_LABEL_CHARS)
        drawn.append(
            f"<g{class_of(colour)}>"
            f'<path class="leader" stroke="{colour}" d="M{x:g} {y:g}L{right:g} {place:g}"/>'
            f'<path class="key" stroke="{colour}" d="M{right:g} {place:g}h8"/>'
            f'<text class="end" x="{right + 11:g}" y="{place:g}" dy=".33em">{text(shown)}'
            f"<title>{text(label)}</title></text></g>"
        )
    return "".join(drawn)


def shorten(label: str, limit: int) -> str:
    """A name that fits: what tells runs apart is at its end as often as at its start."""
    if len(label) <= limit:
        return label
    half = (limit - 1) // 2
    return f"{label[: limit - 1 - half]}\u2026{label[-half:]}"


def _last(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return finite[-1] if finite else (math.nan, math.nan)


def distribution(series: Sequence[tuple[str, Sequence[float], str]], *, x_label: str) -> str:
    """One histogram above the other in shared bins, each named, with a line at its mean."""
    edges, shares = histogram([values for _, values, _ in series])
    top = max((share for row in shares for share in row), default=1.0) or 1.0
    row_height = 62.0
    height = round(TOP + BOTTOM + row_height * len(series))
    x_axis = Axis(edges[0], edges[-1], 18.0, WIDTH - 18.0)
    drawn = [frame(x_axis, Axis(0.0, 1.0, height - BOTTOM, TOP), x_label, "")]
    for i, ((label, values, colour), row) in enumerate(zip(series, shares)):
        base = TOP + row_height * (i + 1)
        y_axis = Axis(0.0, top, base, base - row_height + 17)
        middle = mean(values)
        drawn.append(
            f'<path{class_of(colour)} d="{_steps(edges, row, x_axis, y_axis)}" '
            f'fill="{colour}" fill-opacity=".3" '
            f'stroke="{colour}" stroke-width="1.4" stroke-linejoin="round">'
            f"<title>{text(label)}: highest column {max(row, default=0):.1%}</title></path>"
        )
        shown = f", mean {num(middle)}" if math.isfinite(middle) else ""
        drawn.append(
            f'<text class="name" x="18" y="{base - row_height + 13:g}">{text(shorten(label, 40))}'
            f'<tspan class="soft">{shown}</tspan></text>'
        )
        if math.isfinite(middle):
            drawn.append(f'<path class="mean" d="M{x_axis(middle)} {base:g}V{y_axis.end:g}"/>')
    return svg(f"distribution of {x_label}", drawn, (WIDTH, height))


def _steps(edges: Sequence[float], row: Sequence[float], x_axis: Axis, y_axis: Axis) -> str:
    steps = [f"M{x_axis(edges[0])} {y_axis(0)}"]
    for left, right, share in zip(edges, edges[1:], row):
        steps.append(f"V{y_axis(share)}H{x_axis(right)}" if right > left else "")
    return f"{''.join(steps)}V{y_axis(0)}Z"


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


def scatter(series: Series, *, x_label: str, y_label: str) -> str:
    """A cloud on equal axes with its diagonal: above it, y is the larger."""
    points = [(x, y) for x, y in series.points if math.isfinite(x) and math.isfinite(y)]
    both = span([value for point in points for value in point])
    size = (WIDTH, 300)
    x_axis, y_axis = _axes(both, both, size)
    drawn = [
        frame(x_axis, y_axis, x_label, y_label),
        f'<line class="diagonal" x1="{x_axis(both[0])}" y1="{y_axis(both[0])}" '
        f'x2="{x_axis(both[1])}" y2="{y_axis(both[1])}"/>',
        f'<g fill="{series.colour}" fill-opacity=".5">',
    ]
    for x, y in thin(points, 400):
        drawn.append(
            f'<circle cx="{x_axis(x)}" cy="{y_axis(y)}" r="2.6">'
            f"<title>{x:.3g} to {y:.3g}</title></circle>"
        )
    drawn.append("</g>")
    return svg(f"{y_label} by {x_label}", drawn, size)


class Named(Protocol):
    """Whatever has a name, a colour and perhaps a dash: a line, a trail of dots."""

    @property
    def label(self) -> str: ...
    @property
    def colour(self) -> str: ...
    @property
    def dash(self) -> str: ...


def legend_of(lines: Sequence[Named]) -> str:
    """A colour key where lines are too many to be named at their ends."""
    if is_labelled(lines):
        return ""
    return legend([(line.label, line.colour, line.dash) for line in lines])


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Colour keys as HTML, so that long names wrap; (label, colour, dash) each."""
    keys = "".join(
        f"<span{class_of(colour)}>"
        f'<i class="{"dashed" if dash else "dot"}" style="--key:{colour}"></i>'
        f"{text(label)}</span>"
        for label, colour, dash in entries
    )
    return f'<div class="legend">{keys}</div>'


def _axes(
    xs: tuple[float, float],
    ys: tuple[float, float],
    size: tuple[int, int] = (WIDTH, HEIGHT),
    right: float = RIGHT,
) -> tuple[Axis, Axis]:
    return Axis(*xs, LEFT, size[0] - right), Axis(*ys, size[1] - BOTTOM, TOP)


def frame(
    x_axis: Axis,
    y_axis: Axis,
    x_label: str,
    y_label: str,
    y_format: Callable[[float, float], str] = tick_text,
    *,
    x_format: Callable[[float, float], str] = tick_text,
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> str:
    """Grid lines, tick numbers and axis names; no y axis where it has no name."""
    drawn = ['<g class="grid">']
    y_ticks = y_axis.ticks() if y_label else []
    if x_ticks is None:
        places = x_axis.ticks(4 if x_axis.end - x_axis.start < 240 else 5)
        step = places[1] - places[0] if len(places) > 1 else 0.0
        x_ticks = [(x, x_format(x, step)) for x in places]
    for y in y_ticks:
        drawn.append(f'<path d="M{x_axis.start:g} {y_axis(y)}H{x_axis.end:g}"/>')
    if not y_label:
        for x, _ in x_ticks:
            drawn.append(f'<path d="M{x_axis(x)} {y_axis.start:g}V{y_axis.end:g}"/>')
    drawn.append(f'<path class="base" d="M{x_axis.start:g} {y_axis.start:g}H{x_axis.end:g}"/></g>')
    drawn.append('<g class="ticks" text-anchor="end">')
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else 0.0
    for y in y_ticks:
        shown = y_format(y, step)
        drawn.append(f'<text x="{x_axis.start - 6:g}" y="{y_axis(y)}" dy=".33em">{shown}</text>')
    drawn.append('</g><g class="ticks" text-anchor="middle">')
    for x, shown in x_ticks:
        drawn.append(f'<text x="{x_axis(x)}" y="{y_axis.start + 15:g}">{text(shown)}</text>')
    middle = (x_axis.start + x_axis.end) / 2
    below = y_axis.start + BOTTOM - 6
    drawn.append(f'<text x="{middle:g}" y="{below:g}">{text(x_label)}</text></g>')
    return "".join(drawn)


def _line(series: Series, x_axis: Axis, y_axis: Axis, *, with_points: bool) -> str:
    """The line, broken where a number is missing, and tooltips at (some of) its points."""
    path: list[str] = []
    marks: list[tuple[str, str, str]] = []
    drawing = False
    for i, (x, y) in enumerate(series.points):
        if not (math.isfinite(x) and math.isfinite(y)):
            drawing = False
            continue
        path.append(f"{'L' if drawing else 'M'}{x_axis(x)} {y_axis(y)}")
        drawing = True
        note = series.notes[i] if series.notes else f"{x:.4g}: {y:.4g}"
        marks.append((x_axis(x), y_axis(y), note))
    dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
    drawn = [
        f"<g{class_of(series.colour)}>"
        f'<path class="line" stroke="{series.colour}"{dash} d="{"".join(path)}"/>'
        f'<g class="marks" fill="{series.colour}">'
    ]
    has_dots = len(marks) <= 30
    for x, y, note in thin(marks, MAX_MARKS):
        if has_dots:
            drawn.append(f'<circle cx="{x}" cy="{y}" r="2.4"/>')
        if with_points:
            drawn.append(point(x, y, f"{series.label}, {note}", _box(x_axis, y_axis)))
    drawn.append("</g></g>")
    return "".join(drawn)


def _faint(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    points = [f"{x_axis(x)} {y_axis(y)}" for x, y in series.raw if math.isfinite(x + y)]
    if len(points) < 2:
        return ""
    kind = class_of(series.colour, "raw")
    return f'<path{kind} stroke="{series.colour}" d="M{"L".join(points)}"/>'


def _band(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    edges = [edge for edge in series.band if all(map(math.isfinite, edge))]
    upper = [f"{x_axis(x)} {y_axis(high)}" for x, _, high in edges]
    lower = [f"{x_axis(x)} {y_axis(low)}" for x, low, _ in reversed(edges)]
    if len(edges) < 2:
        return ""
    fill = f'{class_of(series.colour)} fill="{series.colour}" fill-opacity=".16"'
    return f'<path{fill} d="M{"L".join(upper + lower)}Z"/>'


def svg(name: str, drawn: Sequence[str], size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    # A large figure is scaled down on phones and paper: its text is set larger there.
    kind = ' class="large"' if size[0] >= LARGE[0] else ""
    return (
        f'<svg{kind} viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{text(name)}">'
        f"{''.join(drawn)}</svg>"
    )
