"""Held-out numbers of groups with intervals: at the start, at the end, and along their curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from marlhf import intervals
from marlhf.intervals import Curve, Floats, Interval, mean, mean_over_seeds
from marlhf.report.groups import CurvePoint, Group, evaluation_of, same_prompts, start_of
from marlhf.runs.read import Run, number

MAX_EVALUATIONS = 100
TITLES = {
    "score": "Score",
    "gold": "Gold score",
    "kl": "KL (nats per response)",
    "length": "Length (tokens)",
}
"""Of figures of what evaluations measure."""
PER_PROMPT = {"score": "scores", "gold": "gold", "kl": "kl", "length": "length"}
"""Numbers that are recorded for each prompt, and their names there."""


def final_score(group: Group, field: str = "score") -> Interval:
    """The last evaluation, with its interval over prompts and, where there are several, seeds."""
    return mean_over_seeds(_final_rows(group, field))


def scored(groups: Sequence[Group]) -> list[Group]:
    """The groups that were evaluated after some training."""
    return [each for each in groups if math.isfinite(final_score(each).mean) and _trained(each)]


def _trained(group: Group) -> bool:
    steps = [evaluation.step for run in group.runs for evaluation in run.evaluations]
    return max(steps + [point.step for point in group.curve("eval/score")], default=0) > 0


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
    """How much a number changed in training, paired by prompt where prompts were recorded."""
    if all(point.step == 0 for point in group.curve(f"eval/{field}")):
        return intervals.NO_INTERVAL
    rows = group.per_seed(PER_PROMPT[field], first=True), group.per_seed(PER_PROMPT[field])
    if paired := _paired(*rows):
        return paired
    moved = final_score(group, field).mean - start_score(group, field).mean
    return Interval(moved, math.nan, math.nan, 0)


def length_effect(group: Group) -> float:
    """How much of the change in score length explains, mean over seeds; NaN where unknown.

    The slope of score on length, times the change in mean length. The slope is least squares over
    the responses of the first and the last evaluation, each around its own means, so that nothing
    but length that differs between responses of one policy enters it.
    """
    effects: list[float] = []
    for run in group.runs:
        ends = [e for e in (start_of(run), evaluation_of(run, None)) if e is not None]
        pairs = [(np.array(e.scores or (), float), np.array(e.length or (), float)) for e in ends]
        if len(pairs) < 2 or any(len(s) != len(n) or not len(n) for s, n in pairs):
            continue
        apart = [(scores - scores.mean(), lengths - lengths.mean()) for scores, lengths in pairs]
        spread = sum(float(lengths @ lengths) for _, lengths in apart)
        slope = sum(float(s @ n) for s, n in apart) / spread if spread > 0 else 0.0
        effects.append(slope * float(pairs[1][1].mean() - pairs[0][1].mean()))
    return mean(effects)


def fall_from_peak(group: Group, field: str) -> tuple[CurvePoint, Interval]:
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
        return intervals.difference_over_seeds(before, after)
    gap = mean_over_seeds(after).mean - mean_over_seeds(before).mean
    return Interval(gap, math.nan, math.nan, 0)


def wins_over(base: Group, group: Group) -> float:
    """The win rate of a group over another: each seed of one against each seed of the other."""
    before, after = base.per_seed("scores"), group.per_seed("scores")
    if len({len(row) for row in before + after}) != 1 or not same_prompts(base, group):
        return math.nan
    return mean([intervals.win_rate(a, b) for a, b in product(before, after)])


def wins_since_start(group: Group) -> float:
    """The win rate of each seed over the model it started from."""
    pairs = list(zip(group.per_seed("scores", first=True), group.per_seed("scores")))
    if any(len(before) != len(after) for before, after in pairs):
        return math.nan
    return mean([intervals.win_rate(before, after) for before, after in pairs])


def score_at_kl(group: Group, kl: float) -> float:
    """The mean held-out score where the group's KL first passes `kl`; NaN where it never does."""
    scores = {point.step: point.mean for point in group.curve("eval/score")}
    points = [(scores[p.step], p.mean) for p in group.curve("eval/kl") if p.step in scores]
    columns = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return float(intervals.score_at_kl(*columns, level=kl))


def over_what(group: Group) -> str:
    """What the intervals of a group are over, in words."""
    prompts = [len(row) for row in group.per_seed("scores")]
    many = f"{min(prompts)} prompts" if prompts else ""
    seeds = f"{len(group.runs)} seeds" if len(group.runs) > 1 else ""
    return " and ".join(filter(None, (seeds, many)))


class CurveComparison(intervals.CurveBootstrap):
    """The learning curves of groups, with intervals over their seeds and held-out prompts."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        super().__init__([[seed_curve(run) for run in group.runs] for group in groups])

    def over(self) -> str:
        """What the intervals are over, in words."""
        prompts = f"{self.num_prompts} prompts" if self.num_prompts > 1 else ""
        if all(len(group.runs) == 1 for group in self.groups):
            return f"{prompts} (one seed per setting, so not over trainings)" if prompts else ""
        seeds = f"seeds and {prompts}" if prompts else "seeds"
        fewest = min(group.num_seeds for group in self.groups)
        few = "; with fewer than five seeds they are too narrow" if fewest < 5 else ""
        return f"{seeds}, resampled together{few}"


def seed_curve(run: Run) -> intervals.SeedCurve:
    """The evaluations of a run, prompt by prompt where that was recorded."""
    known = {evaluation.step: evaluation for evaluation in run.evaluations}
    rows = [row for row in run.evals if math.isfinite(number(row.get("eval/score")))]
    rows = intervals.thin(rows, MAX_EVALUATIONS)
    evaluations = [known.get(row["step"]) for row in rows]
    return intervals.SeedCurve(
        steps=np.array([row["step"] for row in rows], dtype=np.float64),
        seconds=np.array([number(row.get("seconds")) for row in rows]),
        scores=_matrix([e.scores if e else None for e in evaluations], rows, "eval/score"),
        kls=_matrix([e.kl if e else None for e in evaluations], rows, "eval/kl"),
    )


def _matrix(
    per_prompt: Sequence[Sequence[float] | None], rows: Sequence[dict[str, object]], key: str
) -> Floats:
    """[E, P]: numbers of each prompt; the mean for all of them where only that was recorded."""
    width = max((len(values) for values in per_prompt if values), default=1)
    matrix = np.full((len(rows), width), np.nan)
    for line, values, row in zip(matrix, per_prompt, rows):
        if values:
            line[: len(values)] = values
        else:
            line[:] = number(row.get(key))
    return matrix


def common_kl(curves: Sequence[Curve]) -> float:
    """The largest KL that every curve reached, rounded down to two digits to read well."""
    reached = [float(np.nanmax(curve.kls, initial=0.0)) for curve in curves]
    most = min(reached, default=0.0)
    if most <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(most)) - 1)
    return round(math.floor(most / unit + 1e-9) * unit, 12)


def at_kl(curve: Curve, level: float) -> Floats:
    """The score at a KL, [draws].

    A resample may end just short of a level that the whole sample reaches. Leaving it out would
    bias the interval, so it keeps its last score.
    """
    if not curve.kls.shape[-1]:
        return np.full(len(curve.kls), np.nan)
    scores = intervals.score_at_kl(curve.scores, curve.kls, level)
    is_short = np.isnan(scores) & (curve.kls[..., -1] < level)
    return np.where(is_short, curve.scores[..., -1], scores)
