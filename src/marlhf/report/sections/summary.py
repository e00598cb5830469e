"""The first screen: the answer, one table, and what they do and do not show."""

from __future__ import annotations

import math

from marlhf.intervals import Interval, mean
from marlhf.report.answer import answer
from marlhf.report.dots import Dot, dot_rows
from marlhf.report.findings import shows, shows_not, verdict
from marlhf.report.groups import START_COLOUR, Group, describe_segmenter
from marlhf.report.measures import final_score, start_score
from marlhf.report.page import (
    Cell,
    chip,
    csv_link,
    duration,
    figure,
    grid,
    interval_cell,
    num,
    percent,
    section,
    table,
)
from marlhf.report.sections.stages import name_cell, stage_table
from marlhf.runs.read import Run

MAX_ITEMS = 9


def summary(policies: list[Group], others: list[Group], runs: list[Run]) -> str:
    """The verdict, the table of numbers, and what they do and do not show."""
    sentence = verdict(policies, others)
    says = [("What this shows", shows(policies)), ("What it does not", shows_not(policies, runs))]
    columns = [f"<div><h3>{title}</h3>{_list(items)}</div>" for title, items in says if items]
    lead = (
        f"Each row is one setting after its last evaluation on held-out prompts; bars and brackets "
        f"are 95% intervals over {_over(policies)}, small dots are seeds. Read score only "
        f"together with KL (nats per response, from the model it started from) and length (tokens)."
    )
    headline = _headline(policies)
    first_lines = answer(policies)
    if sentence:
        first_lines += f'<p class="{"note" if first_lines else ""}">{sentence}</p>'
    above = f'<div class="verdict">{first_lines}</div>' if first_lines else ""
    return above + section(
        "summary",
        "Summary",
        lead if policies else "Each row is one training with its last numbers.",
        grid(headline, "four" if len(headline) > 3 else "three"),
        _policy_table(policies),
        "" if policies else stage_table(others),
        f'<div class="says">{"".join(columns)}</div>' if columns else "",
    )


def _list(items: list[str]) -> str:
    """Warnings first; what is beyond a screen waits behind a click."""
    ordered = sorted(items, key=lambda item: 'class="warn"' not in item)
    shown, rest = (
        "".join(f"<li>{item}</li>" for item in part)
        for part in (ordered[:MAX_ITEMS], ordered[MAX_ITEMS:])
    )
    count = len(ordered) - MAX_ITEMS
    more = f"<details><summary>{count} more</summary><ul>{rest}</ul></details>" if rest else ""
    return f"<ul>{shown}</ul>{more}"


def _over(policies: list[Group]) -> str:
    several = [len(group.runs) > 1 for group in policies]
    if all(several):
        return "seeds and prompts"
    return "prompts" + (", and over seeds where there are several" if any(several) else "")


def _headline(policies: list[Group]) -> list[str]:
    """Score, gold, KL and length of every setting on one screen, the model before RL first."""
    figures: list[str] = []
    is_gold_known = any(group.finals("eval/gold") for group in policies)  # four in a row are small
    for title, field in (
        ("Score", "score"),
        ("Gold score", "gold"),
        ("KL (nats per response)", "kl"),
        ("Length", "length"),
    ):
        dots: list[Dot] = []
        before = [start_score(group, field) for group in policies]
        if known := [each for each in before if math.isfinite(each.mean)]:
            dots.append(Dot("before RL", known[0], START_COLOUR))
        for group in policies:
            value, seeds = final_score(group, field), group.finals(f"eval/{field}")
            if math.isfinite(value.mean):
                dots.append(Dot(group.label, value, group.colour, seeds))
        if not any(dot.label != "before RL" for dot in dots):
            continue
        rows: list[list[Cell]] = [[dot.label, *dot.value[:3], len(dot.seeds)] for dot in dots]
        figures.append(
            figure(
                title,
                dot_rows(dots, x_label=title, width=290 if is_gold_known else 340),
                file=f"final {field}",
                header=["run", f"eval/{field}", "low", "high", "seeds"],
                rows=rows,
            )
        )
    return figures


def _policy_table(policies: list[Group]) -> str:
    if not policies:
        return ""
    measures = [
        ("Gold", "eval/gold", num),
        ("KL", "eval/kl", num),
        ("Length", "eval/length", num),
        ("Repetition", "eval/repetition", percent),
        ("Win rate against SFT", "eval/win_rate", percent),
    ]
    measures = [m for m in measures if any(group.finals(m[1]) for group in policies)]
    header = ["Run", "Score", *(m[0] for m in measures), "Steps", "Time"]
    rows: list[list[str]] = []
    data: list[list[str | float | None]] = []
    start = _start_row(policies, [m[1] for m in measures])
    if start is not None:
        score, values = start
        shown = [form(value) for value, (_, _, form) in zip(values, measures)]
        name = chip("before RL", START_COLOUR) + "<small>the SFT model</small>"
        rows.append([name, _score_cell(score, []), *shown, "", ""])
        data.append(["before RL", "", *score[:3], *values, 0, None])
    for group in policies:
        score = final_score(group)
        note = ""
        if not math.isfinite(score.mean):
            score = Interval(group.final("rl/score"), math.nan, math.nan, 0)
            note = "training batch" if math.isfinite(score.mean) else ""
        seconds = mean([run.seconds for run in group.runs if run.seconds is not None])
        values = [group.final(key) for _, key, _ in measures]
        shown = [form(value) for value, (_, _, form) in zip(values, measures)]
        steps = max((run.last_step or 0 for run in group.runs), default=0)
        kind = describe_segmenter(group.config)
        kind = kind if group.stage == "ppo" else f"{group.stage}: {kind}"
        cell = _score_cell(score, group.finals("eval/score"), note)
        name = name_cell(group, kind)
        rows.append([name, cell, *shown, str(steps), duration(seconds)])
        data.append([group.label, kind, *score[:3], *values, steps, seconds])
    names = ["run", "segmenter", "score", "low", "high", *(m[1] for m in measures), "step"]
    return table(header, rows, csv=csv_link("summary", [*names, "seconds"], data))


def _start_row(policies: list[Group], keys: list[str]) -> tuple[Interval, list[float]] | None:
    for group in policies:
        score = start_score(group)
        if math.isfinite(score.mean):
            values: list[float] = []
            for key in keys:
                at_start = [point.mean for point in group.curve(key) if point.step == 0]
                values.append(at_start[0] if at_start else math.nan)
            return score, values
    return None


def _score_cell(score: Interval, finals: list[float], note: str = "") -> str:
    shown = interval_cell(score, bold=True)
    if len(finals) > 1:
        shown += f"<small>seeds {num(min(finals))} to {num(max(finals))}</small>"
    return shown + (f"<small>{note}</small>" if note else "")
