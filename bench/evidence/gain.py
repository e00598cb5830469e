"""What training gained where a perfect critic could win more or less: docs/results/gain.md."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from evidence.figures import scatter
from evidence.results import GAIN_METHODS, GAIN_STARTS, Results, kl, length, score
from evidence.tables import number, points, table
from marlhf.intervals import Interval
from marlhf.runs.atomic import read_jsonl

LAST = 30
REACHES = {"lines-80": 0.8, "lines-95": 0.95, "lines-100": 1.0}
MEASURED = "measured"
"""Folder of what `marlhf credit --headroom --json` printed: START-SEED.json."""


def gains(results: Results) -> str:
    """Every start and method: before and after, sampled and greedy, and the curve over RLOO."""
    rows: list[list[str]] = []
    for start, label in GAIN_STARTS.items():
        greedy, first_cell = greedy_scores(results, f"{start}-sft"), label
        for method, name in GAIN_METHODS.items():
            full = f"{start}-{method}"
            if (full, "") not in results.runs:
                continue
            shares = [f"{results.mean(score, full, '', step):.1%}" for step in (0, 10, LAST)]
            greedy_after = greedy_scores(results, full)
            over = over_rloo(results, start, method)
            rows.append(
                [
                    first_cell,
                    name,
                    *shares,
                    f"{mean(greedy):.1%} to {mean(greedy_after):.1%}",
                    "" if over is None else over.text(points),
                    "" if method == "rloo" else number(explained(results, full)),
                    number(results.mean(kl, full, "", LAST), 1),
                    number(results.mean(length, full, "", LAST), 0),
                    number(results.seconds_per_step(full, ""), 1),
                ]
            )
            first_cell = ""
    head = ["before", "after 10", "after 30", "greedy", "curve over RLOO"]
    head += ["critic explains", "KL", "tokens", "s/step"]
    return table(["reward, and start", "credit", *head], rows)


def explained(results: Results, name: str) -> float:
    """The share of returns' variance that the critic explains: median of the last ten steps."""
    curves = (run.curve("rl/explained_variance") for run in results.runs[name, ""])
    return median(value for curve in curves for step, _, value in curve if step > LAST - 10)


def headrooms(results: Results) -> str:
    """How many times the responses RLOO needs against exact values, by start and lambda."""
    rows: list[list[str]] = []
    for start, label in GAIN_STARTS.items():
        found = measured(results, start)
        cells = [label, f"{mean(each['score'] for each in found):.2f}"]
        for place in range(len(found[0]["rows"])):
            values = [each["rows"][place]["headroom"] for each in found]
            low, high = (number(bound(values), 1) for bound in (min, max))
            cells.append(f"{number(median(values), 1)} [{low}, {high}]")
        rows.append(cells)
    lambdas = [f"lambda {row['reach']:g}" for row in measured(results, "all")[0]["rows"]]
    return table(["reward, and start", "mean score", *lambdas], rows)


def against_headroom(results: Results) -> str:
    """The curve of PPO over lines above RLOO's, against what exact values would win: an SVG."""
    series: dict[str, list[tuple[float, Interval, str]]] = {}
    ends = {"": "", "-pre": ", pretrained critic"}
    for (start, label), (end, more), (unit, reach) in itertools.product(
        GAIN_STARTS.items(), ends.items(), REACHES.items()
    ):
        over = over_rloo(results, start, method := unit + end)
        if over is not None:
            [*values] = (
                row["headroom"]
                for each in measured(results, start)
                for row in each["rows"]
                if row["reach"] == reach
            )
            note = f"{label}, {GAIN_METHODS[method]}"
            series.setdefault(label + more, []).append((median(values), over, note))
    title = "PPO over lines above RLOO, mean over 30 steps, against headroom"
    return scatter(title, "headroom at the same lambda", "points over RLOO", series)


def over_rloo(results: Results, start: str, method: str) -> Interval | None:
    """The mean over all evaluations; all methods of the start share their spread."""
    if method == "rloo" or (f"{start}-{method}", "") not in results.runs:
        return None
    pool = [f"{start}-{each}" for each in GAIN_METHODS]
    return results.difference(score, f"{start}-{method}", f"{start}-rloo", "", None, pool)


def greedy_scores(results: Results, name: str) -> list[float]:
    """The mean score at temperature 0 of each seed's run."""
    found: list[float] = []
    for folder in sorted(results.folder.glob(f"seed=*/{name}")):
        for file in (folder / "evaluation").glob("*.jsonl"):
            [row] = read_jsonl(file).rows
            if row["sampling"]["temperature"] == 0:
                [values] = row["scores"].values()
                found.append(mean(values))
    return found or [math.nan]


def measured(results: Results, start: str) -> Sequence[dict[str, Any]]:
    files = sorted((results.folder / MEASURED).glob(f"{start}-*.json"))
    return [json.loads(file.read_text("utf-8")) for file in files]
