"""Scores by the temperature of sampling, from what `evaluate` and `best-of-n` wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from marlhf.evaluate.results import Summary, read_grids, read_scored, summarise
from marlhf.intervals import Interval
from marlhf.report.charts import legend_of
from marlhf.report.dots import Dot, Trail, sweep_chart
from marlhf.report.groups import Group, labelled
from marlhf.report.page import Cell, figure, grid, section, text

MEASURES = (("KL", "kl", False), ("Length", "length", False), ("Repetition", "repetition", True))
MAX_FIGURES = 24


def temperatures(groups: Sequence[Group]) -> str:
    """One line per run: score by each judge, with KL, length and repetition."""
    lines = labelled(groups)
    by_sampling: dict[str, list[tuple[str, str, dict[float, Summary]]]] = {}
    for label, group, folder in lines:
        by_rest: dict[str, dict[float, Summary]] = {}
        for file in read_scored(folder):
            if file.settings is not None:
                summaries = by_rest.setdefault(file.settings.label_without_temperature, {})
                summaries[file.settings.temperature] = summarise(file.lines)
        for rest, summaries in by_rest.items():
            by_sampling.setdefault(rest, []).append((label, group.colour, summaries))
    figures: list[str] = []
    for rest, runs in by_sampling.items():
        judges = dict.fromkeys(
            j for *_, summaries in runs for s in summaries.values() for j in s.scores
        )
        for judge in judges:
            picked = [
                (
                    label,
                    colour,
                    {t: s.scores[judge] for t, s in summaries.items() if judge in s.scores},
                )
                for label, colour, summaries in runs
            ]
            figures.append(_figure(f"Score by {judge}, {rest}", picked))
        for title, key, is_share in MEASURES:
            picked = [
                (label, colour, {t: s.measures[key] for t, s in summaries.items()})
                for label, colour, summaries in runs
            ]
            figures.append(_figure(f"{title}, {rest}", picked, is_share))
    if not any(figures):  # the mean of what was sampled for best of n says the same
        figures = _from_grids(lines)
    return section(
        "temperatures",
        "By temperature of sampling",
        "The same models sampled at several temperatures; bars are 95% intervals over prompts.",
        grid([each for each in figures if each][:MAX_FIGURES]),
    )


def _from_grids(lines: Sequence[tuple[str, Group, Path]]) -> list[str]:
    by_grid: dict[str, list[tuple[str, str, dict[float, Interval]]]] = {}
    for label, group, folder in lines:
        for name, samples in read_grids(folder).items():
            means = {t: samples.cell(t, 1) for t in samples.lines}
            by_grid.setdefault(name, []).append((label, group.colour, means))
    return [_figure(f"Score, {name}", runs) for name, runs in by_grid.items()]


def _figure(
    title: str, runs: Sequence[tuple[str, str, dict[float, Interval]]], is_share: bool = False
) -> str:
    temperatures = sorted({t for *_, values in runs for t in values})
    trails: list[Trail] = []
    rows: list[list[Cell]] = []
    for label, colour, values in runs:
        known = [(t, v) for t, v in sorted(values.items()) if math.isfinite(v.mean)]
        dots = [(temperatures.index(t), Dot(f"{label}, {t:g}", v, colour)) for t, v in known]
        rows += [[label, t, *v[:3]] for t, v in known]
        if dots:
            trails.append(Trail(label, colour, dots))
    if not any(len(trail.dots) > 1 for trail in trails):
        return ""
    name = title.partition(",")[0]
    places = [f"{t:g}" for t in temperatures]
    return figure(
        title,
        sweep_chart(trails, places, x_label="temperature", y_label=name, is_share=is_share),
        file=f"by temperature {title}",
        key=legend_of(trails),
        note=text(trails[0].label) if len(trails) == 1 else "",
        header=["run", "temperature", name, "low", "high"],
        rows=rows,
    )
