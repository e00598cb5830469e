"""Best of n from kept scores: the estimate, the table, and the report's heat maps. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlhf.evaluate.held_out import labelled, plain_interval, plain_table
from marlhf.intervals import Interval, interval
from marlhf.report.groups import Group
from marlhf.report.page import Cell, figure, grid, num, section, text
from marlhf.runs.jsonl import Line, read_lines
from marlhf.runs.read import number

BEST = "best_of_n"
"""Where the files lie in a run folder."""


def expected_best(scores: Sequence[float], n: int) -> float:
    """The mean best score of n samples, from all there are, without bias.

    Of N sorted scores the i-th (from 1) is the best of C(i-1, n-1) of the C(N, n) choices.

    >>> expected_best([1.0, 2.0, 4.0], n=2)  # best of 12, 14, 24: (2 + 4 + 4) / 3
    3.333333333333333
    """
    return expected_of_best(scores, scores, n)


def expected_of_best(values: Sequence[float], scores: Sequence[float], n: int) -> float:
    """The mean of another number, such as length, of the best-scored of n samples."""
    count = len(scores)
    if not 1 <= n <= count:
        raise ValueError(f"The best of {n} needs at least {n} samples a prompt; there are {count}.")
    order = sorted(range(count), key=lambda i: scores[i])
    shares = [math.comb(i, n - 1) / math.comb(count, n) for i in range(count)]
    return math.fsum(share * values[at] for share, at in zip(shares, order))


def kl_bound(n: int) -> float:
    """The most by which the best of n differs from one sample, in nats: log n - (n - 1) / n."""
    return math.log(n) - (n - 1) / n


@dataclass(frozen=True)
class Grid:
    """Samples of each temperature, a line a prompt, and the n's to look at."""

    ns: list[int]
    lines: dict[float, list[Line]]

    def cell(self, temperature: float, n: int) -> Interval:
        """The mean best score over prompts, with its interval."""
        return interval([expected_best(line["scores"], n) for line in self.lines[temperature]])

    def length(self, temperature: float, n: int) -> float:
        lines = self.lines[temperature]
        return interval([expected_of_best(x["lengths"], x["scores"], n) for x in lines]).mean


def grid_table(found: Grid) -> str:
    """What `marlhf best-of-n` prints: a row a temperature, a column an n."""
    rows = [
        [f"{heat:g}", *(plain_interval(found.cell(heat, n)) for n in found.ns)]
        for heat in found.lines
    ]
    return plain_table(["temperature", *(f"best of {n}" for n in found.ns)], rows)


def read_grids(folder: Path) -> dict[str, Grid]:
    """What `marlhf best-of-n` left in a run folder: a grid of each judge, length and seed."""
    found: dict[str, dict[float, list[Line]]] = {}
    for file in sorted((folder / BEST).glob("t[0-9]*-*.jsonl")):
        heat, _, rest = file.stem[1:].partition("-")
        lines = [line for line in read_lines(file).values() if _whole(line)]
        if lines:
            found.setdefault(rest, {})[float(heat)] = lines
    grids: dict[str, Grid] = {}
    for name, lines in found.items():
        most = min(len(line["scores"]) for each in lines.values() for line in each)
        ns = sorted({*(2**i for i in range(most.bit_length())), most})
        grids[name] = Grid(ns, dict(sorted(lines.items())))
    return grids


def _whole(line: Line) -> bool:
    """Whether a line has what it takes: a hand-edited one may not."""
    scores, lengths = line.get("scores"), line.get("lengths")
    if not isinstance(scores, list) or not isinstance(lengths, list):
        return False
    numbers = all(math.isfinite(number(value)) for value in (*scores, *lengths))
    return 0 < len(scores) == len(lengths) and numbers


def best_of(groups: Sequence[Group]) -> str:
    """A heat map a run: the mean best score at each temperature and n."""
    figures = [
        _heat_figure(f"{label}, {name}", found)
        for label, _, folder in labelled(groups)
        for name, found in read_grids(folder).items()
    ]
    return section(
        "best_of_n",
        "Best of n",
        "The mean score of the best of n samples, by the reward model that chose it: rows are "
        "temperatures, the stronger the colour the higher. Choosing among n moves a model by at "
        "most log n &minus; (n &minus; 1)/n nats: 0.6 for 4, 1.8 for 16, 2.5 for 32.",
        grid(figures, "two"),
    )


def _heat_figure(title: str, found: Grid) -> str:
    cells = {(t, n): found.cell(t, n) for t in found.lines for n in found.ns}
    rows: list[list[Cell]] = [
        [t, n, *value[:3], found.length(t, n), kl_bound(n)] for (t, n), value in cells.items()
    ]
    return figure(
        title,
        heat_map(
            [f"{t:g}" for t in found.lines],
            [str(n) for n in found.ns],
            [[cells[t, n].mean for n in found.ns] for t in found.lines],
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
                f'style="fill:rgba(var(--pos),{0.06 + 0.54 * share:.2f})"/>'
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
