"""Best of n: one heat map per run over temperature and n, and the frontier of block decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from marlhf.evaluate.results import FrontierPoint, Grid, kl_bound, read_frontiers, read_grids
from marlhf.report.charts import Series, line_chart
from marlhf.report.groups import Group, labelled
from marlhf.report.page import NUM_COLOURS, Cell, figure, grid, num, section, text


def best_of_n(groups: Sequence[Group]) -> str:
    """One heat map per run: the mean best score at each temperature and n.

    Where blocks were decided, two figures more: score against the KL bound and against tokens.
    """
    figures: list[str] = []
    for label, _, folder in labelled(groups):
        for name, samples in read_grids(folder).items():
            figures.append(_heat_figure(f"{label}, {name}", samples))
        for name, ways in read_frontiers(folder).items():
            figures += _frontier_figures(f"{label}, {name}", ways)
    return section(
        "best_of_n",
        "Best of n",
        "The mean score of the best of n samples, by the reward model that chose it: rows are "
        "temperatures, darker is higher. Choosing among n moves a model by at "
        "most log n &minus; (n &minus; 1)/n nats: 0.6 for 4, 1.8 for 16, 2.5 for 32. Deciding "
        "block by block (<code>--blocks</code>) moves it by at most that times the number of "
        "decisions; lines show the score at each bound, and at each number of tokens sampled.",
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


def _frontier_figures(title: str, ways: Mapping[str, Sequence[FrontierPoint]]) -> list[str]:
    header = ["chosen", "k or n", "score", "low", "high", "kl bound", "tokens sampled", "length"]
    rows: list[list[Cell]] = [
        [name, p.candidates, *p.score[:3], p.kl_bound, p.tokens, p.length]
        for name, points in ways.items()
        for p in points
    ]
    colours = {name: f"var(--l{i % NUM_COLOURS})" for i, name in enumerate(ways)}
    figures: list[str] = []
    for measure, x_label in (("kl_bound", "KL bound, nats"), ("tokens", "tokens sampled")):
        series = [
            Series(
                name,
                sorted((getattr(p, measure), p.score.mean) for p in points),
                colours[name],
                band=sorted((getattr(p, measure), p.score.low, p.score.high) for p in points),
            )
            for name, points in ways.items()
        ]
        figures.append(
            figure(
                f"Score by {x_label}: {title}",
                line_chart(series, x_label=x_label, y_label="score"),
                file=f"blocks {measure} {title}",
                header=header,
                rows=rows,
            )
        )
    return figures


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
