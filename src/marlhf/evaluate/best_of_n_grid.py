"""Best of n from saved scores: the estimate and its table. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlhf.errors import SettingError
from marlhf.evaluate.text_table import text_table
from marlhf.intervals import Interval, interval, mean
from marlhf.runs.evaluations import read_evaluations
from marlhf.runs.jsonl import Line
from marlhf.runs.layout import BEST_OF_N
from marlhf.runs.read import number


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
        raise SettingError(
            f"The best of {n} needs at least {n} samples per prompt; there are {count}."
        )
    order = sorted(range(count), key=lambda i: scores[i])
    shares = [math.comb(i, n - 1) / math.comb(count, n) for i in range(count)]
    return math.fsum(share * values[at] for share, at in zip(shares, order))


def kl_bound(n: int) -> float:
    """The most by which the best of n differs from one sample, in nats: log n - (n - 1) / n."""
    return math.log(n) - (n - 1) / n


@dataclass(frozen=True)
class Grid:
    """Samples of each temperature, one line per prompt, and the n's to look at."""

    ns: list[int]
    lines: dict[float, list[Line]]

    def cell(self, temperature: float, n: int) -> Interval:
        """The mean best score over prompts, with its interval."""
        return interval([expected_best(line["scores"], n) for line in self.lines[temperature]])

    def length(self, temperature: float, n: int) -> float:
        lines = self.lines[temperature]
        return mean([expected_of_best(x["lengths"], x["scores"], n) for x in lines])


def grid_table(grid: Grid) -> str:
    """What `marlhf best-of-n` prints: one row per temperature, one column per n."""
    rows = [[f"{t:g}", *(grid.cell(t, n).text() for n in grid.ns)] for t in grid.lines]
    return text_table(["temperature", *(f"best of {n}" for n in grid.ns)], rows)


def read_grids(folder: Path) -> dict[str, Grid]:
    """What `marlhf best-of-n` left in a run folder, by all settings but the temperature."""
    by_label: dict[str, dict[float, list[Line]]] = {}
    for file in read_evaluations(folder / BEST_OF_N):
        lines = [line for line in file.lines if _is_complete(line)]
        if lines and file.settings is not None:
            by_temperature = by_label.setdefault(file.settings.label_without_temperature, {})
            by_temperature[file.settings.temperature] = lines
    grids: dict[str, Grid] = {}
    for name, lines in by_label.items():
        most = min(len(line["scores"]) for each in lines.values() for line in each)
        ns = sorted({*(2**i for i in range(most.bit_length())), most})
        grids[name] = Grid(ns, dict(sorted(lines.items())))
    return grids


def _is_complete(line: Line) -> bool:
    """Whether a line has scores and lengths: one edited by hand may not."""
    scores, lengths = line.get("scores"), line.get("lengths")
    if not isinstance(scores, list) or not isinstance(lengths, list):
        return False
    numbers = all(math.isfinite(number(value)) for value in (*scores, *lengths))
    return 0 < len(scores) == len(lengths) and numbers
