"""Intervals over seeds and prompts alike, by drawing both anew.

A score of a few trainings on a few prompts would come out otherwise with other seeds and with other
prompts. Each draw takes as many seeds with replacement, and as many prompts, the same ones for all
settings, so that how hard the prompts are cancels out of differences. With one seed the interval is
over prompts alone; with fewer than five seeds it is too narrow, and the page says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from marlhf.intervals import Interval, interval, thin
from marlhf.report.groups import Group
from marlhf.runs.read import Run, number

MAX_BLOCKS = 40
"""Prompts are drawn in blocks of neighbours, which leaves the spread of a mean as it is."""
MAX_EVALUATIONS = 100
MAX_WORK, WORK_A_MOMENT = 12_000_000, 40
"""Products of numbers, and what else an evaluation costs in a draw: a few seconds in all."""
MIN_DRAWS, MAX_DRAWS = 200, 1000


class Moment(NamedTuple):
    """One evaluation of a setting, averaged over seeds and prompts."""

    step: int
    seconds: float
    score: float
    kl: float


Curve = list[Moment]
Statistic = Callable[[list[Curve]], list[float]]
"""Curves of all settings to some numbers; infinity for "never", NaN for "not known"."""


@dataclass(frozen=True)
class Blocked:
    """One evaluation of one seed: mean scores and KLs of blocks of prompts."""

    step: int
    seconds: float
    scores: list[float]
    kls: list[float]


class Resampled:
    """Statistics of several settings with their intervals."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self._seeds = [[_blocked(run) for run in group.runs] for group in groups]
        moments = [moment for runs in self._seeds for run in runs for moment in run]
        work = sum(len(m.scores) + len(m.kls) + WORK_A_MOMENT for m in moments)
        self._draws = max(MIN_DRAWS, min(MAX_DRAWS, MAX_WORK // max(1, work)))
        self._drawn: list[list[Curve]] = []

    def curves(self) -> list[Curve]:
        """The curves as they were measured."""
        return [_mean_curve([_weigh(run, None) for run in runs]) for runs in self._seeds]

    def intervals(self, statistic: Statistic) -> list[Interval]:
        """Each number of a statistic, with the middle 95% of what it is over all draws."""
        found = statistic(self.curves())
        sizes = [len(runs) for runs in self._seeds]
        if max(sizes, default=0) < 2 and self.num_prompts < 2:  # nothing to draw from
            return [Interval(value, math.nan, math.nan, sum(sizes)) for value in found]
        if not self._drawn:
            self._drawn = [self._draw(at) for at in range(self._draws)]
        drawn = [statistic(curves) for curves in self._drawn]
        return [
            Interval(value, *quantiles(column), sum(sizes))
            for value, column in zip(found, zip(*drawn))
        ]

    @property
    def num_prompts(self) -> int:
        """The fewest prompts of a group that has any on record, else 0."""
        counts = [
            len(run.evaluations[-1].scores)
            for group in self.groups
            for run in group.runs
            if run.evaluations
        ]
        return min(counts, default=0)

    def over(self) -> str:
        """What the intervals are over, in words."""
        fewest = min((group.num_seeds for group in self.groups), default=0)
        prompts = f"{self.num_prompts} prompts" if self.num_prompts > 1 else ""
        if all(len(runs) == 1 for runs in self._seeds):
            return f"{prompts} (one seed a setting, so not over trainings)" if prompts else ""
        seeds = "seeds and " + prompts if prompts else "seeds"
        few = "; with fewer than five seeds they are too narrow" if fewest < 5 else ""
        return f"{seeds}, drawn anew together{few}"

    def _draw(self, at: int) -> list[Curve]:
        draw = random.Random(f"seeds {at}")
        curves: list[Curve] = []
        for runs in self._seeds:
            weighed = [_weigh(run, at) for run in runs]
            curves.append(_mean_curve(draw.choices(weighed, k=len(weighed))))
        return curves


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95%: the 2.5% and 97.5% quantiles of what is known, infinity included."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return math.nan, math.nan
    low, high = (known[round(share * (len(known) - 1))] for share in (0.025, 0.975))
    return low, high


def mean_over(rows: Sequence[Sequence[float]]) -> Interval:
    """The mean of per-prompt numbers of several seeds, with its interval over both.

    One seed has the plain normal interval over its prompts.
    """
    kept = [row for row in rows if any(map(math.isfinite, row))]
    if len(kept) < 2:
        return interval(kept[0] if kept else [])
    means = [_blocks(row) for row in kept]
    draw = random.Random(0)
    found: list[float] = []
    for at in range(2 * MIN_DRAWS):
        drawn = [math.fsum(map(mul, row, prompt_weights(len(row), at))) for row in means]
        found.append(math.fsum(draw.choices(drawn, k=len(drawn))) / len(drawn))
    middle = math.fsum(interval(row).mean for row in kept) / len(kept)
    return Interval(middle, *quantiles(found), min(map(len, kept)))


@lru_cache(maxsize=100_000)
def prompt_weights(count: int, at: int) -> list[float]:
    """How often each of `count` blocks of prompts is in a draw, as shares.

    The same for everyone in that draw: settings are compared on the same prompts.
    """
    weights = [0.0] * count
    for place in random.Random(f"{count} prompts {at}").choices(range(count), k=count):
        weights[place] += 1 / count
    return weights


def _weigh(run: list[Blocked], at: int | None) -> Curve:
    """The means of one seed: as measured, or in the draw of this number."""

    def mean(values: list[float]) -> float:
        if at is None or len(values) == 1:
            return math.fsum(values) / len(values)
        return math.fsum(map(mul, values, prompt_weights(len(values), at)))

    return [Moment(e.step, e.seconds, mean(e.scores), mean(e.kls)) for e in run]


def _mean_curve(seeds: Sequence[Curve]) -> Curve:
    if len(seeds) == 1:
        return seeds[0]
    together: dict[int, list[Moment]] = {}
    for curve in seeds:
        for moment in curve:
            together.setdefault(moment.step, []).append(moment)
    curve: Curve = []
    for step in sorted(together):
        count = len(together[step])
        columns = list(zip(*together[step]))[1:]
        curve.append(Moment(step, *(math.fsum(column) / count for column in columns)))
    return curve


def _blocked(run: Run) -> list[Blocked]:
    """Evaluations with their prompts in blocks; one block where only the mean is on record."""
    known = {evaluation.step: evaluation for evaluation in run.evaluations}
    rows = [row for row in run.evals if math.isfinite(number(row.get("eval/score")))]
    found: list[Blocked] = []
    for row in thin(rows, MAX_EVALUATIONS):
        evaluation = known.get(row["step"])
        scores = _blocks(evaluation.scores) if evaluation else [number(row["eval/score"])]
        kls = _blocks(evaluation.kl) if evaluation and evaluation.kl else []
        kls = kls or [number(row.get("eval/kl"))]
        found.append(Blocked(row["step"], number(row.get("seconds")), scores, kls))
    return found


def _blocks(values: Sequence[float]) -> list[float]:
    """Means of at most MAX_BLOCKS blocks of neighbours, of one size; missing numbers left out."""
    finite = [value for value in values if math.isfinite(value)]
    size = math.ceil(len(finite) / MAX_BLOCKS) or 1
    means = [interval(finite[i : i + size]).mean for i in range(0, len(finite), size)]
    if len(finite) % size and len(means) > 1:
        # The last block is smaller: its weight would be too large, so all are shifted a little.
        off = interval(finite).mean - math.fsum(means) / len(means)
        means = [mean + off for mean in means]
    return means
