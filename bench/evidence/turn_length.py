"""Credit in turns of different length: docs/results/turn-length.md.

`measured/` has what bench/exact_credit.py found: START-SEED-stepN.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

from evidence.results import Results, score
from evidence.tables import number, table
from marlhf.runs.atomic import read_jsonl

LENGTHS = {"think-0": "0", "think-10": "10", "think-40": "40"}
"""Letters before each number, by how stages and files begin."""
STATES = {"step5": "start", "step20": "trained"}
"""Step 5 has the policy of the start: five steps train the critic alone."""
WAYS = {
    **{f"turns lam={lam:g}": f"turns, lambda {lam:g}" for lam in (0, 0.5, 0.8, 0.95, 1)},
    **{
        f"token lam={lam:g}": f"tokens, lambda {lam:g}"
        for lam in (0, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.997, 1)
    },
}
RLOO = {"rloo 4": "RLOO, groups of 4", "rloo 8": "RLOO, groups of 8"}
MIDDLE = "turns lam=0.5"
EXACT = "exact "
"""How ways begin whose values are right."""


def starts(results: Results) -> str:
    """Every length: its model before and after, and what its critic knows."""
    rows: list[list[str]] = []
    for length, label in LENGTHS.items():
        if not measured(results, length, "step5"):
            continue
        method = f"{length}-turns-80"
        last = results.last_step(method, "")
        cells = [
            label,
            str(len(results.runs[method, ""])),
            number(tokens_per_turn(results, method), 0),
        ]
        cells += [f"{results.mean(score, method, '', step):.0%}" for step in (0, last)]
        for state in STATES:
            found = measured(results, length, state)
            known, most = (
                number(mean(each[key] for each in found), 3) if found else "-"
                for key in ("explained", "explainable")
            )
            cells.append(f"{known} of {most}")
        rows.append(cells)
    head = ["letters", "seeds", "tokens per turn", "solved before", "after 20 steps"]
    return table([*head, *(f"critic explains, {state}" for state in STATES.values())], rows)


def cosines(results: Results, exact: bool = False) -> str:
    """The cosine of every way with the true gradient, by length of turns, and its worst cases."""
    found = {
        f"{label} letters, {name}": files
        for state, name in STATES.items()
        for length, label in LENGTHS.items()
        if (files := measured(results, length, state))
    }
    names = {EXACT * exact + way: label for way, label in WAYS.items()} | ({} if exact else RLOO)
    values = {way: [cosines_of(files, way) for files in found.values()] for way in names}
    best = [max(map(mean, column)) for column in zip(*values.values(), strict=True)]
    middle = [*map(mean, values[EXACT * exact + MIDDLE])]
    rows: list[list[str]] = []
    for way, label in names.items():
        worst = [number(worth_at_worst(values[way], beside)) for beside in (best, middle)]
        rows.append([label, *map(_with_range, values[way]), *worst])
    head = ["beside the best", f"beside {WAYS[MIDDLE]}"]
    return table(["credit by", *found, *(f"worth at worst {text}" for text in head)], rows)


def worth_at_worst(values: Sequence[Sequence[float]], beside: Sequence[float]) -> float:
    """What a game is worth as a share of one by another way, in the worst column."""
    ratios = [mean(here) / other for here, other in zip(values, beside, strict=True)]
    return min(max(ratio, 0.0) ** 2 for ratio in ratios)


def cosines_of(files: Sequence[dict[str, Any]], way: str) -> list[float]:
    """One for each seed."""
    return [row["cosine"] for file in files for row in file["rows"] if row["name"] == way]


def tokens_per_turn(results: Results, method: str) -> float:
    """The model's own, before training."""
    found: list[float] = []
    for run in results.runs[method, ""]:
        lines = [row for row in read_jsonl(run.path / "metrics.jsonl").rows if "eval/turns" in row]
        found.append(lines[0]["eval/length"] / lines[0]["eval/turns"])
    return mean(found)


def measured(results: Results, length: str, state: str) -> list[dict[str, Any]]:
    files = sorted((results.folder / "measured").glob(f"{length}-?-{state}.json"))
    return [json.loads(file.read_text("utf-8")) for file in files]


def _with_range(values: Sequence[float]) -> str:
    if len(values) == 1:
        return number(values[0])
    return f"{number(mean(values))} [{number(min(values))}, {number(max(values))}]"
