"""pass@k: the estimate, its interval, and its section of the report. No torch in here."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marlhf.intervals import Interval
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group
from marlhf.report.page import Cell, chip, csv_link, figure, grid, section, table, text
from marlhf.runs.read import Run

SUMMARY = "pass_at_k.json"
ALL = "all"
DIFFICULTIES = ("introductory", "interview", "competition")
RESAMPLES = 2000


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is right, without bias: 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(samples=4, correct=1, k=2)
    0.5
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem; there are {samples}.")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def bootstrap(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """The mean and its 95% interval, from problems drawn anew with replacement.

    It is about the problems that were asked; another training may fall outside it.
    """
    size = len(values)
    if not size:
        return Interval(math.nan, math.nan, math.nan, 0)
    draw = random.Random(seed)
    means = sorted(math.fsum(draw.choices(values, k=size)) / size for _ in range(resamples))
    low, high = (means[round(share * (resamples - 1))] for share in (0.025, 0.975))
    return Interval(math.fsum(values) / size, low, high, size)


def summarise(problems: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> list[dict[str, Any]]:
    """A row a difficulty, and one of all: problems, pass@k with intervals, how samples ended.

    Each problem has `difficulty` and `results`, a word a sample.
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
            row[f"pass@{k}"] = list(bootstrap(values)[:3])
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


def passes(groups: Sequence[Group]) -> str:
    """A row a run and difficulty: pass@k with its interval, and how the samples ended."""
    measured = [
        (group, run, found)
        for group in groups
        for run in group.runs
        if (found := read_summary(run.path))
    ]
    if not measured:
        return ""
    ks = sorted({int(k) for *_, found in measured for k in found["k"]})
    header = ["Run", "Difficulty", "Problems", "Samples", *(f"pass@{k}" for k in ks), "Ended"]
    cells: list[list[str]] = []
    data: list[list[Cell]] = []
    for group, run, found in measured:
        label = group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}"
        for row in found["rows"]:
            values = [row.get(f"pass@{k}") for k in ks]
            ends = ", ".join(f"{share:.0%} {end}" for end, share in row["results"].items())
            counts = [str(row["problems"]), str(found["samples"])]
            names = [chip(label, group.colour), text(row["difficulty"])]
            cells.append([*names, *counts, *map(_share, values), text(ends.replace("_", " "))])
            flat = [x for value in values for x in value or (None, None, None)]
            data.append([label, row["difficulty"], row["problems"], found["samples"], *flat])
    names = [name for k in ks for name in (f"pass@{k}", f"pass@{k} low", f"pass@{k} high")]
    link = csv_link("pass at k", ["run", "difficulty", "problems", "samples", *names], data)
    return section(
        "pass-at-k",
        "Problems solved",
        "pass@k is the chance that one of k samples passes every test of a problem, in percent; "
        "brackets are 95% intervals over problems. Compare runs on the same problems only.",
        grid([_figure(measured, k) for k in ks[:3]]),
        table(header, cells, csv=link, words=2),
    )


def _figure(measured: Sequence[tuple[Group, Run, dict[str, Any]]], k: int) -> str:
    """pass@k of each run over all problems, and by difficulty where it is known."""
    dots: list[Dot] = []
    for group, run, found in measured:
        label = group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}"
        for row in found["rows"]:
            value = row.get(f"pass@{k}")
            if value is not None:
                name = label if row["difficulty"] == ALL else f"{label}: {row['difficulty']}"
                dots.append(Dot(name, Interval(*value[:3], size=row["problems"]), group.colour))
    return figure(
        f"pass@{k}",
        dot_rows(dots, x_label=f"pass@{k}", is_share=True),
        file=f"pass at {k}",
        header=["run and difficulty", f"pass@{k}", "low", "high"],
        rows=[[dot.label, *dot.value[:3]] for dot in dots],
    )


def _share(value: Sequence[float] | None) -> str:
    if value is None:
        return '<span class="none">&ndash;</span>'
    mean, low, high = (f"{100 * each:.2f}" for each in value)
    return f"{mean} <small>[{low}, {high}]</small>"
