"""Verdicts of any judge, on disk and counted: no torch, no network.

A verdict file has one JSON object a line: `prompt`, `response_a`, `response_b` and `verdict` (`a`,
`b` or `tie`), and who said so in `judge`. A model, a score and a person write the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from marlhf.intervals import interval, wilson
from marlhf.judge.pairs import JudgeError, read_lines

if TYPE_CHECKING:
    from marlhf.data.rows import Text

FOLDER = "judged"
"""Where verdicts lie in a run folder: the report looks here."""
Verdict = Literal["a", "b", "tie"]
VERDICTS: tuple[Verdict, ...] = ("a", "tie", "b")
TURNED: dict[str, Verdict] = {"a": "b", "b": "a", "tie": "tie"}


@dataclass(frozen=True)
class Judgement:
    """One pair, judged."""

    prompt: Text
    response_a: str
    response_b: str
    verdict: Verdict
    orders: tuple[Verdict, ...] = ()
    """What was said in each order that was asked."""
    dimensions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Numbers for (a, b), averaged over the orders."""


def share_with_bounds(count: int, total: int) -> dict[str, float]:
    """A share and its interval, as a summary file has them."""
    share, low, high, _ = wilson(count, total)
    return {"share": share, "low": low, "high": high}


def summarise(judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Win, tie and loss of A with intervals; dimensions; how often the orders disagreed."""
    total = len(judgements)
    counts = {v: sum(j.verdict == v for j in judgements) for v in VERDICTS}
    found: dict[str, Any] = {"pairs": total}
    for name, verdict in (("win", "a"), ("tie", "tie"), ("loss", "b")):
        found[name] = {"count": counts[verdict], **share_with_bounds(counts[verdict], total)}
    both = [j for j in judgements if len(j.orders) > 1]
    if both:
        found["orders_disagreed"] = sum(len(set(j.orders)) > 1 for j in both)
    names = list(dict.fromkeys(name for j in judgements for name in j.dimensions))
    found["dimensions"] = {
        name: {
            side: dict(zip(("mean", "low", "high"), interval(values)[:3]))
            for side, values in zip(
                ("a", "b", "difference"), _columns([j.dimensions.get(name) for j in judgements])
            )
        }
        for name in names
    }
    return found


def _columns(values: Sequence[tuple[float, float] | None]) -> tuple[list[float], ...]:
    known = [value for value in values if value is not None]
    return [a for a, _ in known], [b for _, b in known], [a - b for a, b in known]


def write_verdicts(
    file: Path, judgements: Sequence[Judgement], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the verdicts and, beside them, their summary, which is returned."""
    lines = [
        json.dumps({**about, **_plain(judgement)}, ensure_ascii=False) + "\n"
        for judgement in judgements
    ]
    found = {**about, **summarise(judgements), "file": file.name}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, "".join(lines))
    replace_file(file.with_suffix(".json"), json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return found


def _plain(judgement: Judgement) -> dict[str, Any]:
    return {
        "prompt": judgement.prompt,
        "response_a": judgement.response_a,
        "response_b": judgement.response_b,
        "verdict": judgement.verdict,
        "orders": list(judgement.orders),
        "dimensions": {name: list(values) for name, values in judgement.dimensions.items()},
    }


def replace_file(file: Path, words: str) -> None:
    """Whole or not at all: a kill leaves the file that was there."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(words, encoding="utf-8")
    new.replace(file)


def read_verdicts(file: Path) -> list[tuple[str, str, Verdict]]:
    """(judge, pair, verdict) a line, the later one where a judge spoke twice.

    A pair is named by its texts, so that A against B and B against A are the same pair, with
    the verdict turned round; or by `pair`, where a file has names and no texts.
    """
    found: dict[tuple[str, str], Verdict] = {}
    for count, row in enumerate(read_lines(file), start=1):
        said = row.get("verdict")
        if said not in TURNED:
            raise JudgeError(
                f"Verdict {count} of {file} is {said!r}. Write a, b or tie; leave out what was "
                "not judged."
            )
        pair, turned = _name(row, file, count)
        verdict = TURNED[said]
        found[str(row.get("judge") or file.stem), pair] = verdict if turned else TURNED[verdict]
    return [(*key, verdict) for key, verdict in found.items()]


def _name(row: Mapping[str, Any], file: Path, count: int) -> tuple[str, bool]:
    if {"prompt", "response_a", "response_b"} <= row.keys():
        a, b = str(row["response_a"]), str(row["response_b"])
        return json.dumps([row["prompt"], *sorted((a, b))], sort_keys=True), a > b
    if "pair" in row:
        return str(row["pair"]), False
    raise JudgeError(
        f"Verdict {count} of {file} does not say on what: it needs `prompt`, `response_a` and "
        "`response_b`, or a `pair` to name them."
    )
