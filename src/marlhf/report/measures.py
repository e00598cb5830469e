"""Held-out numbers of groups with intervals: at the start, at the end, and how they differ."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from marlhf import intervals
from marlhf.intervals import (
    NO_INTERVAL,
    Interval,
    difference_over_seeds,
    mean,
    mean_over_seeds,
    win_rate,
)
from marlhf.report.groups import Group, Point, same_prompts

PER_PROMPT = {"score": "scores", "gold": "gold", "kl": "kl", "length": "length"}
"""Numbers that are recorded for each prompt, and their names there."""


def final_score(group: Group, field: str = "score") -> Interval:
    """The last evaluation, with its interval over prompts and, where there are several, seeds."""
    return mean_over_seeds(_final_rows(group, field))


def _final_rows(group: Group, field: str) -> list[list[float]]:
    """One row per seed: a number per prompt, or its mean alone where only that was recorded."""
    rows = group.per_seed(PER_PROMPT[field]) if field in PER_PROMPT else []
    return rows or [[value] for value in group.finals(f"eval/{field}")]


def start_score(group: Group, field: str = "score") -> Interval:
    """The same for the model the group started from."""
    rows = group.per_seed(PER_PROMPT[field], first=True) if field in PER_PROMPT else []
    points = [point for point in group.curve(f"eval/{field}") if point.step == 0]
    return mean_over_seeds(rows or [[point.mean] for point in points])


def change(group: Group, field: str = "score") -> Interval:
    """How much a number changed in training, paired by prompt where it is known of each."""
    if all(point.step == 0 for point in group.curve(f"eval/{field}")):
        return NO_INTERVAL
    rows = group.per_seed(PER_PROMPT[field], first=True), group.per_seed(PER_PROMPT[field])
    if paired := _paired(*rows):
        return paired
    moved = final_score(group, field).mean - start_score(group, field).mean
    return Interval(moved, math.nan, math.nan, 0)


def fall_from_peak(group: Group, field: str) -> tuple[Point, Interval]:
    """The evaluation with the highest mean, and how far below it the last one is."""
    points = group.curve(f"eval/{field}")
    peak = max(points, key=lambda point: point.mean)
    rows = group.per_seed(PER_PROMPT[field]), group.per_seed(PER_PROMPT[field], step=peak.step)
    drop = _paired(*rows)
    return peak, drop or Interval(peak.mean - points[-1].mean, math.nan, math.nan, 0)


def _paired(before: list[list[float]], after: list[list[float]]) -> Interval | None:
    """The difference within each seed; None where their prompts do not match."""
    if not before or [len(row) for row in before] != [len(row) for row in after]:
        return None
    return mean_over_seeds([np.subtract(b, a).tolist() for a, b in zip(before, after)])


def difference(base: Group, group: Group, field: str = "score") -> Interval:
    """How far a group ends above another, paired by prompt, over seeds and prompts.

    Without bounds where they were not evaluated on the same prompts.
    """
    before, after = _final_rows(base, field), _final_rows(group, field)
    widths = {len(row) for row in before + after}
    if before and after and (widths == {1} or (len(widths) == 1 and same_prompts(base, group))):
        return difference_over_seeds(before, after)
    gap = mean_over_seeds(after).mean - mean_over_seeds(before).mean
    return Interval(gap, math.nan, math.nan, 0)


def wins_over(base: Group, group: Group) -> float:
    """The win rate of a group over another: each seed of one against each seed of the other."""
    before, after = base.per_seed("scores"), group.per_seed("scores")
    if len({len(row) for row in before + after}) != 1 or not same_prompts(base, group):
        return math.nan
    return mean([win_rate(a, b) for a, b in product(before, after)])


def wins_since_start(group: Group) -> float:
    """The win rate of each seed over the model it started from."""
    pairs = list(zip(group.per_seed("scores", first=True), group.per_seed("scores")))
    if any(len(before) != len(after) for before, after in pairs):
        return math.nan
    return mean([win_rate(before, after) for before, after in pairs])


def score_at_kl(group: Group, kl: float) -> float:
    """The mean held-out score where the group's KL first passes `kl`; NaN where it never does."""
    scores = {point.step: point.mean for point in group.curve("eval/score")}
    points = [(scores[p.step], p.mean) for p in group.curve("eval/kl") if p.step in scores]
    columns = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return float(intervals.score_at_kl(*columns, level=kl))


def over_what(group: Group) -> str:
    """What the intervals of a group are over."""
    prompts = [len(row) for row in group.per_seed("scores")]
    many = f"{min(prompts)} prompts" if prompts else ""
    seeds = f"{len(group.runs)} seeds" if len(group.runs) > 1 else ""
    return " and ".join(filter(None, (seeds, many)))
