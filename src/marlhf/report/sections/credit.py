"""Credit: which rule's gradient agrees with the true one, what `credit: auto` chose, and where
credit falls in a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from marlhf.intervals import Interval
from marlhf.report.charts import Series, legend_of, line_chart
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.groups import Group, labelled
from marlhf.report.numbers import num
from marlhf.report.page import bold, code, grid, part, section
from marlhf.report.sections.curves import curve_figure
from marlhf.report.tables import Cell, Column, figure, table
from marlhf.runs.layout import CREDIT, HEADROOM, read_object
from marlhf.runs.read import Row, Run, number

SHOWN = 3
"""Responses of `marlhf credit --where` that the page shows."""
MAX_LINES = 8


def credit(groups: Sequence[Group]) -> Markup:
    """What `marlhf credit` and `credit: auto` measured."""
    runs = labelled(groups)
    measured = [
        _measured(label, group, read_object(run.path / CREDIT)) for label, group, run in runs
    ]
    measured += [_headroom(label, read_object(run.path / HEADROOM)) for label, _, run in runs]
    automatic = [_choices(label, run) for label, _, run in runs]
    earned = [_earned(label, run) for label, _, run in runs]
    reaches = curve_figure("Tokens that credit reaches back", groups, ("credit/reach",))
    shown = grid([*automatic, *earned, reaches], "two")
    return section("credit", *measured, shown, measured=any([*measured, *automatic]))


def _earned(label: str, run: Run) -> Markup:
    """Where in held-out responses rewards with places were earned, over the training."""
    rows = [evaluation for evaluation in run.evaluations if evaluation.earned]
    if not rows:
        return Markup()
    chosen = dict.fromkeys((0, len(rows) // 2, len(rows) - 1))  # the first, the middle, the last
    lines = [
        Series(
            f"step {rows[i].step}",
            [(10.0 * n + 5, x) for n, x in enumerate(rows[i].earned or ())],
            f"var(--l{number})",
        )
        for number, i in enumerate(chosen)
    ]
    return figure(
        f"{label}: reward earned in each tenth of a response",
        line_chart(lines, x_label="percent of the response", y_label="reward"),
        key=legend_of(lines),
        file=f"reward earned {label}",
        header=["step", "percent", "reward"],
        rows=[[row.step, 10 * n + 5, x] for row in rows for n, x in enumerate(row.earned or ())],
    )


def _objects(value: object) -> list[Row]:
    """The objects of a list; anything else in a hand-edited file is left out."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _measured(label: str, group: Group, summary: Row) -> Markup:
    """The results of one `marlhf credit`, with those of `--where`."""
    dots: list[Dot] = []
    rows: list[list[Cell]] = []
    away = False  # whether the run's own gradient does not point along the true one
    for row in _objects(summary.get("rows")):
        mean, error = number(row.get("cosine")), 2 * number(row.get("error"))
        if mean != mean:
            continue
        name = str(row.get("name")) + (" (this run)" if row.get("own") else "")
        colour = group.colour if row.get("own") else "var(--soft)"
        away = away or (bool(row.get("own")) and mean <= 0)
        dots.append(Dot(name, Interval(mean, mean - error, mean + error, 1), colour))
        rows.append([name, mean, error / 2, number(row.get("consistency")), row.get("samples")])
    if not dots:
        return Markup()
    shown = figure(
        f"{label}, step {summary.get('step')}",
        dot_rows(dots, x_label="cosine with the true gradient", width=520),
        file=f"credit {label}",
        note=part("best_credit", summary, away),
        header=["credit by", "cosine", "error", "consistency", "samples needed"],
        rows=rows,
    )
    where = summary.get("where")
    return grid([shown, *(_where(where) if isinstance(where, dict) else [])], "two")


def _headroom(label: str, summary: Row) -> Markup:
    """What exact values would win at each reach, and what the run's critic wins of it."""
    if not isinstance(summary.get("rows"), list):
        return Markup()
    lead = bold(f"{label}, step {summary.get('step')}. ") + f"{summary.get('verdict')}"
    columns = {
        "exact values at lambda": "reach",
        "cosine": "cosine",
        "error": "error",
        "RLOO needs, times": "headroom",
        "from": "low",
        "to": "high",
        "with sampled values": "sampled",
        "by this run's critic": "critic",
    }
    return part("titled", lead=lead, tables=[_table(columns, summary["rows"])])


def _where(where: Row) -> list[Markup]:
    """The critic's error and each rule's credit against the true one; some responses."""
    lead = (
        f"Against the true credit, from {where.get('continuations')} continuations of "
        f"every macro action of {where.get('responses')} responses."
    )
    critic = {"of the response": "part", "critic's error": "error", "bias": "bias"}
    critic["spread of values"] = "spread"
    rules = {"credit by": "name", "correlation": "correlation"}
    if "wrong" in where:
        rules["first wrong line"] = "first_wrong"
    tables = [_table(critic, where.get("critic_error")), _table(rules, where.get("rules"))]
    pieces = {"macro action": "text", "true credit": "true", "estimated": "estimated"}
    pieces |= {"true value": "value", "critic": "critic"}
    shown = [part("titled", lead=lead, tables=tables)]
    for sample in _objects(where.get("samples"))[:SHOWN]:
        score = bold(f"Score {num(number(sample.get('score')))}")
        title = score + f" {sample.get('prompt')}"
        tables = [_table(pieces, sample.get("pieces"), form=code)]
        shown.append(part("titled", lead=title, tables=tables))
    return shown


def _table(columns: dict[str, str], rows: object, form: Any = str) -> Markup:
    """A table of a file's objects: titles and keys, words first and then numbers."""
    first, *rest = columns.values()
    cells = [[str(r.get(first)), *(number(r.get(key)) for key in rest)] for r in _objects(rows)]
    titles = list(columns)
    return table([Column(titles[0], form=form), *map(Column, titles[1:])], cells)


def _choices(label: str, run: Run) -> Markup:
    """The cosine of every candidate over the steps, and of the one that was in use."""
    prefix = "credit/cosine/"
    names = sorted({key for row in run.train for key in row if key.startswith(prefix)})
    if not names or run.config.get("credit") != "auto":
        return Markup()
    curves = {name: [(s, v) for s, _, v in run.curve(name)] for name in names}
    by_end = sorted(filter(curves.get, curves), key=lambda name: -curves[name][-1][1])[:MAX_LINES]
    lines = [
        Series(name.removeprefix(prefix).replace("_", " "), curves[name], f"var(--l{i})")
        for i, name in enumerate(by_end)
    ]
    used = [(step, value) for step, _, value in run.curve("credit/cosine")]
    lines.append(Series("in use", used, "var(--ink)", dash="2 3"))
    return figure(
        f"{label}: cosine of each candidate",
        line_chart(lines, x_label="step", y_label="cosine"),
        key=legend_of(lines),
        file=f"credit candidates {label}",
        header=["credit by", "step", "cosine"],
        rows=[[s.label, x, y] for s in lines for x, y in s.points],
    )
