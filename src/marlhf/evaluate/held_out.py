"""Results of `marlhf evaluate`, read from run folders: means with intervals. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marlhf.intervals import NO_INTERVAL, Interval, interval
from marlhf.runs.evaluations import EvaluationFile, read_evaluations
from marlhf.runs.jsonl import Line
from marlhf.runs.layout import EVALUATION
from marlhf.runs.read import number
from marlhf.text_table import text_table

MEASURES = (
    ("KL", "kl"),
    ("Length", "length"),
    ("Repetition", "repetition"),
    ("Distinct-1", "distinct_1"),
    ("Distinct-2", "distinct_2"),
    ("Ended", "ended"),
)


@dataclass(frozen=True)
class Summary:
    """Means over prompts with 95% intervals: of each judge's scores, and of each measure."""

    prompts: int
    scores: dict[str, Interval]
    measures: dict[str, Interval]


def summarise(lines: Sequence[Line]) -> Summary:
    names = dict.fromkeys(name for line in lines for name in line["scores"])
    return Summary(
        len(lines),
        {name: interval(scores_of(lines, name)) for name in names},
        {key: interval([_number(line.get(key)) for line in lines]) for _, key in MEASURES},
    )


def scores_of(lines: Sequence[Line], judge: str) -> list[float]:
    """A judge's score of each line, NaN where it gave none."""
    return [number(line["scores"].get(judge)) for line in lines]


def _number(value: object) -> float:
    return float(value) if isinstance(value, bool) else number(value)


def read_scored(folder: Path) -> list[EvaluationFile]:
    """What `marlhf evaluate` left in a run folder: files whose lines have scores by name."""
    found: list[EvaluationFile] = []
    for file in read_evaluations(folder / EVALUATION):
        lines = [line for line in file.lines if isinstance(line.get("scores"), dict)]
        if lines:
            found.append(replace(file, lines=lines))
    return found


def summary_table(found: Sequence[tuple[str, Summary]]) -> str:
    """What `marlhf evaluate` prints: one row per model."""
    judges = list(dict.fromkeys(name for _, each in found for name in each.scores))
    rows: list[list[str]] = []
    for name, each in found:
        cells = [each.scores.get(judge, NO_INTERVAL).text() for judge in judges]
        means = [each.measures[key].mean for _, key in MEASURES]
        cells += ["-" if math.isnan(mean) else f"{mean:.3g}" for mean in means]
        rows.append([name, *cells, str(each.prompts)])
    return text_table(["", *judges, *(title.lower() for title, _ in MEASURES), "prompts"], rows)
