"""Stacked bars: seconds by phase, and wins, ties and losses."""

from __future__ import annotations

from collections.abc import Sequence

from marlhf.report.charts import BOTTOM, LARGE, TOP, Axis, frame, shorten, svg
from marlhf.report.page import text

PALE = {"var(--t2)", "var(--t3)", "var(--t4)"}
"""Greys light enough for dark numbers."""


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]],
    *,
    x_label: str,
    inside: bool = False,
) -> str:
    """One horizontal bar per row, made of (part, value, colour), with its name above it.

    With `inside`, each part shows its number where it fits; else the sum is shown at the end.
    """
    totals = [sum(value for _, value, _ in parts) for _, parts in rows]
    height = TOP + BOTTOM + 44 * len(rows)
    width = LARGE[0]
    longest = max((len(f"{total:.3g}") for total in totals), default=0)
    room = 40.0 if inside else max(40.0, 10 + 9 * longest)  # for the sum; phones draw it larger
    x_axis = Axis(0.0, max(totals, default=0.0) * 1.02 or 1.0, 16.0, width - room)
    y_axis = Axis(0.0, 1.0, height - BOTTOM, TOP)
    drawn = [frame(x_axis, y_axis, x_label, "")]
    for i, (label, parts) in enumerate(rows):
        y = TOP + 44 * i
        drawn.append(f'<text class="name" x="16" y="{y + 13}">{text(shorten(label, 66))}</text>')
        done = 0.0
        for part, value, colour in parts:
            left, right = float(x_axis(done)), float(x_axis(done + value))
            title = text(f"{label}, {part}: {value:.3g}")
            drawn.append(
                f'<rect x="{left:.1f}" y="{y + 18}" width="{right - left:.1f}" height="17" '
                f'fill="{colour}"><title>{title}</title></rect>'
            )
            if inside and right - left > 26:
                middle = (left + right) / 2
                kind = "in pale" if colour in PALE else "in"
                drawn.append(
                    f'<text class="{kind}" x="{middle:.1f}" y="{y + 30.5}">{value:.0f}</text>'
                )
            done += value
        if not inside:
            end = float(x_axis(done)) + 5
            drawn.append(f'<text x="{end:.1f}" y="{y + 31}">{totals[i]:.3g}</text>')
    return svg(x_label, drawn, (width, height))
