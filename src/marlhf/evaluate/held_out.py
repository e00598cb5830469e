"""What `marlhf evaluate` left in run folders: numbers, tables, and its section of the report.

No torch in here: the files are all it takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlhf.intervals import Interval, interval
from marlhf.report.charts import distribution, histogram
from marlhf.report.groups import Group
from marlhf.report.page import (
    Cell,
    chip,
    csv_link,
    figure,
    grid,
    num,
    percent,
    section,
    table,
    text,
)
from marlhf.runs.jsonl import Line, read_lines
from marlhf.runs.read import number

FOLDER = "evaluation"
"""Where the files lie in a run folder."""
MEASURES = (
    ("KL", "kl"),
    ("Length", "length"),
    ("Repetition", "repetition"),
    ("Distinct-1", "distinct_1"),
    ("Distinct-2", "distinct_2"),
    ("Ended", "ended"),
)
SHARES = ("repetition", "distinct_1", "distinct_2", "ended")
MAX_FIGURES = 12


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


def read_evaluations(folder: Path) -> dict[str, list[Line]]:
    """The lines of each file that `marlhf evaluate` left in a run folder, by the file's name."""
    found: dict[str, list[Line]] = {}
    for file in sorted((folder / FOLDER).glob("*.jsonl")):
        lines = [x for x in read_lines(file).values() if isinstance(x.get("scores"), dict)]
        if lines:
            found[file.stem] = lines
    return found


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for the terminal: the first column on the left, numbers on the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines: list[str] = []
    for first, *rest in (header, *rows):
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def summary_table(found: Sequence[tuple[str, Summary]]) -> str:
    """What `marlhf evaluate` prints: a row a model."""
    judges = list(dict.fromkeys(name for _, each in found for name in each.scores))
    rows: list[list[str]] = []
    for name, each in found:
        cells = [plain_interval(each.scores.get(judge)) for judge in judges]
        means = [each.measures[key].mean for _, key in MEASURES]
        cells += ["-" if math.isnan(mean) else f"{mean:.3g}" for mean in means]
        rows.append([name, *cells, str(each.prompts)])
    return plain_table(["", *judges, *(title.lower() for title, _ in MEASURES), "prompts"], rows)


def plain_interval(value: Interval | None) -> str:
    if value is None or math.isnan(value.mean):
        return "-"
    bounds = "" if math.isnan(value.low) else f" [{value.low:.3f}, {value.high:.3f}]"
    return f"{value.mean:.3f}{bounds}"


def held_out(groups: Sequence[Group]) -> str:
    """A row a run and sampling; and how the scores of each judge are distributed."""
    found = [
        (label, group.colour, name, lines)
        for label, group, folder in labelled(groups)
        for name, lines in read_evaluations(folder).items()
    ]
    if not found:
        return ""
    summaries = [summarise(lines) for *_, lines in found]
    judges = list(dict.fromkeys(name for each in summaries for name in each.scores))
    header = ["Run", "Sampling", "Prompts", *map(text, judges), *(m[0] for m in MEASURES)]
    cells: list[list[str]] = []
    data: list[list[Cell]] = []
    for (label, colour, name, _), each in zip(found, summaries):
        scores = [each.scores.get(judge) for judge in judges]
        row = [chip(label, colour), _sampling_cell(name), str(each.prompts), *map(_cell, scores)]
        for _, key in MEASURES:
            row.append((percent if key in SHARES else num)(each.measures[key].mean))
        cells.append(row)
        flat = [x for score in scores for x in (score[:3] if score else (None, None, None))]
        means = [each.measures[key].mean for _, key in MEASURES]
        data.append([label, name, each.prompts, *flat, *means])
    names = [x for judge in judges for x in (judge, f"{judge} low", f"{judge} high")]
    names = ["run", "sampling", "prompts", *names, *(key for _, key in MEASURES)]
    samplings = list(dict.fromkeys(name for _, _, name, _ in found))
    figures = [_distribution(found, name, judge) for name in samplings for judge in judges]
    return section(
        "held_out",
        "Scores of held-out responses",
        "From the evaluation files of each run: raw scores of each reward model with 95% intervals "
        "over prompts, KL to the reference in nats a response, length in tokens. Compare rows of "
        "the same sampling: temperature, most new tokens and seed.",
        table(header, cells, csv=csv_link("evaluations", names, data), words=2),
        grid([each for each in figures if each][:MAX_FIGURES]),
    )


def labelled(groups: Sequence[Group]) -> list[tuple[str, Group, Path]]:
    """Every run under the name of its group, its seed added where the group has several."""
    found: list[tuple[str, Group, Path]] = []
    for group in groups:
        for run in group.runs:
            name = group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}"
            found.append((name, group, run.path))
    return found


def sampling_words(name: str) -> str:
    """A file's name in words, as far as it is one that `evaluate` gave.

    >>> sampling_words("t0.8-m64-s0"), sampling_words("mine")
    ('temperature 0.8, 64 tokens', 'mine')
    """
    match = re.match(r"t([\d.e-]+)-m(\d+)-s(\d+)(?:-(.+))?$", name)
    if match is None:
        return name
    heat, tokens, seed, rest = match.groups()
    words = [f"temperature {heat}", f"{tokens} tokens"] + [f"seed {seed}"] * (seed != "0")
    return ", ".join([*words, *([rest] if rest else [])])


def _sampling_cell(name: str) -> str:
    words = sampling_words(name)
    return text(words) + (f"<small>{text(name)}</small>" if words != name else "")


def _cell(score: Interval | None) -> str:
    if score is None:
        return num(None)
    bounds = f"<small>[{num(score.low)}, {num(score.high)}]</small>"
    return f"<b>{num(score.mean)}</b>{bounds if math.isfinite(score.low) else ''}"


def _distribution(found: Sequence[tuple[str, str, str, list[Line]]], name: str, judge: str) -> str:
    series = [
        (label, [x for x in scores_of(lines, judge) if math.isfinite(x)], colour)
        for label, colour, sampling, lines in found
        if sampling == name
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
        f"Score by {judge}, {sampling_words(name)}",
        distribution(series, x_label=f"score by {judge}"),
        file=f"distribution {judge} {name}",
        header=["run", "from", "to", "share"],
        rows=rows,
    )
