"""Sweeps: what one setting, or the size of the model, does to score, KL and length.

Nothing is declared: there is a figure for every setting in which some runs differ and nothing
else, seeds aside. In a grid of settings each has its own figure, with one line per choice of the
others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from marlhf.report.charts import legend_of
from marlhf.report.dots import Dot, Trail, dot_rows, sweep_chart
from marlhf.report.groups import (
    Group,
    describe_methods,
    describe_segmenter,
    differing,
    setting_text,
    unflatten,
    unlike,
)
from marlhf.report.measures import TITLES, final_score, scored
from marlhf.report.page import NUM_COLOURS, grid, heading, section, warn, words
from marlhf.report.tables import Cell, figure
from marlhf.runs.read import num_parameters

RULE = "segmenter"
"""The termination rule as a whole: its type and all its settings."""
MEASURES = TITLES | {"repetition": "Repetition"}
SIZE = "parameters"
MAX_SWEEPS = 8
MAX_CHARS = 24


@dataclass(frozen=True)
class SettingSweep:
    """One setting or the size, its values in order, and the lines of groups along it."""

    key: str
    values: list[Any]
    lines: list[tuple[str, list[tuple[int, Group]]]]
    """(what the line's groups share and other lines do not, [(place of the value, group)])"""

    @property
    def is_numeric(self) -> bool:
        return all(map(_is_number, self.values))

    @property
    def title(self) -> str:
        return words("sweep_titles").get(self.key, f"By {self.key}")

    @property
    def places(self) -> list[str]:
        return [(size_text if self.key == SIZE else value_text)(value) for value in self.values]


def find_sweeps(groups: Sequence[Group]) -> list[SettingSweep]:
    """A sweep for each setting in which some groups differ and nothing else."""
    known = [group for group in groups if group.config]
    keys = [key for key, _ in differing([group.chosen for group in known])]
    if "segmenter.type" in keys:
        keys = [RULE, *(key for key in keys if key != "segmenter.type")]
    kept = [sweep for key in keys if (sweep := _along(key, known)) is not None]
    return kept[:MAX_SWEEPS]


def _along(key: str, groups: Sequence[Group]) -> SettingSweep | None:
    together: dict[str, list[Group]] = {}
    for group in groups:
        rest = {k: v for k, v in group.chosen.items() if not _belongs(k, key)}
        context = json.dumps([group.stage, sorted(rest.items())], default=str)
        together.setdefault(context, []).append(group)
    lines = [each for each in together.values() if len(each) > 1 and _varies(key, each)]
    if not lines:
        return None
    values = list({_value(key, group) for line in lines for group in line})
    values.sort(key=None if all(map(_is_number, values)) else str)
    shared = [{k: v for k, v in line[0].chosen.items() if not _belongs(k, key)} for line in lines]
    placed = [[(values.index(_value(key, group)), group) for group in line] for line in lines]
    ordered = [sorted(line, key=lambda each: each[0]) for line in placed]
    return SettingSweep(key, values, list(zip(_names(shared), ordered)))


def _belongs(setting: str, key: str) -> bool:
    return setting == key or (key == RULE and setting.startswith(f"{RULE}."))


def _varies(key: str, groups: Sequence[Group]) -> bool:
    if key == RULE:  # n alone has a figure of its own
        return len({group.chosen.get("segmenter.type") for group in groups}) > 1
    return all(key in group.chosen for group in groups)


def _value(key: str, group: Group) -> Any:
    if key == RULE:
        return describe_segmenter(unflatten(group.chosen))
    value = group.chosen[key]
    return value if isinstance(value, (str, int, float, bool)) else setting_text(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def value_text(value: Any) -> str:
    """A setting's value on an axis."""
    if value == math.inf:
        return "\u221e"
    if _is_number(value):
        return f"{value:g}"
    words = setting_text(value)
    return words if len(words) <= MAX_CHARS else "\u2026" + words[1 - MAX_CHARS :]


def _names(shared: list[dict[str, Any]]) -> list[str]:
    """Names that tell lines apart: the settings in which they differ.

    The rule comes first; a setting that tells no further lines apart is left out.
    """
    rows: list[tuple[str, list[str | None]]] = []
    for key, values in sorted(differing(shared), key=lambda row: not row[0].startswith(RULE)):
        known = list(zip(*(named for _, named in rows))) if rows else [()] * len(values)
        if len(set(zip(known, values))) > len(set(known)):
            rows.append((key, values))
    words = [
        [f"{key.rpartition('.')[2]}={(value or 'none').removeprefix('.')}" for value in values]
        for key, values in rows
    ]
    return [", ".join(each) for each in zip(*words)] if words else [""] * len(shared)


def sweeps(policies: list[Group]) -> Markup:
    """One row of figures per sweep: score, gold score, KL, length and repetition."""
    blocks: list[Markup] = []
    for sweep in find_sweeps(scored(policies)):
        warning = ""
        if any(unlike([group for _, group in line]) for _, line in sweep.lines):
            warning = warn("Not on one scale:") + " this setting changes what scores the responses."
        blocks += [heading(sweep.title, warning), _figures(sweep)]
    return section("sweeps", *blocks)


def scaling(policies: Sequence[Group]) -> Markup:
    """One line per method, one place per size, where runs differ in it."""
    counted = [(num_parameters(group.runs[0]), group) for group in scored(policies)]
    sized = [(count, group) for count, group in counted if count]
    sizes = sorted({count for count, _ in sized})
    lines: dict[str, dict[int, Group]] = {}
    methods = describe_methods([group for _, group in sized])
    for (count, group), method in zip(sized, methods):
        lines.setdefault(method, {}).setdefault(sizes.index(count), group)
    kept = [(name, sorted(line.items())) for name, line in lines.items() if len(line) > 1]
    if not kept:
        return Markup()
    apart = unlike([group for _, line in kept for _, group in line])
    return section("scaling", _figures(SettingSweep(SIZE, sizes, kept)), unlike=bool(apart))


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


def _figures(sweep: SettingSweep) -> Markup:
    return grid([measured_figure(sweep, field, title) for field, title in MEASURES.items()])


def measured_figure(sweep: SettingSweep, field: str, title: str) -> Markup:
    """One measure along a sweep: dots on an axis for numbers, rows of dots for words."""
    trails: list[Trail] = []
    rows: list[list[Cell]] = []
    alone = len(sweep.lines) == 1
    for i, (name, line) in enumerate(sweep.lines):
        colour = "var(--faint)" if alone else f"var(--l{i % NUM_COLOURS})"
        dots: list[tuple[int, Dot]] = []
        for at, group in line:
            value, seeds = final_score(group, field), group.finals(f"eval/{field}")
            if math.isfinite(value.mean):
                place = sweep.places[at]
                label = place if alone else f"{name}, {place}"
                dots.append((at, Dot(label, value, group.colour if alone else colour, seeds)))
                place = sweep.values[at] if sweep.key == SIZE else place
                rows.append([name, place, *value[:3], len(group.runs), group.label])
        if dots:
            trails.append(Trail(name, colour, dots))
    if not rows:
        return Markup()
    x_label = sweep.title.removeprefix("By ").partition(",")[0]
    is_share = field == "repetition"
    if sweep.is_numeric:
        chart = sweep_chart(trails, sweep.places, x_label=x_label, y_label=title, is_share=is_share)
    else:
        flat = [dot for trail in trails for _, dot in trail.dots]
        chart = dot_rows(flat, x_label=title, is_share=is_share)
    return figure(
        title,
        chart,
        file=f"{sweep.title} {title}",
        key=legend_of(trails) if sweep.is_numeric else "",
        note=trails[0].label if alone else "",
        header=["line", sweep.key, f"eval/{field}", "low", "high", "seeds", "run"],
        rows=rows,
    )
