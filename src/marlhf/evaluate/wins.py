"""What judges said of the runs: the report's bars of wins, ties and losses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlhf.evaluate.charts import legend, stacked_bars
from marlhf.evaluate.page import Cell, csv_link, figure, num, percent, section, signed, table, text
from marlhf.evaluate.pairs import JudgeError
from marlhf.evaluate.runs import Run, number
from marlhf.evaluate.verdicts import FOLDER

PARTS = (("win", "var(--c0)"), ("tie", "var(--t2)"), ("loss", "var(--c1)"))


def wins(runs: Sequence[Run]) -> str:
    """Win, tie and loss by judge; dimension scores; how far the judges agree."""
    found = [each for run in runs for each in _summaries(run.path / FOLDER)]
    if not found:
        return ""
    return section(
        "judged",
        "Judged in pairs",
        "Two responses to the same prompt, and which is better: shares of the first-named run, "
        "with 95% intervals over prompts. Read them with how far the judges agree.",
        _bars(found),
        _shares(found),
        _dimensions(found),
        _agreement(runs),
    )


def _summaries(folder: Path) -> list[dict[str, Any]]:
    """Summaries that are whole; others are left out."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
            for part, _ in PARTS:
                [float(summary[part][key]) for key in ("share", "low", "high")]
            whole = _label(summary) and summary["pairs"] > 0 and summary["dimensions"].items()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        if whole is not False:
            found.append(summary)
    return found


def _label(summary: dict[str, Any]) -> str:
    return f"{summary['a']} against {summary['b']}, by {summary['judge']} ({summary['task']})"


def _bars(found: Sequence[dict[str, Any]]) -> str:
    rows = [
        (_label(s), [(part, 100 * s[part]["share"], colour) for part, colour in PARTS])
        for s in found
    ]
    data: list[list[Cell]] = [
        [s["a"], s["b"], s["judge"], s["task"], s["pairs"]]
        + [s[part][key] for part, _ in PARTS for key in ("share", "low", "high")]
        for s in found
    ]
    names = [f"{part} {key}" for part, _ in PARTS for key in ("share", "low", "high")]
    return figure(
        "Win, tie and loss",
        stacked_bars(rows, x_label="% of pairs"),
        file="win tie loss",
        key=legend(PARTS),
        header=["a", "b", "judge", "task", "pairs", *names],
        rows=data,
    )


def _shares(found: Sequence[dict[str, Any]]) -> str:
    rows = []
    for s in found:
        cells = [
            f"{percent(s[part]['share'])} <small>[{percent(s[part]['low'])}, "
            f"{percent(s[part]['high'])}]</small>"
            for part, _ in PARTS
        ]
        turned = s.get("orders_disagreed")
        share = percent(turned / s["pairs"]) if isinstance(turned, int) else num(None)
        rows.append([text(_label(s)), str(s["pairs"]), *cells, share])
    return table(["Comparison", "Pairs", "Win", "Tie", "Loss", "Orders disagreed"], rows)


def _dimensions(found: Sequence[dict[str, Any]]) -> str:
    rows: list[list[str]] = []
    data: list[list[Cell]] = []
    for s in found:
        for name, sides in s["dimensions"].items():
            a, b = (number(sides[side]["mean"]) for side in ("a", "b"))
            d = [number(sides["difference"][key]) for key in ("mean", "low", "high")]
            bounds = f"<small>[{signed(d[1])}, {signed(d[2])}]</small>"
            shown = [num(a), num(b), f"{signed(d[0])} {bounds}"]
            rows.append([text(_label(s)), text(name.replace("_", " ")), *shown])
            data.append([_label(s), name, a, b, *d])
    if not rows:
        return ""
    header = ["comparison", "dimension", "first", "second", "difference", "low", "high"]
    link = csv_link("dimensions", header, data)
    return "<h3>By dimension</h3>" + table(
        ["Comparison", "Dimension", "First", "Second", "Difference"], rows, csv=link, words=2
    )


def _agreement(runs: Sequence[Run]) -> str:
    from marlhf.evaluate.agreement import compare, read_votes  # numpy, only where there are votes

    folders = [run.path / FOLDER for run in runs if any((run.path / FOLDER).glob("*.jsonl"))]
    try:
        found = compare(read_votes(folders))
    except JudgeError:  # one judge, no shared pair, or a damaged file: nothing to show
        return ""
    rows = []
    data: list[list[Cell]] = []
    for b in found.between:
        share, kappa = b.agreement, b.kappa
        agreed = f"{percent(share.mean)} <small>[{percent(share.low)}, {percent(share.high)}]"
        beyond = f"{num(kappa.mean)} <small>[{num(kappa.low)}, {num(kappa.high)}]</small>"
        rows.append([text(b.one), text(b.other), str(b.pairs), f"{agreed}</small>", beyond])
        data.append([b.one, b.other, b.pairs, *share[:3], *kappa[:3]])
    numbers = ["agreement", "low", "high", "kappa", "kappa low", "kappa high"]
    link = csv_link("agreement", ["judge", "other judge", "pairs", *numbers], data)
    fleiss = found.fleiss
    all_of_them = (
        f'<p class="lead">Fleiss\' kappa of all {len(found.judges)} on {found.common} pairs: '
        f"{num(fleiss.mean)} [{num(fleiss.low)}, {num(fleiss.high)}].</p>"
        if fleiss is not None
        else ""
    )
    return (
        "<h3>How far the judges agree</h3>"
        + table(
            ["Judge", "Other judge", "Pairs", "Agreement", "Cohen's kappa"],
            rows,
            csv=link,
            words=2,
        )
        + all_of_them
    )
