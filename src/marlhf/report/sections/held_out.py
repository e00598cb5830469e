"""Scores of held-out responses: the files that `marlhf evaluate` wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence

from marlhf.evaluate.results import (
    MEASURES,
    read_scored,
    scores_of,
    summarise,
)
from marlhf.report.charts import distribution, histogram
from marlhf.report.groups import Group, labelled
from marlhf.report.page import (
    Cell,
    chip,
    csv_link,
    figure,
    grid,
    interval_cell,
    num,
    percent,
    section,
    table,
    text,
)
from marlhf.runs.evaluations import EvaluationFile

SHARES = ("repetition", "distinct_1", "distinct_2", "ended")
MAX_FIGURES = 12


def held_out(groups: Sequence[Group]) -> str:
    """One row per run and sampling, and the distribution of each judge's scores."""
    evaluations = [
        (label, group.colour, file)
        for label, group, folder in labelled(groups)
        for file in read_scored(folder)
    ]
    if not evaluations:
        return ""
    summaries = [summarise(file.lines) for *_, file in evaluations]
    judges = list(dict.fromkeys(name for each in summaries for name in each.scores))
    header = ["Run", "Sampling", "Prompts", *map(text, judges), *(m[0] for m in MEASURES)]
    cells: list[list[str]] = []
    data: list[list[Cell]] = []
    for (label, colour, file), each in zip(evaluations, summaries):
        scores = [each.scores.get(judge) for judge in judges]
        scored = [interval_cell(score, bold=True) for score in scores]
        row = [chip(label, colour), _sampling_cell(file), str(each.prompts), *scored]
        for _, key in MEASURES:
            row.append((percent if key in SHARES else num)(each.measures[key].mean))
        cells.append(row)
        flat = [x for score in scores for x in (score[:3] if score else (None, None, None))]
        means = [each.measures[key].mean for _, key in MEASURES]
        data.append([label, file.name, each.prompts, *flat, *means])
    names = [x for judge in judges for x in (judge, f"{judge} low", f"{judge} high")]
    names = ["run", "sampling", "prompts", *names, *(key for _, key in MEASURES)]
    samplings = list(dict.fromkeys(file.label for *_, file in evaluations))
    figures = [_distribution(evaluations, label, judge) for label in samplings for judge in judges]
    return section(
        "held_out",
        "Scores of held-out responses",
        "From the evaluation files of each run: raw scores of each reward model with 95% intervals "
        "over prompts, KL to the reference in nats per response, length in tokens. Compare rows of "
        "the same sampling: temperature, token limit and seed.",
        table(header, cells, csv=csv_link("evaluations", names, data), words=2),
        grid([each for each in figures if each][:MAX_FIGURES]),
    )


def _sampling_cell(file: EvaluationFile) -> str:
    name = f"<small>{text(file.name)}</small>" if file.label != file.name else ""
    return text(file.label) + name


def _distribution(
    evaluations: Sequence[tuple[str, str, EvaluationFile]], sampling: str, judge: str
) -> str:
    series = [
        (label, [x for x in scores_of(file.lines, judge) if math.isfinite(x)], colour)
        for label, colour, file in evaluations
        if file.label == sampling
    ]
    series = [each for each in series if each[1]]
    if not series:
        return ""
    edges, shares = histogram([values for _, values, _ in series])
    rows: list[list[Cell]] = [
        [label, low, high, share]
        for (label, _, _), row in zip(series, shares)
        for low, high, share in zip(edges, edges[1:], row)
    ]
    return figure(
        f"Score by {judge}, {sampling}",
        distribution(series, x_label=f"score by {judge}"),
        file=f"distribution {judge} {sampling}",
        header=["run", "from", "to", "share"],
        rows=rows,
    )
