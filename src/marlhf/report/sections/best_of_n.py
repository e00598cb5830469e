"""Best of n: one heat map per run over temperature and n."""

from __future__ import annotations

import math
from collections.abc import Sequence

from marlhf.evaluate.best_of_n_grid import Grid, kl_bound, read_grids
from marlhf.report.groups import Group, labelled
from marlhf.report.page import Cell, figure, grid, num, section, text


def best_of_n(groups: Sequence[Group]) -> str:
    """One heat map per run: the mean best score at each temperature and n."""
    figures = [
        _heat_figure(f"{label}, {name}", samples)
        for label, _, folder in labelled(groups)
        for name, samples in read_grids(folder).items()
    ]
    return section(
        "best_of_n",
        "Best of n",
        "The mean score of the best of n samples, by the reward model that chose it: rows are "
        "temperatures, darker is higher. Choosing among n moves a model by at "
        "most log n &minus; (n &minus; 1)/n nats: 0.6 for 4, 1.8 for 16, 2.5 for 32.",
        grid(figures, "two"),
    )


def _heat_figure(title: str, samples: Grid) -> str:
    cells = {(t, n): samples.cell(t, n) for t in samples.lines for n in samples.ns}
    rows: list[list[Cell]] = [
        [t, n, *value[:3], samples.length(t, n), kl_bound(n)] for (t, n), value in cells.items()
    ]
    return figure(
        title,
        heat_map(
            [f"{t:g}" for t in samples.lines],
            [str(n) for n in samples.ns],
            [[cells[t, n].mean for n in samples.ns] for t in samples.lines],
            x_label="n",
            y_label="temperature",
        ),
        file=f"best of n {title}",
        header=["temperature", "n", "score", "low", "high", "length", "kl bound"],
        rows=rows,
    )


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    x_label: str,
    y_label: str,
) -> str:
    """Cells with their number in them, the darker the higher, as an SVG."""
    left, top, width, height = 64, 8, max(44, min(80, 380 // max(1, len(columns)))), 30
    finite = [value for row in values for value in row if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    drawn: list[str] = []
    for i, (name, row) in enumerate(zip(rows, values)):
        y = top + i * height
        drawn.append(f'<text x="{left - 8}" y="{y + 19}" text-anchor="end">{text(name)}</text>')
        for j, value in enumerate(row):
            if not math.isfinite(value):
                continue
            x, share = left + j * width, (value - low) / ((high - low) or 1.0)
            drawn.append(
                f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" rx="3" '
                f'style="fill:rgba(var(--heat),{0.06 + 0.54 * share:.2f})"/>'
                f'<text class="name" x="{x + width / 2 - 1:g}" y="{y + 19}" '
                f'text-anchor="middle">{num(value)}</text>'
            )
    bottom = top + len(rows) * height
    for j, name in enumerate(columns):
        x = left + j * width + width / 2
        drawn.append(f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle">{text(name)}</text>')
    across, down = left + len(columns) * width / 2, (top + bottom) / 2
    drawn.append(
        f'<text x="{across:g}" y="{bottom + 30}" text-anchor="middle">{text(x_label)}</text>'
        f'<text x="12" y="{down:g}" text-anchor="middle" transform="rotate(-90 12 {down:g})">'
        f"{text(y_label)}</text>"
    )
    size = left + len(columns) * width + 8, bottom + 38
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" style="max-width:{size[0] * 1.2:g}px" role="img" '
        f'aria-label="{text(y_label)} by {text(x_label)}">{"".join(drawn)}</svg>'
    )
