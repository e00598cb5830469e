"""Score against KL bound and tokens sampled, of block decisions and of best-of-n. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from marlhf.evaluate.best_of_n_grid import Grid, kl_bound, read_grids
from marlhf.evaluate.text_table import text_table
from marlhf.intervals import Interval, interval, mean
from marlhf.runs.evaluations import SamplingSettings, read_evaluations
from marlhf.runs.jsonl import Line
from marlhf.runs.layout import BLOCKS
from marlhf.runs.read import number

NUMBERS = ("score", "length", "num_blocks", "num_sampled")


class Point(NamedTuple):
    """One way of choosing, and what it gains and costs per response."""

    label: str
    candidates: int  # k or n
    score: Interval
    kl_bound: float  # nats
    tokens: float  # sampled, those that were not kept included
    length: float


@dataclass(frozen=True)
class BlockLines:
    """The responses of one k, one line per prompt."""

    blocks: str
    value: str
    k: int
    settings: SamplingSettings
    lines: list[Line]

    def point(self) -> Point:
        decisions = mean([line["num_blocks"] for line in self.lines])
        return Point(
            f"{self.blocks}, {self.value}, k = {self.k}",
            self.k,
            interval([line["score"] for line in self.lines]),
            decisions * kl_bound(self.k),
            mean([line["num_sampled"] for line in self.lines]),
            mean([line["length"] for line in self.lines]),
        )


def whole_points(grid: Grid, temperature: float) -> list[Point]:
    """The same for whole responses: the best of n."""
    length = mean([mean(line["lengths"]) for line in grid.lines[temperature]])
    return [
        Point(
            f"best of {n}",
            n,
            grid.cell(temperature, n),
            kl_bound(n),
            n * length,
            grid.length(temperature, n),
        )
        for n in grid.ns
    ]


def frontier_table(points: Sequence[Point]) -> str:
    """What `marlhf best-of-n --blocks` prints."""
    rows = [
        [p.label, p.score.text(), f"{p.kl_bound:.2f}", f"{p.tokens:.0f}", f"{p.length:.1f}"]
        for p in points
    ]
    return text_table(["chosen", "score", "KL bound", "tokens sampled", "length"], rows)


def read_frontiers(folder: Path) -> dict[str, dict[str, list[Point]]]:
    """What a run folder has, by setting and by way of choosing, each in the order of k or n."""
    frontiers: dict[str, dict[str, list[Point]]] = {}
    grids = read_grids(folder)
    for file in read_evaluations(folder / BLOCKS):
        lines = [line for line in file.lines if _is_complete(line)]
        if not lines or file.settings is None:
            continue
        first, settings = lines[0], file.settings
        of_setting = frontiers.setdefault(settings.label, {})
        grid = grids.get(settings.label_without_temperature)
        if grid is not None and settings.temperature in grid.lines:
            of_setting.setdefault("whole responses", whole_points(grid, settings.temperature))
        name = f"{first['blocks']}, {first['value']}"
        each = BlockLines(str(first["blocks"]), str(first["value"]), first["k"], settings, lines)
        of_setting.setdefault(name, []).append(each.point())
    for of_setting in frontiers.values():
        for points in of_setting.values():
            points.sort(key=lambda point: point.candidates)
    return frontiers


def _is_complete(line: Line) -> bool:
    """Whether a line has all its numbers: one edited by hand may not."""
    k = line.get("k")
    numbers = all(math.isfinite(number(line.get(name))) for name in NUMBERS)
    return isinstance(k, int) and k > 0 and numbers and "blocks" in line and "value" in line
