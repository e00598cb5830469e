"""Credit in turns of different length: docs/results/turn-length.md.

`measured/` has what `marlhf credit --json` printed: START-SEED-step5.json and the like. Every run
has the same reference setting, that of the run itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

from evidence.results import Results, score
from evidence.tables import number, table
from marlhf.runs.atomic import read_jsonl

LENGTHS = {"think-0": "0", "think-10": "10", "think-40": "40"}
"""Letters before each number, by how stages and files begin."""
WAYS = {
    **{f"turns lam={lam:g}": f"turns, lambda {lam:g}" for lam in (0, 0.5, 0.8, 0.95, 1)},
    **{f"token lam={x:g}": f"tokens, lambda {x:g}" for x in (0.5, 0.8, 0.9, 0.95, 0.99, 0.997, 1)},
}
REFERENCE = "turns lam=0.8"
STATES = {"step5": "at the start", "step20": "after 15 steps"}
ERRORS = 2.0


class Estimate(NamedTuple):
    """A mean over seeds and its standard error."""

    value: float
    error: float


def starts(results: Results) -> str:
    """What was measured at each length: the model, and what its critic knows."""
    rows: list[list[str]] = []
    for length, label in lengths_of(results).items():
        runs = results.runs[f"{length}-turns-80", ""]
        lasts = [run.evaluations[-1].step for run in runs]
        shares = [results.mean(score, f"{length}-turns-80", "", step) for step in (0, max(lasts))]
        cells = [label, str(len(runs)), number(tokens_per_turn(results, length), 1)]
        cells += [f"{share:.0%}" for share in shares]
        for state in STATES:
            thirds = zip(*(each["explained_variance"] for each in measured(results, length, state)))
            cells.append(", ".join(number(mean(third)) for third in thirds))
        rows.append(cells)
    head = ["seeds", "tokens per turn", "solved at the start", "after 20 steps"]
    explained = [f"explained, {text}" for text in STATES.values()]
    return table(["letters", *head, *explained], rows)


def cosines(results: Results) -> str:
    """The cosine of every way with the true gradient, by length of turns."""
    lengths = lengths_of(results)
    rows: list[list[str]] = []
    for way, name in WAYS.items():
        cells = [name]
        for state in STATES:
            for length in lengths:
                cosine = over_seeds(measured(results, length, state), way, "cosine", "error")
                cells.append(f"{number(cosine.value)} ± {number(cosine.error)}")
        rows.append(cells)
    head = [f"{text}: {label}" for text in STATES.values() for label in lengths.values()]
    return table(["credit by", *head], rows)


def samples(results: Results) -> str:
    """How many games every way needs for each that the reference needs, and the worst of them."""
    lengths = lengths_of(results)
    rows: list[list[str]] = []
    for way, name in WAYS.items():
        needs = [
            games_needed(measured(results, length, state), way)
            for state in STATES
            for length in lengths
        ]
        cells = ["1" if way == REFERENCE else interval_text(*each) for each in needs]
        worst = max(each[0] for each in needs)
        rows.append([name, *cells, "1" if way == REFERENCE else number(worst, 1)])
    head = [f"{text}: {label}" for text in STATES.values() for label in lengths.values()]
    return table(["credit by", *head, "worst"], rows)


def games_needed(found: Sequence[dict[str, Any]], way: str) -> tuple[float, float, float]:
    """Against the reference, with two standard errors; infinite where the cosine may be 0."""
    reference = over_seeds(found, REFERENCE, "cosine", "error").value
    ahead = over_seeds(found, way, "difference", "difference_error")
    ratios = [
        (reference + ahead.value + side * ERRORS * ahead.error) / reference for side in (0, 1, -1)
    ]
    value, low, high = (1 / ratio**2 if ratio > 0 else math.inf for ratio in ratios)
    return value, low, high


def over_seeds(found: Sequence[dict[str, Any]], way: str, key: str, error: str) -> Estimate:
    """The mean; its error is the larger of the jackknife's and that from seed to seed."""
    rows = [row for each in found for row in each["rows"] if row["name"] == way]
    if any(row[key] is None for row in rows):
        return Estimate(math.nan, math.nan)
    values, count = [row[key] for row in rows], len(rows)
    middle = mean(values)
    within = math.sqrt(sum(row[error] ** 2 for row in rows)) / count
    squares = sum((value - middle) ** 2 for value in values)
    between = math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
    return Estimate(middle, max(within, between))


def tokens_per_turn(results: Results, length: str) -> float:
    """The model's own, before training."""
    found: list[float] = []
    for run in results.runs[f"{length}-turns-80", ""]:
        [first, *_] = [
            row for row in read_jsonl(run.path / "metrics.jsonl").rows if "eval/turns" in row
        ]
        found.append(first["eval/length"] / first["eval/turns"])
    return mean(found)


def lengths_of(results: Results) -> dict[str, str]:
    return {key: label for key, label in LENGTHS.items() if measured(results, key, "step5")}


def measured(results: Results, length: str, what: str) -> list[dict[str, Any]]:
    files = sorted((results.folder / "measured").glob(f"{length}-?-{what}.json"))
    return [json.loads(file.read_text("utf-8")) for file in files]


def interval_text(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{_times(value)} [{_times(low)}, {_times(high)}]"


def _times(value: float) -> str:
    return "over 100" if value > 100 else number(value, 1 if value >= 9.95 else 2)
