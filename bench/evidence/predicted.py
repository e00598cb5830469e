"""Cosines by `marlhf credit` beside what each rule gained from the same start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.results import Results, objective, score
from marlhf.intervals import Interval

RULES = {
    "ppo": "token lam=0.95",
    "lam80": "token lam=0.8",
    "lam90": "token lam=0.9",
    "lam99": "token lam=0.99",
    "lam1": "token lam=1",
    "n5": "ngram n=5 lam=0.95",
    "n5-equal": "ngram n=5 lam=0.95 sigma=equal",
    "lines": "lines lam=0.95",
    "boundary": "lines lam=0.95 credit=boundary",
    "equal": "lines lam=0.95 sigma=equal",
    "sentences": "sentences lam=0.95",
    "perplexity": "perplexity lam=0.95",
}
"""Methods of recipes/evidence/predict.yaml and predict-tldr.yaml as `marlhf credit` names them."""
REACH = {
    "lam80": 5.0,
    "lam90": 10.0,
    "ppo": 20.0,
    "lam99": 100.0,
    "n5": 100.0,
    "n5-equal": 100.0,
    "lam1": float("inf"),
}
"""Tokens over which credit falls by a factor of e: n / (1 - lambda). Known without measuring."""
STARTS = {"early": "the SFT model", "late": "PPO after 30 steps", "end": "PPO after 100 steps"}
MEASURED = "measured"
"""Folder of a sweep for what was measured at each start."""


@dataclass(frozen=True)
class Prediction:
    method: str
    run: str
    rule: str
    cosine: float
    error: float
    gained: Interval


def methods_of(results: Results, start: str) -> list[str]:
    """Those that were trained from a start, all with the one reward there is ("": a function)."""
    [teacher] = results.teachers
    return [name for name in RULES if (f"{start}-{name}", teacher) in results.runs]


def read_measured(sweep: Path, start: str) -> list[dict[str, Any]] | None:
    """The rows that `marlhf credit --json` gave there, if it was measured."""
    file = sweep / MEASURED / f"{start}.json"
    return json.loads(file.read_text("utf-8"))["rows"] if file.exists() else None


def write_measured(sweep: Path, start: str, rows: list[dict[str, Any]]) -> None:
    file = sweep / MEASURED / f"{start}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")


def predictions(results: Results, start: str, rows: list[dict[str, Any]]) -> list[Prediction]:
    """The best cosine first. A right answer counts as such; a reward model's score less the KL."""
    [teacher] = results.teachers
    gained_by = objective if teacher else score
    measured = {row["name"]: row for row in rows}
    predicted: list[Prediction] = []
    for method in methods_of(results, start):
        name, row = f"{start}-{method}", measured[RULES[method]]
        if row["cosine"] is not None and row["error"] is not None:
            gained = results.gain(gained_by, name, teacher, results.last_step(name, teacher))
            predicted.append(
                Prediction(method, name, RULES[method], row["cosine"], row["error"], gained)
            )
    return sorted(predicted, key=lambda each: -each.cosine)


def reach_correlation(predicted: list[Prediction]) -> tuple[float, float, int]:
    """Rank correlations of gains with cosines and with reach, over the rules of known reach."""
    from scipy.stats import spearmanr

    known = [each for each in predicted if each.method in REACH]
    gains = [each.gained.mean for each in known]
    by_cosine = spearmanr([each.cosine for each in known], gains)[0]
    by_reach = spearmanr([REACH[each.method] for each in known], gains)[0]
    return by_cosine, by_reach, len(known)


def rank_correlation(predicted: list[Prediction]) -> tuple[float, float]:
    """Of cosines and gains, with its p-value."""
    from scipy.stats import spearmanr  # half a second, for this alone

    return spearmanr([x.cosine for x in predicted], [x.gained.mean for x in predicted])
