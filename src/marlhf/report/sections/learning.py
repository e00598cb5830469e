"""Numbers over the course of training, and the sections made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from marlhf.intervals import thin
from marlhf.report.charts import HEIGHT, WIDTH, Series, legend_of, line_chart
from marlhf.report.groups import Group, Point
from marlhf.report.page import figure, grid, section
from marlhf.report.sections.summary import stage_table

MAX_POINTS = 300
POINTS_A_CHART = 1500
"""Shared by the lines of a chart, so that forty runs still make a page one can mail."""

SHARES = {
    "ppo/clip_fraction",
    "ppo/ended",
    "eval/ended",
    "eval/repetition",
    "eval/win_rate",
    "eval/accuracy",
    "reward/accuracy",
}


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
    # Training batches are noisy, evaluations are not: only the former are smoothed.
    window = 1 if key.startswith("eval/") else _window(points for _, points in curves)
    lines: list[Series] = []
    rows: list[list[str | float | None]] = []
    for group, points in curves:
        smooth = _running_mean(points, window, limit)
        kept = thin(points, limit)
        band = [(getattr(p, x), p.low, p.high) for p in smooth] if len(group.runs) > 1 else ()
        line = [(getattr(p, x), p.mean) for p in smooth]
        raw = [(getattr(p, x), p.mean) for p in kept] if window > 1 and len(curves) < 4 else ()
        lines.append(Series(group.label, line, group.colour, band, group.dash, raw=raw))
        ends = [[s.mean] if window > 1 else [] for s in smooth]
        rows += [[group.label, *point, *end] for point, end in zip(kept, ends)]
    return figure(
        title,
        line_chart(lines, x_label=x, y_label=title, size=size, is_share=key in SHARES),
        file=f"{title} by {x}",
        key=legend_of(lines),
        note=f"Running means over {window} steps." if window > 1 else "",
        header=["run", "step", "seconds", key, "lowest seed", "highest seed"]
        + ["running mean"] * (window > 1),
        rows=rows,
    )


def _window(curves: Iterable[Sequence[Point]]) -> int:
    """Logged steps that a running mean is taken over: a thirtieth of the longest run."""
    return max(1, max((len(points) for points in curves), default=0) // 30)


def _running_mean(points: list[Point], window: int, limit: int) -> list[Point]:
    """At most `limit` points, each averaged with its neighbours, fewer towards the ends."""
    if window == 1:
        return thin(points, limit)
    sums = [list(accumulate((p[i] for p in points), initial=0.0)) for i in (2, 3, 4)]
    smooth: list[Point] = []
    for i in thin(range(len(points)), limit):
        reach = min(window // 2, i, len(points) - 1 - i)
        first, last = i - reach, i + reach + 1
        means = [(column[last] - column[first]) / (last - first) for column in sums]
        smooth.append(Point(points[i].step, points[i].seconds, *means))
    return smooth


def _drawable(points: list[Point], x: str) -> list[Point]:
    return [point for point in points if math.isfinite(getattr(point, x))]


def learning(policies: list[Group]) -> str:
    """Score beside gold, KL, length and repetition, over steps and over seconds."""
    measures = [
        ("Score", ("eval/score", "ppo/score")),
        ("KL (nats a response)", ("eval/kl", "ppo/kl")),
        ("Length (tokens)", ("eval/length", "ppo/length")),
        ("Gold score", ("eval/gold",)),
        ("Repetition", ("eval/repetition",)),
        ("Wins against SFT", ("eval/win_rate",)),
    ]
    by_step, by_time = (
        [curve_figure(title, policies, keys, x=x) for title, keys in measures[:count]]
        for x, count in (("step", len(measures)), ("seconds", 3))
    )
    held_out = any(group.curve("eval/score") for group in policies)
    source = "held-out prompts" if held_out else "training batches, as no evaluation was recorded"
    bands = "; bands span the seeds" if any(len(g.runs) > 1 for g in policies) else ""
    return section(
        "learning",
        "Learning",
        f"Higher score at the same KL and length is better; a score that rises only with KL, "
        f"length or repetition was bought with them. On {source}{bands}.",
        "<h3>Over steps</h3>" if any(by_step) else "",
        grid(by_step),
        "<h3>Over seconds</h3>" if any(by_time) else "",
        grid(by_time),
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
        ("Variance the critic foresaw", ("ppo/explained_variance",)),
        ("Responses that end by themselves", ("eval/ended", "ppo/ended")),
    ]
    return section(
        "training",
        "Inside training",
        "Signs of health: norms and losses that settle, entropy that falls slowly, few clipped "
        "ratios. Lower norms of advantages and Q-values mean calmer updates, where the rewards are "
        "of one size. Responses that no longer end are a sign of reward hacking.",
        grid([curve_figure(title, policies, keys) for title, keys in measures]),
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
