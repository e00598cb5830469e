"""Groups that were scored alike, compared along their learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from marlhf.intervals import Curve, CurveBootstrap, Floats, SeedCurve, score_at_kl, thin
from marlhf.report.groups import Group
from marlhf.runs.read import Run, number

MAX_EVALUATIONS = 100


class Comparison(CurveBootstrap):
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


def seed_curve(run: Run) -> SeedCurve:
    """The evaluations of a run, prompt by prompt where that was recorded."""
    known = {evaluation.step: evaluation for evaluation in run.evaluations}
    rows = [row for row in run.evals if math.isfinite(number(row.get("eval/score")))]
    rows = thin(rows, MAX_EVALUATIONS)
    evaluations = [known.get(row["step"]) for row in rows]
    return SeedCurve(
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
    scores = score_at_kl(curve.scores, curve.kls, level)
    is_short = np.isnan(scores) & (curve.kls[..., -1] < level)
    return np.where(is_short, curve.scores[..., -1], scores)
