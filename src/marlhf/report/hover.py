"""Values under the pointer: a crosshair and a box of numbers, shown by the style sheet alone.

Each column of a figure holds its crosshair and its numbers, invisible until the pointer is in it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from marlhf.intervals import thin
from marlhf.report.page import class_of, text

MAX_COLUMNS = 40
MAX_ROWS = 10
"""With more lines than this, a box would cover the figure: each point has a tooltip instead."""
LINE_HEIGHT = 14


class Reading(NamedTuple):
    """One line at one column: where its point is, and what the box says about it."""

    x: float
    y: float
    words: str
    colour: str


class Box(NamedTuple):
    """The plot's edges in the figure's units."""

    left: float
    right: float
    top: float
    bottom: float


def columns(
    lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    place: tuple[Callable[[float], str], Callable[[float], str]],
    box: Box,
    *,
    x_label: str,
    form: Callable[[float], str],
) -> str:
    """A hidden crosshair for each column of a figure; lines are (label, colour, points by x)."""
    known = [
        (label, colour, sorted((x, y) for x, y in points if math.isfinite(x + y)))
        for label, colour, points in lines
    ]
    xs = thin(sorted({x for *_, points in known for x, _ in points}), MAX_COLUMNS)
    if not xs:
        return ""
    x_at, y_at = place
    reach = max((b - a for a, b in pairwise(xs)), default=math.inf)
    centres = [float(x_at(x)) for x in xs]
    edges = [box.left, *((a + b) / 2 for a, b in pairwise(centres)), box.right]
    drawn = ['<g class="hover">']
    for i, x in enumerate(xs):
        readings: list[Reading] = []
        for label, colour, points in known:
            if near := _nearest(points, x, reach):
                words = f"{label} {form(near[1])}"
                readings.append(Reading(float(x_at(near[0])), float(y_at(near[1])), words, colour))
        head = f"{x_label.partition(' (')[0]} {x:.4g}"
        drawn.append(_column((edges[i], edges[i + 1]), centres[i], head, readings, box))
    drawn.append("</g>")
    return "".join(drawn)


def _nearest(
    points: Sequence[tuple[float, float]], x: float, reach: float
) -> tuple[float, float] | None:
    after = bisect_left(points, (x, -math.inf))
    beside = points[max(0, after - 1) : after + 1]
    near = min(beside, key=lambda point: abs(point[0] - x), default=None)
    return near if near and abs(near[0] - x) <= reach else None


def _column(
    edges: tuple[float, float], x: float, head: str, readings: Sequence[Reading], box: Box
) -> str:
    longest = max(len(head), *(len(reading.words) + 2 for reading in readings), 1)
    width = 6.1 * longest + 14
    fits_right = x + 8 + width <= box.right
    left = x + 8 if fits_right else max(0.0, x - 8 - width)
    height = LINE_HEIGHT * (len(readings) + 1) + 6
    drawn = [
        f'<g><rect class="hit" x="{edges[0]:.1f}" y="{box.top:g}" '
        f'width="{edges[1] - edges[0]:.1f}" height="{box.bottom - box.top:g}"/>'
        f'<path class="cross" d="M{x:.1f} {box.top:g}V{box.bottom:g}"/>'
        f'<g class="tip"><rect x="{left:.1f}" y="{box.top:g}" width="{width:.1f}" '
        f'height="{height:g}" rx="3"/>'
        f'<text x="{left + 7:.1f}" y="{box.top + LINE_HEIGHT:g}">{text(head)}</text>'
    ]
    for i, reading in enumerate(readings, start=2):
        y = box.top + LINE_HEIGHT * i
        drawn.append(
            f'<g{class_of(reading.colour)} fill="{reading.colour}">'
            f'<circle cx="{reading.x:.1f}" cy="{reading.y:.1f}" r="3.4"/>'
            f'<circle cx="{left + 10:.1f}" cy="{y - 4:g}" r="3.4"/>'
            f'<text x="{left + 18:.1f}" y="{y:g}">{text(reading.words)}</text></g>'
        )
    drawn.append("</g></g>")
    return "".join(drawn)


def point(x: str, y: str, note: str, box: Box) -> str:
    """A point with a tooltip and both hairs of a cross, for figures where x is not in order."""
    return (
        f'<g><circle class="hit" cx="{x}" cy="{y}" r="8"><title>{text(note)}</title></circle>'
        f'<path class="cross" d="M{x} {box.top:g}V{box.bottom:g}M{box.left:g} {y}H{box.right:g}"/>'
        f"</g>"
    )
