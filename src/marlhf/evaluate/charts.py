"""Figures as SVG text: no plotting library, nothing to load, sharp at any size.

Every function is pure: numbers in, one `<svg>` out. Colours are CSS variables, so that a
figure follows the page into dark mode; numbers that are not finite leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from marlhf.evaluate.page import text
from marlhf.evaluate.stats import thin

WIDTH, HEIGHT = 340, 224
SMALL = (280, 200)
"""(width, height) of a figure that stands with three others in a row."""
LARGE = (460, 290)
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 40
MAX_MARKS = 40
"""A line with more points than this has tooltips at evenly spaced ones only."""


@dataclass(frozen=True)
class Series:
    """One line or cloud: (x, y) points, and where there are seeds (x, low, high) around them."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    band: Sequence[tuple[float, float, float]] = ()
    dash: str = ""
    notes: Sequence[str] = field(default=())
    """A tooltip a point, in place of its coordinates."""


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
        return f"{value:.1e}" if value else "0"
    if size >= 1e4:
        return f"{value / 1000:g}k"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 2
    return f"{value:.{decimals}f}".replace("-", "\u2212")


def _percent(value: float, step: float) -> str:
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
    ys = [y for s in series for _, y in s.points]
    ys += [edge for s in series for _, low, high in s.band for edge in (low, high)]
    low, high = span(ys)
    if is_share and low < 1 and high > 0:
        low, high = max(low, 0.0), min(high, 1.0)
    x_axis, y_axis = _axes(span(xs, margin=0.02), (low, high), size)
    drawn = [_frame(x_axis, y_axis, x_label, y_label, _percent if is_share else tick_text)]
    drawn += [_band(s, x_axis, y_axis) for s in series if s.band]
    drawn += [_line(s, x_axis, y_axis) for s in series]
    return _svg(f"{y_label} by {x_label}", drawn, size)


def distribution(series: Sequence[tuple[str, Sequence[float], str]], *, x_label: str) -> str:
    """Overlaid histograms as shares of each series, in shared bins; a dashed line at each mean."""
    edges, shares = histogram([values for _, values, _ in series])
    top = max((share for row in shares for share in row), default=1.0)
    x_axis, y_axis = _axes((edges[0], edges[-1]), (0.0, top * 1.08 or 1.0))
    drawn = [_frame(x_axis, y_axis, x_label, "share of prompts", _percent)]
    for (label, values, colour), row in zip(series, shares):
        steps = [f"M{x_axis(edges[0])} {y_axis(0)}"]
        for left, right, share in zip(edges, edges[1:], row):
            steps.append(f"V{y_axis(share)}H{x_axis(right)}" if right > left else "")
        mean = _mean(values)
        drawn.append(
            f'<path d="{"".join(steps)}V{y_axis(0)}Z" fill="{colour}" fill-opacity=".13" '
            f'stroke="{colour}" stroke-width="1.6" stroke-linejoin="round">'
            f"<title>{text(label)}</title></path>"
        )
        if math.isfinite(mean):
            drawn.append(
                f'<line x1="{x_axis(mean)}" x2="{x_axis(mean)}" y1="{y_axis.end}" '
                f'y2="{y_axis.start}" stroke="{colour}" stroke-width="1.6" stroke-dasharray="4 3">'
                f"<title>{text(label)}: mean {mean:.3g}</title></line>"
            )
    return _svg(f"distribution of {x_label}", drawn)


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
        _frame(x_axis, y_axis, x_label, y_label),
        f'<line class="diagonal" x1="{x_axis(both[0])}" y1="{y_axis(both[0])}" '
        f'x2="{x_axis(both[1])}" y2="{y_axis(both[1])}"/>',
        f'<g fill="{series.colour}" fill-opacity=".5">',
    ]
    for x, y in thin(points, 600):
        drawn.append(
            f'<circle cx="{x_axis(x)}" cy="{y_axis(y)}" r="2.6">'
            f"<title>{x:.3g} to {y:.3g}</title></circle>"
        )
    drawn.append("</g>")
    return _svg(f"{y_label} by {x_label}", drawn, size)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], *, x_label: str
) -> str:
    """One horizontal bar a row, made of (part, value, colour), its name above it."""
    totals = [sum(value for _, value, _ in parts) for _, parts in rows]
    height = TOP + BOTTOM + 44 * len(rows)
    width = LARGE[0]
    x_axis = Axis(0.0, max(totals, default=0.0) * 1.02 or 1.0, 8.0, width - 40.0)
    y_axis = Axis(0.0, 1.0, height - BOTTOM, TOP)
    drawn = [_frame(x_axis, y_axis, x_label, "")]
    for i, (label, parts) in enumerate(rows):
        y = TOP + 44 * i
        drawn.append(f'<text class="name" x="8" y="{y + 13}">{text(label)}</text>')
        done = 0.0
        for part, value, colour in parts:
            left, right = float(x_axis(done)), float(x_axis(done + value))
            title = text(f"{label}, {part}: {value:.3g}")
            drawn.append(
                f'<rect x="{left:.1f}" y="{y + 18}" width="{right - left:.1f}" height="17" '
                f'fill="{colour}"><title>{title}</title></rect>'
            )
            done += value
        drawn.append(f'<text x="{float(x_axis(done)) + 5:.1f}" y="{y + 31}">{totals[i]:.3g}</text>')
    return _svg(x_label, drawn, (width, height))


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Colour keys as HTML, so that long names wrap; (label, colour) each."""
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{text(label)}</span>'
        for label, colour in entries
    )
    return f'<div class="legend">{keys}</div>'


def _axes(
    xs: tuple[float, float], ys: tuple[float, float], size: tuple[int, int] = (WIDTH, HEIGHT)
) -> tuple[Axis, Axis]:
    return Axis(*xs, LEFT, size[0] - RIGHT), Axis(*ys, size[1] - BOTTOM, TOP)


def _frame(
    x_axis: Axis,
    y_axis: Axis,
    x_label: str,
    y_label: str,
    y_format: Callable[[float, float], str] = tick_text,
) -> str:
    """Grid lines, tick numbers and axis names; no y axis where it has no name."""
    drawn = ['<g class="grid">']
    y_ticks = y_axis.ticks() if y_label else []
    x_ticks = x_axis.ticks()
    for y in y_ticks:
        drawn.append(f'<path d="M{x_axis.start:g} {y_axis(y)}H{x_axis.end:g}"/>')
    if not y_label:
        for x in x_ticks:
            drawn.append(f'<path d="M{x_axis(x)} {y_axis.start:g}V{y_axis.end:g}"/>')
    drawn.append(f'<path class="base" d="M{x_axis.start:g} {y_axis.start:g}H{x_axis.end:g}"/></g>')
    drawn.append('<g class="ticks" text-anchor="end">')
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else 0.0
    for y in y_ticks:
        shown = y_format(y, step)
        drawn.append(f'<text x="{x_axis.start - 6:g}" y="{y_axis(y)}" dy=".33em">{shown}</text>')
    drawn.append('</g><g class="ticks" text-anchor="middle">')
    step = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 0.0
    for x in x_ticks:
        shown = tick_text(x, step)
        drawn.append(f'<text x="{x_axis(x)}" y="{y_axis.start + 15:g}">{shown}</text>')
    middle = (x_axis.start + x_axis.end) / 2
    below = y_axis.start + BOTTOM - 6
    drawn.append(f'<text x="{middle:g}" y="{below:g}">{text(x_label)}</text></g>')
    return "".join(drawn)


def _line(series: Series, x_axis: Axis, y_axis: Axis) -> str:
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
    radius = "2.4" if len(marks) <= 30 else "0"
    drawn = [f'<path class="line" stroke="{series.colour}"{dash} d="{"".join(path)}"/>']
    drawn.append(f'<g class="marks" fill="{series.colour}">')
    for x, y, note in thin(marks, MAX_MARKS):
        if radius != "0":
            drawn.append(f'<circle cx="{x}" cy="{y}" r="{radius}"/>')
        title = text(f"{series.label}, {note}")
        drawn.append(f'<circle class="hit" cx="{x}" cy="{y}" r="8"><title>{title}</title></circle>')
    drawn.append("</g>")
    return "".join(drawn)


def _band(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    edges = [edge for edge in series.band if all(map(math.isfinite, edge))]
    upper = [f"{x_axis(x)} {y_axis(high)}" for x, _, high in edges]
    lower = [f"{x_axis(x)} {y_axis(low)}" for x, low, _ in reversed(edges)]
    if len(edges) < 2:
        return ""
    return f'<path fill="{series.colour}" fill-opacity=".16" d="M{"L".join(upper + lower)}Z"/>'


def _svg(name: str, drawn: Sequence[str], size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{text(name)}">'
        f"{''.join(drawn)}</svg>"
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan
