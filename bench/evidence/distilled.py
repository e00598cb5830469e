"""Rounds of training on the best of several responses, prompt by prompt."""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from evidence.results import BETA
from evidence.tables import number, signed, table
from marlhf.intervals import Interval, interval, mean

Line = dict[str, Any]
MODELS = {
    "sft": "SFT",
    "ppo-b10": "PPO, beta .1",
    "whole-round-3": "whole responses, round 3",
    "n12-round-3": "n = 12, round 3",
    "n5-round-1": "n = 5, round 1",
    "n5-round-2": "n = 5, round 2",
}
PAIRS = (
    ("n12-round-3", "ppo-b10"),
    ("n5-round-2", "ppo-b10"),
    ("n5-round-1", "whole-round-3"),
)
"""Models at about the same KL."""


def distilled(file: Path) -> str:
    """Every model on the same prompts, and differences at about equal KL."""
    found: dict[str, dict[tuple[int, str], Line]] = defaultdict(dict)
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            found[line["model"]][line["seed"], line["key"]] = line
    rows: list[list[str]] = []
    for model, label in MODELS.items():
        of_model = list(found[model].values())
        kl = mean([line["kl"] for line in of_model])
        reward = mean([line["scores"]["reward"] for line in of_model])
        ended = [line for line in of_model if line["ended"]]
        cells = [number(reward), number(reward - BETA * kl), number(mean(golds(of_model)))]
        cells += [number(mean(golds(ended))), number(kl, 1)]
        cells += [number(mean([line["length"] for line in of_model]), 0)]
        rows.append([label, *cells, f"{len(ended) / len(of_model):.0%}"])
    head = [
        "",
        "reward",
        f"reward \u2212 {BETA} KL",
        "gold",
        "gold, ended",
        "KL",
        "tokens",
        "ended",
    ]
    pairs = [
        [
            f"{MODELS[ours]}, over {MODELS[theirs]}",
            over(found[ours], found[theirs], "reward").text(signed),
            over(found[ours], found[theirs], "gold").text(signed),
            over(found[ours], found[theirs], "gold", ended=True).text(signed),
        ]
        for ours, theirs in PAIRS
    ]
    return f"{table(head, rows)}\n{table(['', 'reward', 'gold', 'gold, both ended'], pairs)}"


def golds(lines: list[Line]) -> list[float]:
    return [line["scores"]["gold"] for line in lines]


def over(
    ours: dict[tuple[int, str], Line],
    theirs: dict[tuple[int, str], Line],
    judge: str,
    *,
    ended: bool = False,
) -> Interval:
    """The difference by prompt, seeds of sampling averaged; one training, so over prompts alone."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for (seed, key), line in ours.items():
        other = theirs[seed, key]
        if not ended or (line["ended"] and other["ended"]):
            by_prompt[key].append(line["scores"][judge] - other["scores"][judge])
    return interval([float(np.mean(rises)) for rises in by_prompt.values()])
