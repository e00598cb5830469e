"""Results of `marlhf evaluate`, read from run folders: means with intervals. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marlhf.evaluate.text_table import text_table
from marlhf.intervals import NO_INTERVAL, Interval, interval
from marlhf.runs.evaluations import EvaluationFile, SamplingSettings, read_evaluations
from marlhf.runs.jsonl import Line
from marlhf.runs.layout import EVALUATION
from marlhf.runs.read import number

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
    files: list[EvaluationFile] = []
    for file in read_evaluations(folder / EVALUATION):
        lines = [line for line in file.lines if isinstance(line.get("scores"), dict)]
        if lines:
            files.append(replace(file, lines=lines))
    return files


def summary_table(summaries: Sequence[tuple[str, Summary]]) -> str:
    """What `marlhf evaluate` prints: one row per model."""
    judges = list(dict.fromkeys(name for _, each in summaries for name in each.scores))
    rows: list[list[str]] = []
    for name, each in summaries:
        cells = [each.scores.get(judge, NO_INTERVAL).text() for judge in judges]
        means = [each.measures[key].mean for _, key in MEASURES]
        cells += ["-" if math.isnan(mean) else f"{mean:.3g}" for mean in means]
        rows.append([name, *cells, str(each.prompts)])
    return text_table(["", *judges, *(title.lower() for title, _ in MEASURES), "prompts"], rows)


def data_tables(models: Sequence[tuple[str, Path]], like: SamplingSettings) -> list[str]:
    """One table per reward: a row per model, a column per data set, as in the paper's table 2.

    `models` are names and folders. Only files with the sampling of `like`, whatever their data, are
    in it. Gains over the first model are paired by prompt. None where there is one data set alone.
    """
    by_model = [(name, _lines_by_data(folder, like)) for name, folder in models]
    data = sorted({each for _, by_data in by_model for each in by_data})  # the run's own is ""
    if len(data) < 2:
        return []
    files = [lines for _, by_data in by_model for lines in by_data.values()]
    judges = dict.fromkeys(name for lines in files for line in lines for name in line["scores"])
    tables: list[str] = []
    for judge in judges:
        rows = [
            [name, *(_score(by_data, by_model[0][1], each, judge) for each in data)]
            for name, by_data in by_model
        ]
        header = [f"score by {judge}", *(each or "held out" for each in data)]
        tables.append(text_table(header, rows))
    return tables


def _lines_by_data(folder: Path, like: SamplingSettings) -> dict[str, list[Line]]:
    files = [(file.settings, file.lines) for file in read_scored(folder)]
    return {
        settings.data: lines
        for settings, lines in files
        if settings is not None and replace(settings, data=like.data) == like
    }


def _score(
    model: dict[str, list[Line]], baseline: dict[str, list[Line]], data: str, judge: str
) -> str:
    """`0.84 [0.80, 0.88]` for the baseline, `1.41 +0.57 [+0.50, +0.64]` with a gain over it."""
    scores = _by_prompt(model.get(data, []), judge)
    score = interval([*scores.values()])
    if not score.size:
        return "-"
    if model is baseline or data not in baseline:
        return score.text(lambda x: f"{x:.2f}")
    before = _by_prompt(baseline[data], judge)
    gain = interval([scores[key] - before[key] for key in scores if key in before])
    return f"{score.mean:.2f} {gain.text(lambda x: f'{x:+.2f}')}"


def _by_prompt(lines: Sequence[Line], judge: str) -> dict[str, float]:
    return dict(zip((str(line["key"]) for line in lines), scores_of(lines, judge)))
