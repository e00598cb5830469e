"""The figures of the report, section by section; a section without data is an empty string."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from marlhf.evaluate.charts import (
    HEIGHT,
    LARGE,
    SMALL,
    WIDTH,
    Series,
    distribution,
    histogram,
    legend,
    line_chart,
    scatter,
    stacked_bars,
)
from marlhf.evaluate.findings import final_score, first_reaching
from marlhf.evaluate.groups import START_COLOUR, Group, Point, differences, same_prompts
from marlhf.evaluate.page import (
    chip,
    csv_link,
    duration,
    figure,
    grid,
    num,
    percent,
    section,
    table,
    text,
)
from marlhf.evaluate.runs import number
from marlhf.evaluate.stats import interval, share_improved, thin
from marlhf.evaluate.summary import stage_table

MAX_POINTS = 400
POINTS_A_CHART = 3000
"""Shared by the lines of a chart, so that forty runs still make a page one can mail."""
MAX_ROWS = 1000
MAX_SHIFTS = 12

SHARES = {
    "ppo/clip_fraction",
    "ppo/ended",
    "eval/ended",
    "eval/repetition",
    "eval/win_rate",
    "eval/accuracy",
    "reward/accuracy",
}

PHASES = (("rollout", "var(--t0)"), ("score", "var(--t1)"), ("update", "var(--t2)"))
"""Greys, as colours are for runs."""


def curve_figure(
    title: str,
    groups: Sequence[Group],
    keys: Sequence[str],
    *,
    x: str = "step",
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> str:
    """Lines of the first of `keys` that anyone recorded; held-out and training never mix."""
    for key in keys:
        curves = [(group, _drawable(group.curve(key), x)) for group in groups]
        curves = [(group, points) for group, points in curves if points]
        if curves:
            break
    else:
        return ""
    limit = max(40, min(MAX_POINTS, POINTS_A_CHART // len(curves)))
    lines: list[Series] = []
    rows: list[list[str | float | None]] = []
    for group, points in curves:
        points = thin(points, limit)
        band = [(getattr(p, x), p.low, p.high) for p in points] if len(group.runs) > 1 else ()
        line = [(getattr(p, x), p.mean) for p in points]
        lines.append(Series(group.label, line, group.colour, band, group.dash))
        rows += [[group.label, *point] for point in points]
    return figure(
        title,
        line_chart(lines, x_label=x, y_label=title, size=size, is_share=key in SHARES),
        file=f"{title} by {x}",
        key=legend([(group.label, group.colour) for group, _ in curves]),
        header=["run", "step", "seconds", key, "lowest seed", "highest seed"],
        rows=rows,
    )


def _drawable(points: list[Point], x: str) -> list[Point]:
    return [point for point in points if math.isfinite(getattr(point, x))]


def learning(policies: list[Group]) -> str:
    """Score beside gold, KL and length, over steps and over seconds: never score alone."""
    measures = [
        ("Score", ("eval/score", "ppo/score")),
        ("Gold score", ("eval/gold",)),
        ("KL (nats a response)", ("eval/kl", "ppo/kl")),
        ("Length (tokens)", ("eval/length", "ppo/length")),
    ]
    by_step, by_time = (
        [curve_figure(title, policies, keys, x=x, size=SMALL) for title, keys in measures]
        for x in ("step", "seconds")
    )
    held_out = any(group.curve("eval/score") for group in policies)
    source = "held-out prompts" if held_out else "training batches, as no evaluation was recorded"
    return section(
        "learning",
        "Learning",
        f"Higher score at the same KL and length is better; a score that rises only with KL or "
        f"length was bought with them. On {source}; bands span the seeds.",
        "<h3>Over steps</h3>" if any(by_step) else "",
        grid(by_step, "four"),
        "<h3>Over seconds</h3>" if any(by_time) else "",
        grid(by_time, "four"),
    )


def frontier(policies: list[Group]) -> str:
    """Score against KL, and how soon each run reached the first one's final score."""
    figures = [
        _frontier_figure(policies, "Score against KL", "eval/score"),
        _frontier_figure(policies, "Gold score against KL", "eval/gold"),
    ]
    return section(
        "frontier",
        "Reward against KL",
        "Each dot is an evaluation, joined in order of training. The line that lies higher at the "
        "same KL gets more reward for the same distance from the model it began with.",
        grid(figures, "two"),
        _speed_table(policies),
    )


def _frontier_figure(policies: list[Group], title: str, key: str) -> str:
    lines: list[Series] = []
    rows: list[list[str | float | None]] = []
    for group in policies:
        kls = {point.step: point.mean for point in group.curve("eval/kl")}
        points = [(p.step, kls[p.step], p.mean) for p in group.curve(key) if p.step in kls]
        points = thin(points, MAX_POINTS)
        if points:
            notes = [f"step {step}: {value:.3g} at KL {kl:.3g}" for step, kl, value in points]
            line = [(kl, value) for _, kl, value in points]
            lines.append(Series(group.label, line, group.colour, (), group.dash, notes))
            rows += [[group.label, *point] for point in points]
    if not lines:
        return ""
    return figure(
        title,
        line_chart(lines, x_label="KL (nats a response)", y_label=title, size=LARGE),
        file=title,
        key=legend([(line.label, line.colour) for line in lines]),
        header=["run", "step", "eval/kl", key],
        rows=rows,
    )


def _speed_table(policies: list[Group]) -> str:
    """Steps and seconds to the first run's final score: what "faster" means here."""
    if len(policies) < 2:
        return ""
    base = policies[0]
    target = final_score(base).mean
    if not math.isfinite(target):
        return ""
    has_gold = any(group.curve("eval/gold") for group in policies)
    rows: list[list[str]] = []
    data: list[list[str | float | None]] = []
    for group in policies:
        found = [first_reaching(run, target) for run in group.runs]
        reached = [each for each in found if each is not None]
        steps = [float(each.step) for each in reached]
        seconds = [each.seconds for each in reached]
        kl = interval([each.kl for each in reached]).mean
        gold = interval([each.gold for each in reached]).mean
        cells = [_ranged(steps, "{:.0f}".format), _ranged(seconds, duration), num(kl)]
        cells += [num(gold)] if has_gold else []
        count = f"{len(reached)} of {len(found)}"
        rows.append([chip(group.label, group.colour), count, *cells])
        mean_steps, mean_seconds = interval(steps).mean, interval(seconds).mean
        data.append([group.label, len(reached), len(found), mean_steps, mean_seconds, kl, gold])
    header = ["Run", "Seeds that reached it", "Steps", "Time", "KL there"]
    header += ["Gold there"] if has_gold else []
    names = ["run", "seeds that reached it", "seeds", "steps", "seconds", "kl", "gold"]
    return (
        f"<h3>How soon each reached {num(target)}, the final score of {text(base.label)}</h3>"
        f'<p class="lead">The first evaluation at or above that score, averaged over the seeds '
        f"that got there; times are read only as finely as evaluations were made.</p>"
        + table(header, rows, csv=csv_link("time to score", names, data))
    )


def _ranged(values: list[float], form: Callable[[float], str]) -> str:
    middle = interval(values).mean
    if not math.isfinite(middle):
        return num(None)
    wide = len(values) > 1 and min(values) != max(values)
    seeds = f"<small>{form(min(values))} to {form(max(values))}</small>" if wide else ""
    return form(middle) + seeds


def distributions(policies: list[Group]) -> str:
    """Where the mean came from: all prompts a little, or some a lot."""
    figures = [
        _distribution_figure(policies, "Score", "scores"),
        _distribution_figure(policies, "Gold score", "gold"),
        _distribution_figure(policies, "Length (tokens)", "length"),
    ]
    shifts = _shifts(policies)
    return section(
        "distributions",
        "Prompt by prompt",
        "The histograms show how the held-out prompts spread, dashed lines their means. Below, "
        "each dot is a prompt: above the diagonal it scores higher after than before.",
        grid(figures),
        "<h3>Shift of each prompt</h3>" if shifts else "",
        grid(shifts),
    )


def _distribution_figure(policies: list[Group], title: str, field: str) -> str:
    entries: list[tuple[str, list[float], str]] = []
    for group in policies:
        before = group.per_prompt(field, first=True)
        if before:
            entries.append(("before RL", before, START_COLOUR))
            break
    for group in policies[:8]:
        values = group.per_prompt(field)
        if values:
            entries.append((group.label, values, group.colour))
    if not entries:
        return ""
    edges, shares = histogram([values for _, values, _ in entries])
    rows = [[*bin_edges, *column] for *bin_edges, column in zip(edges, edges[1:], zip(*shares))]
    return figure(
        title,
        distribution(entries, x_label=title.lower()),
        file=f"distribution of {title}",
        key=legend([(label, colour) for label, _, colour in entries]),
        header=["from", "to", *(label for label, *_ in entries)],
        rows=rows,
    )


def _shifts(policies: list[Group]) -> list[str]:
    pairs: list[str] = []
    for group in policies:
        before, after = group.per_prompt("scores", first=True), group.per_prompt("scores")
        pairs.append(_shift_figure("before RL", before, group, after))
    for group in policies[1:]:
        if same_prompts(policies[0], group):
            before, after = policies[0].per_prompt("scores"), group.per_prompt("scores")
            pairs.append(_shift_figure(policies[0].label, before, group, after))
    return [pair for pair in pairs if pair][:MAX_SHIFTS]


def _shift_figure(
    name: str, before: list[float] | None, group: Group, after: list[float] | None
) -> str:
    if not before or not after or len(before) != len(after):
        return ""
    rows = thin([[i, a, b] for i, (a, b) in enumerate(zip(before, after))], MAX_ROWS)
    cloud = Series(group.label, list(zip(before, after)), group.colour)
    title = f"{name} \u2192 {group.label}"
    return figure(
        title,
        scatter(cloud, x_label=f"score, {name}", y_label=f"score, {group.label}"),
        file=f"shift {name} to {group.label}",
        note=f"{percent(share_improved(before, after))} of prompts improved.",
        header=["prompt", name, group.label],
        rows=rows,
    )


def training(policies: list[Group]) -> str:
    """What the optimiser saw, batch by batch."""
    measures = [
        ("L2 norm of advantages", ("ppo/advantage_norm",)),
        ("L2 norm of Q-values", ("ppo/q_norm",)),
        ("Reward after the KL penalty", ("ppo/reward",)),
        ("Policy loss", ("ppo/policy_loss",)),
        ("Value loss", ("ppo/value_loss",)),
        ("Entropy", ("ppo/entropy",)),
        ("Share of clipped ratios", ("ppo/clip_fraction",)),
        ("Tokens a macro action", ("ppo/macro_length",)),
        ("Wins against SFT, held out", ("eval/win_rate",)),
        ("Repetition, held out", ("eval/repetition",)),
        ("Responses that end by themselves", ("eval/ended", "ppo/ended")),
    ]
    return section(
        "training",
        "Inside training",
        "Signs of health: norms and losses that settle, entropy that falls slowly, few clipped "
        "ratios. Rising repetition or responses that no longer end are signs of reward hacking.",
        grid([curve_figure(title, policies, keys) for title, keys in measures]),
    )


def timing(policies: list[Group]) -> str:
    """Where the seconds of a step went."""
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    rows: list[list[str | float | None]] = []
    for group in policies:
        parts = [(phase, group.mean(f"time/{phase}"), colour) for phase, colour in PHASES]
        parts = [part for part in parts if math.isfinite(part[1]) and part[1] >= 0]
        whole = group.mean("time/step")
        rest = whole - sum(value for _, value, _ in parts)
        if parts and rest > 0.005 * whole:
            parts.append(("rest", rest, "var(--t3)"))
        if parts:
            bars.append((group.label, parts))
            rows += [[group.label, phase, seconds] for phase, seconds, _ in parts]
    if not bars:
        return ""
    keys = dict.fromkeys((phase, colour) for _, parts in bars for phase, _, colour in parts)
    chart = figure(
        "Seconds a step",
        stacked_bars(bars, x_label="mean seconds a step"),
        file="seconds a step",
        key=legend(list(keys)),
        header=["run", "phase", "seconds"],
        rows=rows,
    )
    return section(
        "timing",
        "Time",
        "Each bar is the mean step, cut into its phases: writing responses, scoring them, and "
        "updating the models.",
        grid([chart, _speed_figure(policies)], "two"),
    )


def _speed_figure(policies: list[Group]) -> str:
    """Responses a second, as recorded or else from the batch and the step's seconds."""
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    for group in policies:
        rate = group.mean("time/samples_per_second")
        if not math.isfinite(rate):
            rate = number(group.config.get("batch_size")) / (group.mean("time/step") or math.nan)
        if math.isfinite(rate) and rate > 0:
            bars.append((group.label, [("responses a second", rate, group.colour)]))
    if not bars:
        return ""
    return figure(
        "Responses a second",
        stacked_bars(bars, x_label="responses a second"),
        file="responses a second",
        header=["run", "responses a second"],
        rows=[[label, parts[0][1]] for label, parts in bars],
    )


def stages(groups: list[Group], *, with_table: bool) -> str:
    """The SFT and reward models that the policies stand on, and DPO, which has no score."""
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
        "The models behind",
        "A policy is only as good as the reward model it climbs: held-out accuracy is the share of "
        "unseen pairs whose preferred response it scores higher (50% is a coin).",
        stage_table(groups) if with_table else "",
        grid(figures),
    )


def settings(groups: list[Group]) -> str:
    """The settings in which runs of one stage differ, seeds and output folders aside."""
    parts: list[str] = []
    for stage in dict.fromkeys(group.stage for group in groups):
        alike = [group for group in groups if group.stage == stage]
        rows = differences(alike)
        if rows:
            header = ["Setting", *(chip(group.label, group.colour) for group in alike)]
            cells = [[f"<code>{text(key)}</code>", *map(_setting_cell, row)] for key, row in rows]
            names = ["setting", *(group.label for group in alike)]
            link = csv_link(f"settings {stage}", names, [[key, *row] for key, row in rows])
            parts.append(table(header, cells, csv=link, words=len(header)))
    return section(
        "settings",
        "Settings that differ",
        "Whatever is not in this table was the same in all runs of the stage, "
        "seeds and folders aside.",
        *parts,
    )


def _setting_cell(value: str | None) -> str:
    if value is None:
        return num(None)
    return text(value if len(value) <= 80 else value[:79] + "\u2026")
