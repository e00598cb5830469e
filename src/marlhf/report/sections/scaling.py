"""Scores by the size of the model, where runs differ in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from marlhf.report.charts import legend_of
from marlhf.report.dots import Dot, Trail, sweep_chart
from marlhf.report.groups import Group, describe_segmenter, unlike
from marlhf.report.measures import final_score
from marlhf.report.page import Cell, figure, grid, section, text
from marlhf.report.sections.sweeps import MEASURES
from marlhf.runs.lineage import num_parameters


def size_text(count: int) -> str:
    """A number of parameters as one says it: 135M, 2.6B.

    >>> [size_text(n) for n in (512, 135_000_000, 2_614_000_000)]
    ['512', '135M', '2.6B']
    """
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            amount = count / size
            return f"{amount:.1f}{unit}" if amount < 10 else f"{amount:.0f}{unit}"
    return str(count)


def scaling(policies: Sequence[Group]) -> str:
    """One line per method, one place per size."""
    sized = [
        (count, group)
        for group in policies
        if math.isfinite(final_score(group).mean) and (count := num_parameters(group.runs[0]))
    ]
    sizes = sorted({count for count, _ in sized})
    lines: dict[str, dict[int, Group]] = {}
    for count, group in sized:
        lines.setdefault(_way(group), {}).setdefault(sizes.index(count), group)
    kept = {name: line for name, line in lines.items() if len(line) > 1}
    if not kept:
        return ""
    figures = [_figure(kept, sizes, *each) for each in MEASURES]
    apart = unlike([group for line in kept.values() for group in line.values()])
    warning = (
        ' <span class="warn">Not on one scale:</span> the sizes were not scored by the same reward '
        "model, so compare lines at one size and not sizes with one another."
        if apart
        else ""
    )
    return section(
        "scaling",
        "By size of the model",
        "The number of parameters is counted in the saved weights; intervals are over seeds and "
        f"prompts, or over prompts where there is one seed.{warning}",
        grid(figures),
    )


def _way(group: Group) -> str:
    rule = describe_segmenter(group.config)
    return rule if group.stage == "ppo" and rule else " ".join(filter(None, (group.stage, rule)))


def _figure(
    lines: dict[str, dict[int, Group]], sizes: list[int], title: str, field: str, is_share: bool
) -> str:
    trails: list[Trail] = []
    rows: list[list[Cell]] = []
    for i, (name, line) in enumerate(lines.items()):
        dots: list[tuple[int, Dot]] = []
        for place, group in sorted(line.items()):
            value, seeds = final_score(group, field), group.finals(f"eval/{field}")
            if math.isfinite(value.mean):
                label = f"{name}, {size_text(sizes[place])}"
                dots.append((place, Dot(label, value, f"var(--l{i % 8})", seeds)))
                rows.append([name, sizes[place], *value[:3], len(group.runs), group.label])
        if dots:
            trails.append(Trail(name, f"var(--l{i % 8})", dots))
    if not rows:
        return ""
    places = [size_text(count) for count in sizes]
    return figure(
        title,
        sweep_chart(trails, places, x_label="parameters", y_label=title, is_share=is_share),
        file=f"by size {title}",
        key=legend_of(trails),
        note="" if len(trails) > 1 else text(trails[0].label),
        header=["line", "parameters", f"eval/{field}", "low", "high", "seeds", "run"],
        rows=rows,
    )
