"""Credit: which rule's gradient agrees with the true one, what `credit: auto` chose, and where
credit falls in a response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlhf.intervals import Interval
from marlhf.report.charts import Series, legend_of, line_chart
from marlhf.report.curves import curve_figure
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group, labelled
from marlhf.report.page import Cell, figure, grid, num, section, table, text
from marlhf.runs.layout import CREDIT
from marlhf.runs.read import Run, number

SHOWN = 3
"""Responses of `marlhf credit --where` that the page shows."""
MAX_LINES = 8


def credit(groups: Sequence[Group]) -> str:
    """What `marlhf credit` and `credit: auto` measured."""
    measured = [
        part
        for label, group, folder in labelled(groups)
        if (summary := _read(folder))
        for part in _measured(label, group, summary)
    ]
    chosen = [_choices(label, run) for label, run in _automatic(groups)]
    reaches = curve_figure("Tokens that credit reaches back", groups, ("credit/reach",))
    return section(
        "credit",
        "Credit",
        "The cosine between the gradient of one batch and the true gradient, by each way to assign "
        "credit. It counts bias and noise together: twice the cosine needs a quarter of the "
        "samples. Bars are two standard errors.",
        *measured,
        grid([*chosen, reaches], "two"),
    )


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads((folder / CREDIT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and isinstance(summary.get("rows"), list) else None


def _measured(label: str, group: Group, summary: dict[str, Any]) -> list[str]:
    """The dots of one `marlhf credit`, and what `--where` saw."""
    dots: list[Dot] = []
    rows: list[list[Cell]] = []
    away = ""
    for row in summary["rows"]:
        if not isinstance(row, dict):  # edited by hand
            continue
        mean, error = number(row.get("cosine")), 2 * number(row.get("error"))
        if mean != mean:
            continue
        name = str(row.get("name")) + (" (this run)" if row.get("own") else "")
        colour = group.colour if row.get("own") else "var(--soft)"
        if row.get("own") and mean <= 0:
            away = ", whose gradient does not point along the true one"
        dots.append(Dot(name, Interval(mean, mean - error, mean + error, 1), colour))
        rows.append([name, mean, error / 2, number(row.get("consistency")), row.get("samples")])
    if not dots:
        return []
    best, own = str(summary.get("best")), str(summary.get("own"))
    advice = (
        f"Nothing is measurably ahead of {text(own)}{away}."
        if best == own
        else f"{text(best)} is ahead of {text(own)}{away}: "
        f"<code>{text(summary.get('recipe'))}</code>."
    )
    shown = figure(
        f"{label}, step {summary.get('step')}",
        dot_rows(dots, x_label="cosine with the true gradient", width=520),
        file=f"credit {label}",
        note=f"{summary.get('batches')} batches, {summary.get('responses')} responses. {advice}",
        header=["credit by", "cosine", "error", "consistency", "samples needed"],
        rows=rows,
    )
    where = summary.get("where")
    return [grid([shown, *(_where(where) if isinstance(where, dict) else [])], "two")]


def _where(where: dict[str, Any]) -> list[str]:
    parts = [r for r in where.get("critic_error") or () if isinstance(r, dict)]
    critic = table(
        ["of the response", "critic's error", "bias", "spread of values"],
        [
            [text(r.get("part")), *(num(number(r.get(k))) for k in ("error", "bias", "spread"))]
            for r in parts
        ],
    )
    has_wrong = "wrong" in where
    rules = [r for r in where.get("rules") or () if isinstance(r, dict)]
    header = ["credit by", "correlation"] + (["first wrong line"] if has_wrong else [])
    rows = [
        [text(r.get("name")), num(number(r.get("correlation")))]
        + ([num(number(r.get("first_wrong")))] if has_wrong else [])
        for r in rules
    ]
    lead = (
        f"<p>Against the true credit, from {text(where.get('continuations'))} continuations of "
        f"every macro action of {text(where.get('responses'))} responses.</p>"
    )
    samples = [_sample(s) for s in (where.get("samples") or ())[:SHOWN] if isinstance(s, dict)]
    return [f"<div>{lead}{critic}{table(header, rows)}</div>", *samples]


def _sample(sample: dict[str, Any]) -> str:
    """A response with the true and the estimated credit of each macro action."""
    pieces = [p for p in sample.get("pieces") or () if isinstance(p, dict)]
    rows = [
        [
            f"<code>{text(piece.get('text'))}</code>",
            *(num(number(piece.get(key))) for key in ("true", "estimated", "value", "critic")),
        ]
        for piece in pieces
    ]
    header = ["macro action", "true credit", "estimated", "true value", "critic"]
    title = f"<p><b>Score {num(number(sample.get('score')))}</b> {text(sample.get('prompt'))}</p>"
    return f"<div>{title}{table(header, rows)}</div>"


def _automatic(groups: Sequence[Group]) -> list[tuple[str, Run]]:
    runs = {run.path: run for group in groups for run in group.runs}
    return [
        (label, runs[folder])
        for label, _, folder in labelled(groups)
        if runs[folder].config.get("credit") == "auto"
    ]


def _choices(label: str, run: Run) -> str:
    """The cosine of every candidate over the steps, and of the one that was in use."""
    prefix = "credit/cosine/"
    names = sorted({key for row in run.train for key in row if key.startswith(prefix)})
    if not names:
        return ""
    curves = {name: [(s, v) for s, _, v in run.curve(name)] for name in names}
    by_end = sorted(curves, key=lambda name: -curves[name][-1][1])[:MAX_LINES]
    lines = [
        Series(name.removeprefix(prefix).replace("_", " "), curves[name], f"var(--l{i})")
        for i, name in enumerate(by_end)
    ]
    used = [(step, value) for step, _, value in run.curve("credit/cosine")]
    lines.append(Series("in use", used, "var(--ink)", dash="2 3"))
    rows: list[list[Cell]] = [[s.label, x, y] for s in lines for x, y in s.points]
    return figure(
        f"{label}: cosine of each candidate",
        line_chart(lines, x_label="step", y_label="cosine"),
        key=legend_of(lines),
        file=f"credit candidates {label}",
        header=["credit by", "step", "cosine"],
        rows=rows,
    )
