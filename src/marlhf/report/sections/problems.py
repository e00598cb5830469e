"""Problems solved: pass@k of each run and difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marlhf.evaluate.pass_rates import ALL, read_summary
from marlhf.intervals import Interval
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group
from marlhf.report.page import (
    Cell,
    chip,
    csv_link,
    figure,
    grid,
    interval_cell,
    section,
    table,
    text,
)
from marlhf.runs.read import Run


def problems(groups: Sequence[Group]) -> str:
    """One row per run and difficulty: pass@k with its interval, and how the samples ended."""
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
            rates = [value and Interval(*value[:3], size=row["problems"]) for value in values]
            shares = [interval_cell(rate, _percent) for rate in rates]
            counts = [str(row["problems"]), str(found["samples"])]
            names = [chip(label, group.colour), text(row["difficulty"])]
            cells.append([*names, *counts, *shares, text(ends.replace("_", " "))])
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


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
