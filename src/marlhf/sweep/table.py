"""A sweep as text: what it would train, and what it has come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from marlhf.evaluate.text_table import text_table
from marlhf.runs.write import is_finished
from marlhf.sweep.plan import Plan, Training
from marlhf.sweep.run import Outcome, Sweep

WITH_RANGE = ("score", "loss")
"""Columns whose mean over seeds is shown with the lowest and the highest."""


def describe_plan(plan: Plan) -> list[str]:
    """What `--dry-run` prints: the points, and what is left to train for each."""
    width = max(len(point.name) for point in plan.points)
    finished = {run.folder for run in plan.runs if is_finished(run.folder)}
    left = len(plan.runs) - len(finished)
    lines = [
        f"{len(plan.points)} points in {plan.root}: {len(plan.runs)} trainings, {left} of them left"
    ]
    by_folder: dict[Path, Training] = {run.folder: run for run in plan.runs}
    printed: set[Path] = set()
    for point in plan.points:
        mine = [by_folder[folder] for folder in point.runs]
        shown = [
            f"{run.folder.relative_to(plan.root)}{' (finished)' if run.folder in finished else ''}"
            for run in mine
            if run.folder not in printed
        ]
        printed |= set(point.runs)
        lines.append(f"{point.name:{width}}  {'  '.join(shown)}".rstrip())
    return lines


def describe(result: Sweep) -> list[str]:
    """The table of a sweep: a row per training of the stages that no other starts from.

    A second one has the means of settings that were trained with several seeds.
    """
    needed = {folder for run in result.plan.runs for folder in run.needs}
    stages = {run.stage for run in result.plan.runs if run.folder in needed}
    rows = [each for each in result.outcomes if each.stage not in stages] or list(result.outcomes)
    columns = {"score": "score", "kl": "KL", "length": "length", "loss": "loss", "seconds": "s"}
    used = [c for c in columns if any(math.isfinite(getattr(row, c)) for row in rows)]
    if "score" in used and "loss" in used and all(math.isfinite(row.score) for row in rows):
        used.remove("loss")
    cells = [["run", "state", *(columns[c] for c in used)]]
    for row in rows:
        numbers = [getattr(row, c) for c in used]
        cells.append([row.name, row.state, *(_number(x, c) for x, c in zip(numbers, used))])
    lines = text_table(cells[0], cells[1:], words=2).split("\n")
    if means := _means_over_seeds(rows, used):
        ranged = {c: f"{columns[c]} [min, max]" for c in WITH_RANGE}
        header = ["mean over seeds", "seeds", *(ranged.get(c, columns[c]) for c in used)]
        lines += ["", *text_table(header, means).split("\n")]
    for each in result.failed:
        lines.append(f"{each.name} failed: {each.note}")
    return lines


def _means_over_seeds(rows: Sequence[Outcome], columns: Sequence[str]) -> list[list[str]]:
    """One row per setting, named by its folder: seeds are folders above. Empty without seeds."""
    settings: dict[str, list[Outcome]] = {}
    for row in rows:
        if row.state == "finished":
            settings.setdefault(row.folder.name, []).append(row)
    if all(len(seeds) < 2 for seeds in settings.values()):
        return []
    cells: list[list[str]] = []
    for name, seeds in settings.items():
        row = [name, str(len(seeds))]
        for column in columns:
            values = [getattr(seed, column) for seed in seeds]
            shown = _number(sum(values) / len(values), column)
            if column in WITH_RANGE:
                shown += f" [{_number(min(values), column)}, {_number(max(values), column)}]"
            row.append(shown)
        cells.append(row)
    return cells


def _number(value: float, column: str) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if column == "seconds" else f"{value:.3f}"
