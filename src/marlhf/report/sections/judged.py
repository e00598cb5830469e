"""Verdicts of judges on the runs: wins, ties and losses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlhf.intervals import NO_INTERVAL, Interval
from marlhf.judge.agreement import compare, read_votes
from marlhf.judge.pairs import JudgeError, read_lines
from marlhf.judge.verdicts import REVERSED, share_with_bounds
from marlhf.report.bars import stacked_bars
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group, groups_by_name
from marlhf.report.page import (
    Cell,
    csv_link,
    figure,
    grid,
    interval_cell,
    num,
    percent,
    section,
    signed,
    table,
    text,
)
from marlhf.runs.layout import JUDGED, read_object
from marlhf.runs.read import Run, number

PARTS = ("win", "tie", "loss")
UNKNOWN = {"a": "var(--t0)", "b": "var(--t2)"}
"""Colours of sides that are not a run of the report."""
PERSON = "person:"
"""Prefix of the names of judges who are people."""
MAX_FIGURES = 6


def judged(runs: Sequence[Run], groups: Sequence[Group] = ()) -> str:
    """Win, tie and loss by judge; dimension scores; how much the judges agree."""
    colours = {name: group.colour for name, group in groups_by_name(groups).items()}
    summaries = read_summaries(runs)
    if not summaries:
        return ""
    return section(
        "judged",
        "Judged in pairs",
        "Two responses to the same prompt, and which is better: shares of the first-named run, "
        "with 95% intervals over prompts. Read them together with how much the judges agree.",
        grid([_bars(summaries, colours)]),
        _shares(summaries),
        _dimensions(summaries, colours),
        _agreement(runs),
    )


def read_summaries(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What judges said of the runs, as `marlhf judge` and `marlhf annotate` summed it up."""
    return [each for run in runs for each in _with_majority(_summaries(run.path / JUDGED))]


def _summaries(folder: Path) -> list[dict[str, Any]]:
    """Summaries that are complete; others are left out."""
    summaries = []
    for file in sorted(folder.glob("*.json")):
        try:
            summary = read_object(file)
            for part in PARTS:
                [float(summary[part][key]) for key in ("share", "low", "high")]
            whole = _label(summary) and summary["pairs"] > 0 and summary["dimensions"].items()
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if whole is not False:
            summaries.append(summary | {"path": file.with_suffix(".jsonl")})
    return summaries


def _with_majority(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the majority verdict where several people judged the same two runs."""
    together: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for summary in summaries:
        if str(summary["judge"]).startswith(PERSON):
            key = str(summary["a"]), str(summary["b"]), str(summary["task"])
            together.setdefault(key, []).append(summary)
    added: list[dict[str, Any]] = []
    for (a, b, task), each in together.items():
        verdicts = _majority([summary["path"] for summary in each]) if len(each) > 1 else []
        if verdicts:
            about = {"a": a, "b": b, "task": task, "judge": f"most of {len(each)} people"}
            about |= {"pairs": len(verdicts), "dimensions": {}}
            for part, verdict in (("win", "a"), ("tie", "tie"), ("loss", "b")):
                about[part] = share_with_bounds(verdicts.count(verdict), len(verdicts))
            added.append(about)
    return summaries + added


def _majority(files: Sequence[Path]) -> list[str]:
    """The majority verdict on each pair that anyone judged; a tie where no verdict leads."""
    votes: dict[str, Counter[str]] = {}
    for file in files:
        try:
            rows = read_lines(file)
        except JudgeError:
            return []
        for row in rows:
            pair = json.dumps([row.get(key) for key in ("prompt", "response_a", "response_b")])
            if row.get("verdict") in REVERSED:
                votes.setdefault(pair, Counter())[row["verdict"]] += 1
    verdicts: list[str] = []
    for counts in votes.values():
        (first, most), *rest = counts.most_common()
        verdicts.append("tie" if rest and rest[0][1] == most else first)
    return verdicts


def _label(summary: dict[str, Any]) -> str:
    return f"{summary['a']} against {summary['b']}, by {summary['judge']} ({summary['task']})"


def _side_colours(summary: dict[str, Any], colours: dict[str, str]) -> tuple[str, str]:
    a, b = (colours.get(str(summary[side]), UNKNOWN[side]) for side in ("a", "b"))
    return (a, b) if a != b else (UNKNOWN["a"], UNKNOWN["b"])


def _interval(numbers: dict[str, Any], middle: str, size: int) -> Interval:
    """An interval as a summary file has it."""
    mean, low, high = (number(numbers.get(key)) for key in (middle, "low", "high"))
    return Interval(mean, low, high, size)


def _bars(summaries: Sequence[dict[str, Any]], colours: dict[str, str]) -> str:
    rows: list[tuple[str, list[tuple[str, float, str]]]] = []
    for s in summaries:
        a, b = _side_colours(s, colours)
        shades = zip(PARTS, (a, "var(--t4)", b))
        rows.append((_label(s), [(part, 100 * s[part]["share"], shade) for part, shade in shades]))
    data: list[list[Cell]] = [
        [s["a"], s["b"], s["judge"], s["task"], s["pairs"]]
        + [s[part][key] for part in PARTS for key in ("share", "low", "high")]
        for s in summaries
    ]
    names = [f"{part} {key}" for part in PARTS for key in ("share", "low", "high")]
    return figure(
        "Win, tie and loss",
        stacked_bars(rows, x_label="% of pairs", inside=True),
        file="win tie loss",
        note="From the left: the first wins, ties, the second wins.",
        header=["a", "b", "judge", "task", "pairs", *names],
        rows=data,
    )


def _shares(summaries: Sequence[dict[str, Any]]) -> str:
    rows = []
    for s in summaries:
        cells = [interval_cell(_interval(s[part], "share", s["pairs"]), percent) for part in PARTS]
        turned = s.get("orders_disagreed")
        share = percent(turned / s["pairs"]) if isinstance(turned, int) else num(None)
        equal = s.get("win_rate_at_equal_length")  # since 0.2
        equal = _interval(equal, "share", s["pairs"]) if isinstance(equal, dict) else NO_INTERVAL
        plain = percent(s["win"]["share"] + s["tie"]["share"] / 2)
        cells += [plain, interval_cell(equal, percent)]
        rows.append([text(_label(s)), str(s["pairs"]), *cells, share])
    header = ["Comparison", "Pairs", "Win", "Tie", "Loss", "Win rate", "At equal length"]
    return table([*header, "Orders disagreed"], rows)


def _dimensions(summaries: Sequence[dict[str, Any]], colours: dict[str, str]) -> str:
    rows: list[list[str]] = []
    data: list[list[Cell]] = []
    for s in summaries:
        for name, sides in s["dimensions"].items():
            a, b = (number(sides[side]["mean"]) for side in ("a", "b"))
            difference = _interval(sides["difference"], "mean", s["pairs"])
            shown = [num(a), num(b), interval_cell(difference, signed)]
            rows.append([text(_label(s)), text(name.replace("_", " ")), *shown])
            data.append([_label(s), name, a, b, *difference[:3]])
    if not rows:
        return ""
    header = ["comparison", "dimension", "first", "second", "difference", "low", "high"]
    link = csv_link("dimensions", header, data)
    return (
        "<h3>By dimension</h3>"
        + grid([_dimension_figure(s, colours) for s in summaries if s["dimensions"]][:MAX_FIGURES])
        + table(
            ["Comparison", "Dimension", "First", "Second", "Difference"], rows, csv=link, words=2
        )
    )


def _dimension_figure(summary: dict[str, Any], colours: dict[str, str]) -> str:
    """Both runs' mean grade on each dimension, one under the other."""
    dots: list[Dot] = []
    for name, sides in summary["dimensions"].items():
        for side, colour in zip("ab", _side_colours(summary, colours)):
            value = _interval(sides[side], "mean", summary["pairs"])
            dots.append(Dot(f"{name.replace('_', ' ')}: {summary[side]}", value, colour))
    rows: list[list[Cell]] = [[dot.label, *dot.value[:3]] for dot in dots]
    return figure(
        _label(summary),
        dot_rows(dots, x_label="mean grade"),
        file=f"dimensions {_label(summary)}",
        header=["dimension and run", "mean", "low", "high"],
        rows=rows,
    )


def _agreement(runs: Sequence[Run]) -> str:
    folders = [run.path / JUDGED for run in runs if any((run.path / JUDGED).glob("*.jsonl"))]
    try:
        agreement = compare(read_votes(folders))
    except JudgeError:  # one judge, no shared pair, or a damaged file: nothing to show
        return ""
    rows = []
    data: list[list[Cell]] = []
    for b in agreement.between:
        share, kappa = b.agreement, b.kappa
        cells = [interval_cell(share, percent), interval_cell(kappa)]
        rows.append([text(b.one), text(b.other), str(b.pairs), *cells])
        data.append([b.one, b.other, b.pairs, *share[:3], *kappa[:3]])
    numbers = ["agreement", "low", "high", "kappa", "kappa low", "kappa high"]
    link = csv_link("agreement", ["judge", "other judge", "pairs", *numbers], data)
    fleiss = agreement.fleiss
    all_of_them = (
        f'<p class="lead">Fleiss\' kappa of all {len(agreement.judges)} on '
        f"{agreement.common} pairs: "
        f"{fleiss.text(num)}.</p>"
        if fleiss is not None
        else ""
    )
    return (
        "<h3>How much the judges agree</h3>"
        + table(
            ["Judge", "Other judge", "Pairs", "Agreement", "Cohen's kappa"],
            rows,
            csv=link,
            words=2,
        )
        + all_of_them
    )
