"""Problems solved: pass@k of each run and difficulty."""

from __future__ import annotations

from collections.abc import Sequence

from marlhf.evaluate.results import ALL, PassRates, read_summary
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group, labelled
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


def problems(groups: Sequence[Group]) -> str:
    """One row per run and difficulty: pass@k with its interval, and how the samples ended."""
    measured = [
        (label, group.colour, rates)
        for label, group, folder in labelled(groups)
        if (rates := read_summary(folder))
    ]
    ks = sorted({k for *_, rates in measured for k in rates.ks})
    if not ks:
        return ""
    header = ["Run", "Difficulty", "Problems", "Samples", *(f"pass@{k}" for k in ks), "Ended"]
    cells: list[list[str]] = []
    data: list[list[Cell]] = []
    for label, colour, rates in measured:
        for row in rates.rows:
            shares = [interval_cell(row.pass_at.get(k), _percent) for k in ks]
            ends = ", ".join(f"{share:.0%} {end}" for end, share in row.results.items())
            names = [chip(label, colour), text(row.difficulty)]
            counts = [str(row.problems), str(rates.samples)]
            cells.append([*names, *counts, *shares, text(ends.replace("_", " "))])
            flat: list[Cell] = []
            for k in ks:
                flat += row.pass_at[k][:3] if k in row.pass_at else (None, None, None)
            data.append([label, row.difficulty, row.problems, rates.samples, *flat])
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


def _figure(measured: Sequence[tuple[str, str, PassRates]], k: int) -> str:
    """pass@k of each run over all problems, and by difficulty where it is known."""
    dots = [
        Dot(
            label if row.difficulty == ALL else f"{label}: {row.difficulty}",
            row.pass_at[k],
            colour,
        )
        for label, colour, rates in measured
        for row in rates.rows
        if k in row.pass_at
    ]
    return figure(
        f"pass@{k}",
        dot_rows(dots, x_label=f"pass@{k}", is_share=True),
        file=f"pass at {k}",
        header=["run and difficulty", f"pass@{k}", "low", "high"],
        rows=[[dot.label, *dot.value[:3]] for dot in dots],
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
