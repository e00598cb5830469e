"""The first screen: the answer, one table, what they do and do not show; and the settings."""

from __future__ import annotations

import math

import yaml
from markupsafe import Markup

from marlhf.intervals import Interval
from marlhf.report.dots import Dot, dots_figure
from marlhf.report.findings import answer, reward_health, shows, shows_not, verdict
from marlhf.report.groups import START_COLOUR, Group, describe_methods, differences
from marlhf.report.measures import TITLES, final_score, start_score
from marlhf.report.numbers import duration, num, percent
from marlhf.report.page import code, grid, part, section
from marlhf.report.sections.curves import name_cell, stage_table
from marlhf.report.tables import Below, Chip, Column, csv_link, table
from marlhf.runs.read import Run

MAX_ITEMS = 9
HEADLINE = TITLES | {"length": "Length"}
MEASURES = (
    Column("Gold", "eval/gold"),
    Column("KL", "eval/kl"),
    Column("Length", "eval/length"),
    Column("Repetition", "eval/repetition", percent),
    Column("Win rate against SFT", "eval/win_rate", percent),
)


def summary(policies: list[Group], others: list[Group], runs: list[Run]) -> Markup:
    """The verdict, the table of numbers, and what they do and do not show."""
    says = {"What this shows": shows(policies), "What it does not": shows_not(policies, runs)}
    # Warnings first; what is beyond a screen waits behind a click.
    for items in says.values():
        items.sort(key=lambda item: 'class="warn"' not in item)
    headline = _headline(policies)
    above = part("verdict", answer(policies), verdict(policies, others), reward_health(others))
    return above + section(
        "summary",
        grid(headline, "four" if len(headline) > 3 else "three"),
        _policy_table(policies) if policies else stage_table(others),
        part("says", lists=says, shown=MAX_ITEMS),
        several=[len(group.runs) > 1 for group in policies],
    )


def _headline(policies: list[Group]) -> list[Markup]:
    """Score, gold, KL and length of every setting on one screen, the model before RL first."""
    figures: list[Markup] = []
    is_gold_known = any(group.finals("eval/gold") for group in policies)  # four in a row are small
    width = 290 if is_gold_known else 340
    for field, title in HEADLINE.items():
        before = [start_score(group, field) for group in policies]
        known = [each for each in before if math.isfinite(each.mean)]
        starts = [Dot("before RL", known[0], START_COLOUR)] if known else []
        ends = [
            Dot(group.label, value, group.colour, group.finals(f"eval/{field}"))
            for group in policies
            if math.isfinite((value := final_score(group, field)).mean)
        ]
        if ends:
            figures.append(dots_figure(title, starts + ends, x_label=title, width=width))
    return figures


def _policy_table(policies: list[Group]) -> Markup:
    measures = [m for m in MEASURES if any(group.finals(m.name) for group in policies)]
    columns = [Column("Run", "run"), Column("", "method"), Column("Score", "score", is_bold=True)]
    columns += [*measures, Column("Steps", "step"), Column("Time", "seconds", duration)]
    rows: list[list[object]] = []
    if start := next((g for g in policies if math.isfinite(start_score(g).mean)), None):
        at_start = [[p.mean for p in start.curve(m.name) if p.step == 0] for m in measures]
        values = [points[0] if points else None for points in at_start]
        name = Below(Chip("before RL", START_COLOUR), ["the SFT model"])
        rows.append([name, "", start_score(start), *values, Markup(), Markup()])
    for group, method in zip(policies, describe_methods(policies)):
        score, finals = final_score(group), group.finals("eval/score")
        below: list[str] = []
        if not math.isfinite(score.mean):
            score = Interval(group.final("rl/score"), math.nan, math.nan, 0)
            below = ["training batch"] if math.isfinite(score.mean) else []
        elif len(finals) > 1:
            below = [f"seeds {num(min(finals))} to {num(max(finals))}"]
        values = [group.final(m.name) for m in measures]
        ends = [group.last_step, group.seconds]
        rows.append([name_cell(group, method), method, Below(score, below), *values, *ends])
    return table(columns, rows, file="summary")


MAX_CONFIG_CHARS = 20_000
MAX_CONFIGS = 40
MAX_CHARS = 80


def settings(groups: list[Group]) -> Markup:
    """The settings in which runs of one stage differ, seeds and output folders aside."""
    tables: list[Markup] = []
    for stage in dict.fromkeys(group.stage for group in groups):
        alike = [group for group in groups if group.stage == stage]
        rows = [[key, *values] for key, values in differences(alike)]
        if rows:
            chips = [part("chip", label=group.label, colour=group.colour) for group in alike]
            columns = [Column("Setting", form=code), *(Column(each, form=_short) for each in chips)]
            names = ["setting", *(group.label for group in alike)]
            link = csv_link(f"settings {stage}", names, rows)
            tables.append(table(columns, rows, csv=link, words=len(columns)))
    # Everything that was set for a run, as a recipe would have it; of several seeds, the first.
    configs = [
        (group.label, yaml.safe_dump(group.config, sort_keys=False, allow_unicode=True))
        for group in groups[:MAX_CONFIGS]
        if group.config
    ]
    return section(
        "settings",
        *tables,
        *(part("config", label=label, text=text[:MAX_CONFIG_CHARS]) for label, text in configs),
        differ=bool(tables),
    )


def _short(value: str) -> str:
    return value if len(value) <= MAX_CHARS else value[: MAX_CHARS - 1] + "\u2026"
