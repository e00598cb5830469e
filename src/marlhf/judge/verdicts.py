"""Writes, reads and counts verdicts of any judge: no torch, no network.

A verdict file has one JSON object per line: `prompt`, `response_a`, `response_b`, `verdict` (`a`,
`b` or `tie`) and `judge`. The format is the same for models, scores and people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from marlhf.intervals import interval, mean, wilson
from marlhf.judge.length import win_rate_at_equal_length
from marlhf.judge.pairs import JudgeError, read_lines
from marlhf.runs.atomic import write_json
from marlhf.runs.jsonl import write_jsonl

if TYPE_CHECKING:
    from marlhf.data.rows import Text

Verdict = Literal["a", "b", "tie"]
VERDICTS: tuple[Verdict, ...] = ("a", "tie", "b")
WINS = {"a": 1.0, "tie": 0.5, "b": 0.0}
REVERSED: dict[str, Verdict] = {"a": "b", "b": "a", "tie": "tie"}


@dataclass(frozen=True)
class Judgement:
    """The verdict on one pair."""

    prompt: Text
    response_a: str
    response_b: str
    verdict: Verdict
    orders: tuple[Verdict, ...] = ()
    """The verdict in each order that was asked."""
    dimensions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Numbers for (a, b), averaged over the orders."""


def share_with_bounds(count: int, total: int) -> dict[str, float]:
    """A share and its interval, as a summary file has them."""
    share, low, high, _ = wilson(count, total)
    return {"share": share, "low": low, "high": high}


def summarise(judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Win, tie and loss of A with intervals, at equal length too; dimensions and orders."""
    total = len(judgements)
    counts = {v: sum(j.verdict == v for j in judgements) for v in VERDICTS}
    summary: dict[str, Any] = {"pairs": total}
    for name, verdict in (("win", "a"), ("tie", "tie"), ("loss", "b")):
        summary[name] = {"count": counts[verdict], **share_with_bounds(counts[verdict], total)}
    wins = [WINS[j.verdict] for j in judgements]
    chars = [len(j.response_a) for j in judgements], [len(j.response_b) for j in judgements]
    equal = win_rate_at_equal_length(wins, *chars)
    summary["win_rate"] = mean(wins)
    summary["win_rate_at_equal_length"] = dict(zip(("share", "low", "high"), equal[:3]))
    summary["mean_chars"] = [mean(chars[0]), mean(chars[1])]
    both = [j for j in judgements if len(j.orders) > 1]
    if both:
        summary["orders_disagreed"] = sum(len(set(j.orders)) > 1 for j in both)
    names = list(dict.fromkeys(name for j in judgements for name in j.dimensions))
    summary["dimensions"] = {
        name: {
            side: dict(zip(("mean", "low", "high"), interval(values)[:3]))
            for side, values in zip(
                ("a", "b", "difference"), _columns([j.dimensions.get(name) for j in judgements])
            )
        }
        for name in names
    }
    return summary


def _columns(values: Sequence[tuple[float, float] | None]) -> tuple[list[float], ...]:
    known = [value for value in values if value is not None]
    return [a for a, _ in known], [b for _, b in known], [a - b for a, b in known]


def write_verdicts(
    file: Path, judgements: Sequence[Judgement], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the verdicts, and beside them their summary, which is returned."""
    summary = {**about, **summarise(judgements), "file": file.name}
    write_jsonl(file, [{**about, **_plain(judgement)} for judgement in judgements])
    write_json(file.with_suffix(".json"), summary)
    return summary


def _plain(judgement: Judgement) -> dict[str, Any]:
    return {
        "prompt": judgement.prompt,
        "response_a": judgement.response_a,
        "response_b": judgement.response_b,
        "verdict": judgement.verdict,
        "orders": list(judgement.orders),
        "dimensions": {name: list(values) for name, values in judgement.dimensions.items()},
    }


def read_verdicts(file: Path) -> list[tuple[str, str, Verdict]]:
    """(judge, pair, verdict) per line; of repeated verdicts of a judge the last.

    A pair is identified by its texts, so that A against B and B against A are the same pair with
    the verdict reversed; or by `pair`, if a file has ids instead of texts.
    """
    verdicts: dict[tuple[str, str], Verdict] = {}
    for count, row in enumerate(read_lines(file), start=1):
        verdict = row.get("verdict")
        if verdict not in REVERSED:
            raise JudgeError(
                f"Verdict {count} of {file} is {verdict!r}. Write a, b or tie; leave out pairs "
                "that were not judged."
            )
        pair, reverse = _pair_id(row, file, count)
        judge = str(row.get("judge") or file.stem)
        verdicts[judge, pair] = REVERSED[verdict] if reverse else verdict
    return [(*key, verdict) for key, verdict in verdicts.items()]


def _pair_id(row: Mapping[str, Any], file: Path, count: int) -> tuple[str, bool]:
    if {"prompt", "response_a", "response_b"} <= row.keys():
        a, b = str(row["response_a"]), str(row["response_b"])
        return json.dumps([row["prompt"], *sorted((a, b))], sort_keys=True), a > b
    if "pair" in row:
        return str(row["pair"]), False
    raise JudgeError(
        f"Verdict {count} of {file} names no pair: it needs `prompt`, `response_a` and "
        "`response_b`, or `pair`."
    )
