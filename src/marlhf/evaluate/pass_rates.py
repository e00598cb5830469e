"""pass@k: the estimate and its interval. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlhf.errors import SettingError
from marlhf.intervals import Interval, bootstrap_mean
from marlhf.runs.layout import PASS_AT_K, read_object

ALL = "all"
DIFFICULTIES = ("introductory", "interview", "competition")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is right, without bias: 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(samples=4, correct=1, k=2)
    0.5
    """
    if not 1 <= k <= samples:
        raise SettingError(f"pass@{k} needs at least {k} samples per problem; there are {samples}.")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def summarise(problems: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> list[dict[str, Any]]:
    """One row per difficulty, and one for all: problems, pass@k with intervals, how samples ended.

    Each problem has `difficulty` and `results`, one word per sample.
    """
    present = {problem["difficulty"] for problem in problems} - {""}
    known = [name for name in DIFFICULTIES if name in present]
    groups = [*known, *sorted(present - set(known)), ALL]
    rows = []
    for name in groups if len(groups) > 2 else [ALL]:
        chosen = [p["results"] for p in problems if name in (ALL, p["difficulty"])]
        row: dict[str, Any] = {"difficulty": name, "problems": len(chosen)}
        for k in ks:
            values = [pass_at_k(len(r), r.count("passed"), k) for r in chosen]
            row[f"pass@{k}"] = list(bootstrap_mean(values)[:3])
        ends = [result for results in chosen for result in results]
        row["results"] = {end: ends.count(end) / len(ends) for end in sorted(set(ends))}
        rows.append(row)
    return rows


@dataclass(frozen=True)
class PassRate:
    """The problems of one difficulty, or all of them."""

    difficulty: str
    problems: int
    pass_at: dict[int, Interval]
    """By k."""
    results: dict[str, float]
    """How the samples ended, as shares."""


@dataclass(frozen=True)
class PassRates:
    """What `marlhf pass-at-k` measured of a run."""

    samples: int
    """Per problem."""
    rows: list[PassRate]

    @property
    def ks(self) -> list[int]:
        return sorted({k for row in self.rows for k in row.pass_at})


def read_summary(folder: Path) -> PassRates | None:
    """What was measured in a run folder; None where it was not, or the file is damaged."""
    try:
        summary = read_object(folder / PASS_AT_K)
        rows = [read_row(row) for row in summary["rows"]]
        return PassRates(int(summary["samples"]), rows) if rows else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_row(row: Mapping[str, Any]) -> PassRate:
    problems = int(row["problems"])
    pass_at: dict[int, Interval] = {}
    for key, value in row.items():
        if key.startswith("pass@"):
            mean, low, high = map(float, value)
            pass_at[int(key.removeprefix("pass@"))] = Interval(mean, low, high, problems)
    results = {str(end): float(share) for end, share in row["results"].items()}
    return PassRate(str(row["difficulty"]), problems, pass_at, results)
