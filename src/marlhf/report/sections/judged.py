"""Verdicts of judges on the runs: wins, ties and losses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from marlhf.intervals import NO_INTERVAL, Interval
from marlhf.judge.pairs import JudgeError, read_lines
from marlhf.judge.verdicts import REVERSED, compare, read_votes, share_with_bounds
from marlhf.report.dots import Bars, Dot, dots_figure, stacked_bars
from marlhf.report.groups import Group, groups_by_name
from marlhf.report.numbers import percent, signed
from marlhf.report.page import grid, heading, part, section
from marlhf.report.tables import Column, figure, table
from marlhf.runs.layout import JUDGED, read_object
from marlhf.runs.read import Run, number

PARTS = ("win", "tie", "loss")
UNKNOWN = {"a": "var(--t0)", "b": "var(--t2)"}
"""Colours of sides that are not a run of the report."""
PERSON = "person:"
"""Prefix of the names of judges who are people."""
MAX_FIGURES = 6


def judged(runs: Sequence[Run], groups: Sequence[Group] = ()) -> Markup:
    """Win, tie and loss by judge; dimension scores; how much the judges agree."""
    colours = {name: group.colour for name, group in groups_by_name(groups).items()}
    summaries = read_summaries(runs)
    if not summaries:
        return Markup()
    return section(
        "judged",
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
            shares = [number(summary[p][key]) for p in PARTS for key in ("share", "low", "high")]
            for sides in summary["dimensions"].values():
                [_interval(sides[side], "mean", 1) for side in ("a", "b", "difference")]
            whole = _label(summary) and all(0 <= x <= 1 for x in shares) and summary["pairs"] > 0
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if whole:
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
            if (verdict := str(row.get("verdict"))) in REVERSED:
                votes.setdefault(pair, Counter())[verdict] += 1
    ranked = [counts.most_common() for counts in votes.values()]
    return ["tie" if rest and rest[0][1] == most else first for (first, most), *rest in ranked]


def _label(summary: dict[str, Any]) -> str:
    return f"{summary['a']} against {summary['b']}, by {summary['judge']} ({summary['task']})"


def _side_colours(summary: dict[str, Any], colours: dict[str, str]) -> tuple[str, str]:
    a, b = (colours.get(str(summary[side]), UNKNOWN[side]) for side in ("a", "b"))
    return (a, b) if a != b else (UNKNOWN["a"], UNKNOWN["b"])


def _interval(numbers: dict[str, Any], middle: str, size: int) -> Interval:
    """An interval as a summary file has it."""
    mean, low, high = (number(numbers.get(key)) for key in (middle, "low", "high"))
    return Interval(mean, low, high, size)


def _bars(summaries: Sequence[dict[str, Any]], colours: dict[str, str]) -> Markup:
    bars: Bars = []
    for s in summaries:
        a, b = _side_colours(s, colours)
        shades = zip(PARTS, (a, "var(--t4)", b))
        bars.append((_label(s), [(name, 100 * s[name]["share"], shade) for name, shade in shades]))
    shares = [(name, key) for name in PARTS for key in ("share", "low", "high")]
    return figure(
        "Win, tie and loss",
        stacked_bars(bars, x_label="% of pairs", inside=True),
        file="win tie loss",
        note="From the left: the first wins, ties, the second wins.",
        header=["a", "b", "judge", "task", "pairs", *(" ".join(each) for each in shares)],
        rows=[
            [s["a"], s["b"], s["judge"], s["task"], s["pairs"]]
            + [s[name][key] for name, key in shares]
            for s in summaries
        ],
    )


def _shares(summaries: Sequence[dict[str, Any]]) -> Markup:
    rows: list[list[object]] = []
    for s in summaries:
        pairs = s["pairs"]
        turned, equal = s.get("orders_disagreed"), s.get("win_rate_at_equal_length")
        equal = _interval(equal, "share", pairs) if isinstance(equal, dict) else NO_INTERVAL
        row = [_label(s), pairs, *(_interval(s[name], "share", pairs) for name in PARTS)]
        row += [s["win"]["share"] + s["tie"]["share"] / 2, equal]
        rows.append([*row, turned / pairs if isinstance(turned, int) else None])
    shares = ("Win", "Tie", "Loss", "Win rate", "At equal length", "Orders disagreed")
    columns = [Column("Comparison"), Column("Pairs"), *(Column(s, form=percent) for s in shares)]
    return table(columns, rows)


def _dimensions(summaries: Sequence[dict[str, Any]], colours: dict[str, str]) -> Markup:
    rows: list[list[object]] = []
    for s in summaries:
        for name, sides in s["dimensions"].items():
            means = [number(sides[side]["mean"]) for side in ("a", "b")]
            difference = _interval(sides["difference"], "mean", s["pairs"])
            rows.append([_label(s), name.replace("_", " "), *means, difference])
    if not rows:
        return Markup()
    columns = [Column(name.capitalize(), name) for name in ("comparison", "dimension")]
    columns += [Column("First", "first"), Column("Second", "second")]
    columns.append(Column("Difference", "difference", signed))
    figures = [_dimension_figure(s, colours) for s in summaries if s["dimensions"]]
    shown = grid(figures[:MAX_FIGURES])
    return heading("By dimension") + shown + table(columns, rows, file="dimensions", words=2)


def _dimension_figure(summary: dict[str, Any], colours: dict[str, str]) -> Markup:
    """Both runs' mean grade on each dimension, one under the other."""
    dots: list[Dot] = []
    for name, sides in summary["dimensions"].items():
        for side, colour in zip("ab", _side_colours(summary, colours)):
            value = _interval(sides[side], "mean", summary["pairs"])
            dots.append(Dot(f"{name.replace('_', ' ')}: {summary[side]}", value, colour))
    return dots_figure(_label(summary), dots, x_label="mean grade", names="dimension and run")


def _agreement(runs: Sequence[Run]) -> Markup:
    folders = [run.path / JUDGED for run in runs if any((run.path / JUDGED).glob("*.jsonl"))]
    try:
        votes = read_votes(folders)
        agreement = compare(votes)
    except (JudgeError, TypeError):  # one judge, no shared pair, or a damaged file
        return Markup()
    columns = [Column("Judge", "judge"), Column("Other judge", "other judge")]
    columns += [Column("Pairs", "pairs"), Column("Agreement", "agreement", percent)]
    columns.append(Column("Cohen's kappa", "kappa"))
    rows: list[list[object]] = []
    for b in agreement.between:
        shared = votes[b.one].keys() & votes[b.other].keys()
        # Chance explains all of the agreement with a judge who always says the same.
        varies = all(len({votes[judge][pair] for pair in shared}) > 1 for judge in (b.one, b.other))
        kappa = b.kappa if varies else "undefined: one never varies"
        rows.append([b.one, b.other, b.pairs, b.agreement, kappa])
    shown = heading("How much the judges agree")
    shown += table(columns, rows, file="agreement", words=2)
    return shown + (part("fleiss", agreement) if agreement.fleiss else "")
