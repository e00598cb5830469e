"""The SFT, reward and DPO models behind the policies."""

from __future__ import annotations

from marlhf.intervals import mean
from marlhf.report.curves import curve_figure
from marlhf.report.groups import Group
from marlhf.report.page import chip, duration, grid, num, percent, section, table, text
from marlhf.runs.stage_facts import facts_of


def stages(groups: list[Group], *, with_table: bool) -> str:
    """The SFT and reward models that the policies started from, and DPO, which has no score."""
    sft = [group for group in groups if group.stage == "sft"]
    reward = [group for group in groups if group.stage == "reward"]
    dpo = [group for group in groups if group.stage == "dpo"]
    figures = [
        curve_figure("SFT loss", sft, ("sft/loss",)),
        curve_figure("SFT held-out loss", sft, ("eval/loss",)),
        curve_figure("SFT learning rate", sft, ("sft/learning_rate",)),
        curve_figure("Reward-model loss", reward, ("reward/loss",)),
        curve_figure("Reward-model accuracy", reward, ("reward/accuracy",)),
        curve_figure("Reward-model held-out accuracy", reward, ("eval/accuracy",)),
        curve_figure("Reward-model margin", reward, ("reward/margin",)),
        curve_figure("DPO loss", dpo, ("dpo/loss",)),
        curve_figure("DPO held-out accuracy", dpo, ("eval/accuracy",)),
        curve_figure("DPO held-out margin", dpo, ("eval/margin",)),
    ]
    return section(
        "stages",
        "SFT, reward and DPO models",
        "A policy is only as good as its reward model: held-out accuracy is the share of "
        "unseen pairs whose preferred response it scores higher (50% is chance).",
        stage_table(groups) if with_table else "",
        grid(figures),
        folded=with_table,
    )


def stage_table(groups: list[Group]) -> str:
    """The last numbers of each training of them."""
    measures = [
        ("Loss", ("sft/loss", "reward/loss", "dpo/loss"), num),
        ("Held-out loss", ("eval/loss",), num),
        ("Held-out accuracy", ("eval/accuracy",), percent),
    ]
    measures = [m for m in measures if any(g.finals(key) for g in groups for key in m[1])]
    header = ["Run", "Stage", "Steps", *(m[0] for m in measures), "Time"]
    rows: list[list[str]] = []
    for group in groups:
        shown: list[str] = []
        for _, keys, form in measures:
            values = [value for key in keys for value in group.finals(key)]
            shown.append(form(mean(values)))
        seconds = mean([run.seconds for run in group.runs if run.seconds is not None])
        steps = max((run.last_step or 0 for run in group.runs), default=0)
        stage = text(facts_of(group.stage).label)
        rows.append([name_cell(group), stage, str(steps), *shown, duration(seconds)])
    return table(header, rows, words=2) if rows else ""


def name_cell(group: Group, kind: str = "") -> str:
    words = sorted({run.status for run in group.runs} - {"unknown"})
    if group.num_seeds > 1:
        words.insert(0, f"{group.num_seeds} seeds")
    elif len(group.runs) > 1:
        words.insert(0, f"{len(group.runs)} runs")
    below = "".join(f"<small>{text(line)}</small>" for line in (kind, ", ".join(words)) if line)
    return chip(group.label, group.colour) + below
