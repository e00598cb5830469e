"""Conversations of a real model, credit per turn beside RLOO: docs/results/qwen-turns.md.

`start/evaluation` has the answers of the model before training, at temperature 0.
"""

from __future__ import annotations

import math
from statistics import mean, median

from evidence.results import Results, kl, length, score, solved
from evidence.tables import number, points, table
from marlhf.runs.atomic import read_jsonl

TASKS = {"fix": "MBPP, `fix-code`", "python": "GSM8K, `python`"}
METHODS = {"turns": "PPO over turns", "rloo": "RLOO"}
FILES = {"fix": "fix-code", "python": "python"}
"""How the environment of a task is called in the names of evaluations."""
LAST = 40


def runs(results: Results) -> str:
    """Every task and method: solved before and after, sampled and greedy, and at what cost."""
    rows: list[list[str]] = []
    for task, label in TASKS.items():
        before, first_cell = greedy(results, "start", task), label
        for method, name in METHODS.items():
            full = f"{task}-{method}"
            [run] = results.runs[full, ""]
            shares = [f"{results.mean(solved, full, '', step):.1%}" for step in (0, LAST)]
            after = greedy(results, full, task)
            both = "" if math.isnan(after) else f"{before:.1%} to {after:.1%}"
            over = results.difference(solved, full, f"{task}-rloo", "", LAST)
            critic = [v for step, _, v in run.curve("rl/explained_variance") if step > LAST - 10]
            rows.append(
                [
                    first_cell,
                    name,
                    *shares,
                    both,
                    over.text(points) if over and method != "rloo" else "",
                    number(results.mean(score, full, "", LAST)),
                    number(median(critic)) if critic else "",
                    number(results.mean(kl, full, "", LAST), 1),
                    number(results.mean(length, full, "", LAST), 0),
                    number(run.seconds or math.nan, 0),
                ]
            )
            first_cell = ""
    head = ["before", "after", "greedy", "over RLOO", "reward", "critic explains"]
    return table(["task", "credit", *head, "KL", "tokens", "seconds"], rows)


def greedy(results: Results, name: str, task: str) -> float:
    """The share that is solved at temperature 0; NaN where that was not measured."""
    found = sorted((results.folder / name / "evaluation").glob(f"t0-*-{FILES[task]}.jsonl"))
    if not found:
        return math.nan
    [row] = read_jsonl(found[0]).rows
    [values] = row["scores"].values()
    return mean(value > 0.99 for value in values)
