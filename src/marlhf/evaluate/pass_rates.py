"""pass@k: the estimate and its interval. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marlhf.errors import SettingError
from marlhf.intervals import bootstrap_mean

SUMMARY = "pass_at_k.json"
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
    found = {problem["difficulty"] for problem in problems} - {""}
    known = [name for name in DIFFICULTIES if name in found]
    groups = [*known, *sorted(found - set(known)), ALL]
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


def read_summary(folder: Path) -> dict[str, Any]:
    """What was measured in a run folder; nothing where it was not, or is damaged."""
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("rows") else {}
