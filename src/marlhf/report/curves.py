"""Figures of numbers over the course of training, one line per group of seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from marlhf.intervals import thin
from marlhf.report.charts import HEIGHT, WIDTH, Series, legend_of, line_chart
from marlhf.report.groups import Group, Point
from marlhf.report.page import figure

MAX_POINTS = 300
POINTS_A_CHART = 1500
"""Shared by the lines of a chart, so that forty runs still make a page one can mail."""

SHARES = {
    "rl/clip_fraction",
    "rl/ended",
    "eval/ended",
    "eval/repetition",
    "eval/win_rate",
    "eval/accuracy",
    "reward/accuracy",
}


def curve_figure(
    title: str,
    groups: Sequence[Group],
    keys: Sequence[str],
    *,
    x: str = "step",
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> str:
    """Lines of the first of `keys` that anyone recorded; held-out and training never mix."""
    for key in keys:
        curves = [(group, _drawable(group.curve(key), x)) for group in groups]
        curves = [(group, points) for group, points in curves if points]
        if curves:
            break
    else:
        return ""
    limit = max(40, min(MAX_POINTS, POINTS_A_CHART // len(curves)))
    # Training batches are noisy, evaluations are not: only the former are smoothed.
    window = 1 if key.startswith("eval/") else _window(points for _, points in curves)
    lines: list[Series] = []
    rows: list[list[str | float | None]] = []
    for group, points in curves:
        smooth = _running_mean(points, window, limit)
        kept = thin(points, limit)
        band = [(getattr(p, x), p.low, p.high) for p in smooth] if len(group.runs) > 1 else ()
        line = [(getattr(p, x), p.mean) for p in smooth]
        raw = [(getattr(p, x), p.mean) for p in kept] if window > 1 and len(curves) < 4 else ()
        lines.append(Series(group.label, line, group.colour, band, group.dash, raw=raw))
        ends = [[s.mean] if window > 1 else [] for s in smooth]
        rows += [[group.label, *point, *end] for point, end in zip(kept, ends)]
    header = ["run", "step", "seconds", key, "lowest seed", "highest seed"]
    return figure(
        title,
        line_chart(lines, x_label=x, y_label=title, size=size, is_share=key in SHARES),
        file=f"{title} by {x}",
        key=legend_of(lines),
        note=f"Running means over {window} steps." if window > 1 else "",
        header=[*header, "running mean"] if window > 1 else header,
        rows=rows,
    )


def _window(curves: Iterable[Sequence[Point]]) -> int:
    """Logged steps that a running mean is taken over: a thirtieth of the longest run."""
    return max(1, max((len(points) for points in curves), default=0) // 30)


def _running_mean(points: list[Point], window: int, limit: int) -> list[Point]:
    """At most `limit` points, each averaged with its neighbours, fewer towards the ends."""
    if window == 1:
        return thin(points, limit)
    sums = [list(accumulate((p[i] for p in points), initial=0.0)) for i in (2, 3, 4)]
    smooth: list[Point] = []
    for i in thin(range(len(points)), limit):
        reach = min(window // 2, i, len(points) - 1 - i)
        first, last = i - reach, i + reach + 1
        means = [(column[last] - column[first]) / (last - first) for column in sums]
        smooth.append(Point(points[i].step, points[i].seconds, *means))
    return smooth


def _drawable(points: list[Point], x: str) -> list[Point]:
    return [point for point in points if math.isfinite(getattr(point, x))]
