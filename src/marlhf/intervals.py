"""All statistics in one place: means with 95% intervals, bootstraps, score at equal KL.

Numbers that are independent, such as scores of prompts, have `interval`. Numbers of several seeds
on several prompts have `mean_over_seeds` and `CurveBootstrap`: both the seeds and the prompts are
resampled with replacement. All settings share the resampled prompts, so that how hard a prompt is
cancels out of their differences. With one seed the interval is over prompts alone; with fewer than
five it is too narrow, and the report says so. The difference between two settings has
`difference_over_seeds`, which holds for few seeds, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Floats = NDArray[np.float64]
Z = 1.959963984540054
"""The normal distribution's 97.5% point."""
DRAWS = 1000
MAX_DRAWN = 8_000_000
"""Resamples times prompts: beyond it there are fewer resamples, so that memory stays small."""
PROMPTS = 0
"""Random stream of resampled prompts, shared by all settings. Seeds use streams from 1 on."""


class Interval(NamedTuple):
    """A mean with its 95% interval, and how many numbers it is the mean of."""

    mean: float
    low: float
    high: float
    size: int

    def text(self, form: Callable[[float], str] | None = None) -> str:
        """`1.413 [1.301, 1.525]`, or the mean alone where there is no interval."""
        form = form or _three_decimals
        return f"{form(self.mean)} {self.bounds(form)}".rstrip()

    def bounds(self, form: Callable[[float], str]) -> str:
        """`[1.301, 1.525]`, or nothing."""
        return "" if math.isnan(self.low) else f"[{form(self.low)}, {form(self.high)}]"


def _three_decimals(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)


def mean(values: Sequence[float] | Floats) -> float:
    """The mean of the finite values; NaN where there are none."""
    return interval(values).mean


def interval(values: Sequence[float] | Floats) -> Interval:
    """The mean of the finite values with Student's 95% interval, mean +- t s / sqrt(n).

    The interval is about the prompts that were drawn, not about the seed of the training:
    another training may fall outside it. NaN bounds below two values.
    """
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    count = len(finite)
    if count == 0:
        return NO_INTERVAL
    middle = float(finite.mean())
    if count == 1:
        return Interval(middle, math.nan, math.nan, 1)
    half = t_quantile(count - 1) * float(finite.std(ddof=1)) / math.sqrt(count)
    return Interval(middle, middle - half, middle + half, count)


@lru_cache(maxsize=4096)
def t_quantile(df: int) -> float:
    """The 97.5% point of Student's t with `df` degrees of freedom.

    With few numbers it is far above the normal 1.96: an interval of four numbers made with 1.96
    holds the mean in 85% of cases only.

    >>> [round(t_quantile(df), 3) for df in (1, 3, 10, 100)]
    [12.706, 3.182, 2.228, 1.984]
    """
    if df > 1000:  # the first terms of the expansion around the normal are exact to 1e-8 here
        return Z + (Z**3 + Z) / (4 * df) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * df**2)
    low, high = 1.9, 12.8
    for _ in range(60):  # bisection down to rounding
        middle = (low + high) / 2
        low, high = (low, middle) if _t_within(middle, df) > 0.95 else (middle, high)
    return high


def _t_within(t: float, df: int) -> float:
    """P(|T| < t), as a finite series for whole degrees of freedom (Abramowitz, Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(df))
    cos_squared = math.cos(angle) ** 2
    is_odd = df % 2
    term = total = math.cos(angle) if is_odd else 1.0
    for i in range(2 + is_odd, df, 2):
        term *= cos_squared * (i - 1) / i
        total += term
    if is_odd:
        return 2 / math.pi * (angle + (math.sin(angle) * total if df > 1 else 0.0))
    return math.sin(angle) * total


def win_rate(before: Sequence[float], after: Sequence[float]) -> float:
    """The share of prompts on which `after` is higher; a tie counts half. This is what a win is."""
    rise = np.subtract(after, before)
    return mean((np.sign(rise) + 1) / 2)


def wilson(count: float, total: int) -> Interval:
    """Wilson's interval of a share, which stays within 0 and 1 for few pairs, too.

    >>> wilson(5, 10).text()
    '0.500 [0.237, 0.763]'
    """
    if total == 0:
        return NO_INTERVAL
    share = count / total
    scale = 1 + Z * Z / total
    middle = (share + Z * Z / (2 * total)) / scale
    half = Z * math.sqrt(share * (1 - share) / total + (Z / (2 * total)) ** 2) / scale
    low = 0.0 if count == 0 else middle - half
    return Interval(share, low, 1.0 if count == total else middle + half, total)


def mean_by_position(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Seeds averaged prompt by prompt; None where they have different numbers of prompts."""
    if not rows or len({len(row) for row in rows}) != 1:
        return None
    return _weighted_mean(np.array(rows, dtype=np.float64), np.ones((len(rows), 1))).tolist()


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of `items`, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    if limit < 2:
        return list(items[-limit:]) if limit else []
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]


def quantiles(
    values: Sequence[float] | Floats, shares: Sequence[float] = (0.025, 0.975)
) -> list[float]:
    """The nearest value to each quantile, NaN left out: "never" (infinity) is not averaged."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return [math.nan] * len(shares)
    return np.quantile(known, shares, method="nearest").tolist()


def bootstrap(
    counts: Sequence[int],
    statistic: Callable[[Floats], Floats],
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """A statistic of how often things of each kind occur, with its percentile interval.

    `statistic` takes counts [draws, kinds] to numbers [draws]. Drawing counts instead of things
    costs the same for fifty things and for fifty thousand.
    """
    observed = np.asarray(counts, dtype=np.float64)
    total = int(observed.sum())
    if total == 0:
        return NO_INTERVAL
    value = float(statistic(observed[None])[0])
    drawn = np.random.default_rng(seed).multinomial(total, observed / total, size=draws)
    if math.isnan(value):
        return Interval(value, math.nan, math.nan, total)
    low, high = quantiles(statistic(drawn.astype(np.float64)))
    return Interval(value, low, high, total)


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """The mean with its bootstrap interval, for numbers far from normal such as pass rates."""
    kinds, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    return bootstrap(counts.tolist(), lambda drawn: drawn @ kinds / len(values))


def mean_over_seeds(rows: Sequence[Sequence[float]]) -> Interval:
    """The mean of per-prompt numbers of several seeds, with its interval over seeds and prompts.

    One seed has the interval over its prompts.
    """
    return mean_over_groups([rows])


def mean_over_groups(groups: Sequence[Sequence[Sequence[float]]]) -> Interval:
    """The mean of per-prompt numbers of groups of seeds, such as the seeds with each reward model.

    A hierarchical bootstrap: groups, the seeds of each and the prompts are all resampled, and
    each group counts the same. With few groups the interval is too narrow, as it is with few seeds.
    """
    known = [seeds for rows in groups if (seeds := _known_seeds(rows))]
    every = [row for seeds in known for row in seeds]
    if len(every) < 2:
        return interval(every[0] if every else [])
    draws = _num_draws(max(map(len, every)))
    drawn = np.stack([_resampled_means(seeds, draws, i) for i, seeds in enumerate(known, start=1)])
    low, high = quantiles(_weighted_mean(drawn, draw_weights(len(known), draws, len(known) + 1).T))
    middle = mean([mean([mean(row) for row in seeds]) for seeds in known])
    return Interval(middle, low, high, min(map(len, every)))


def difference_over_seeds(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> Interval:
    """How much the mean of `after` exceeds that of `before`, over seeds and prompts.

    One row per seed, all of the same prompts in the same order: these are paired. The spread of
    seeds is pooled over both sides, and Student's t accounts for how few they are: two or three
    seeds drawn with replacement would give an interval that is far too narrow. Of a single seed on
    each side only the prompts are known (see `few_seeds`).
    """
    sides = [_known_seeds(rows) for rows in (before, after)]
    if not all(sides):
        return NO_INTERVAL
    middles = [_weighted_mean(np.stack(seeds), np.ones((len(seeds), 1))) for seeds in sides]
    by_prompt = interval(middles[1] - middles[0])
    means = [np.array([mean(row) for row in seeds]) for seeds in sides]
    difference = float(means[1].mean() - means[0].mean())
    df = sum(map(len, means)) - 2
    if df == 0:
        return by_prompt
    variance = sum(((x - x.mean()) ** 2).sum() for x in means) / df
    half = t_quantile(df) * math.sqrt(variance * sum(1 / len(x) for x in means))
    if math.isfinite(by_prompt.high):
        half = math.hypot(half, by_prompt.high - by_prompt.mean)
    return Interval(difference, difference - half, difference + half, len(sides[0][0]))


def few_seeds(fewest: int) -> str:
    """A warning about a comparison in which a setting has fewer than three seeds.

    >>> few_seeds(2), few_seeds(3)
    ('Two seeds say little about how another training would end.', '')
    """
    if fewest >= 3:
        return ""
    amount = "One seed says nothing" if fewest == 1 else "Two seeds say little"
    return f"{amount} about how another training would end."


def _known_seeds(rows: Sequence[Sequence[float]]) -> list[Floats]:
    seeds = [np.asarray(row, dtype=np.float64) for row in rows]
    return [row for row in seeds if np.isfinite(row).any()]


def _resampled_means(seeds: Sequence[Floats], draws: int, stream: int) -> Floats:
    """The mean over seeds and prompts in every resample, [draws]."""
    drawn = np.stack([_over_prompts(row[None], draws)[:, 0] for row in seeds])  # [seeds, draws]
    return _weighted_mean(drawn, draw_weights(len(seeds), draws, stream).T)


@lru_cache(maxsize=32)
def draw_weights(count: int, draws: int, stream: int = PROMPTS) -> Floats:
    """[draws, count]: how often each of `count` things is in each resample, as shares."""
    random = np.random.default_rng([count, stream])
    picked = random.integers(count, size=(draws, count)) + count * np.arange(draws)[:, None]
    occurs = np.bincount(picked.ravel(), minlength=draws * count)
    return occurs.reshape(draws, count) / count


def _num_draws(prompts: int) -> int:
    return max(200, min(DRAWS, MAX_DRAWN // max(1, prompts)))


def _over_prompts(values: Floats, draws: int) -> Floats:
    """Means of each resample of prompts, missing ones left out: [E, P] -> [draws, E]."""
    weights = draw_weights(values.shape[1], draws)
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: no prompt of the resample has a number
        return (weights @ np.where(known, values, 0.0).T) / (weights @ known.T.astype(np.float64))


def _weighted_mean(values: Floats, weights: Floats) -> Floats:
    """The mean over the first axis of what is finite; NaN where nothing is."""
    known = np.isfinite(values)
    weights = weights * known
    with np.errstate(invalid="ignore"):
        return (weights * np.where(known, values, 0.0)).sum(0) / weights.sum(0)


@dataclass(frozen=True)
class SeedCurve:
    """The evaluations of one training, prompt by prompt."""

    steps: Floats  # [E]
    seconds: Floats  # [E]
    scores: Floats  # [E, P]; P is 1 where only means are known
    kls: Floats  # [E, P]


@dataclass(frozen=True)
class Curve:
    """Means over seeds and prompts of each evaluation: [draws, E], one draw where as measured."""

    steps: Floats
    seconds: Floats
    scores: Floats
    kls: Floats


Statistic = Callable[[list[Curve]], Sequence[Floats]]
"""Curves of all settings to some numbers, each [draws]: infinity for never, NaN for unknown."""


class CurveBootstrap:
    """Statistics of learning curves of several settings, with intervals over seeds and prompts."""

    def __init__(self, settings: Sequence[Sequence[SeedCurve]]) -> None:
        self.settings = settings
        self.num_runs = sum(map(len, settings))
        widths = [seed.scores.shape[1] for seeds in settings for seed in seeds]
        self.num_prompts = min(widths, default=0)
        self.draws = _num_draws(max(widths, default=0))

    @cached_property
    def measured(self) -> list[Curve]:
        """The curves as they were measured."""
        return [_mean_curve(seeds, 1, stream=None) for seeds in self.settings]

    @cached_property
    def resampled(self) -> list[Curve]:
        """The curves in every resample of seeds and prompts."""
        enumerated = enumerate(self.settings, start=PROMPTS + 1)
        return [_mean_curve(seeds, self.draws, stream=stream) for stream, seeds in enumerated]

    def intervals(self, statistic: Statistic) -> list[Interval]:
        """Each number of a statistic as measured, with the middle 95% of its resamples."""
        values = [float(x[0]) for x in statistic(self.measured)]
        if self.num_prompts < 2 and all(len(seeds) < 2 for seeds in self.settings):
            return [Interval(value, math.nan, math.nan, self.num_runs) for value in values]
        bounds = [quantiles(numbers) for numbers in statistic(self.resampled)]
        return [Interval(v, low, high, self.num_runs) for v, (low, high) in zip(values, bounds)]


def _mean_curve(seeds: Sequence[SeedCurve], draws: int, *, stream: int | None) -> Curve:
    """The mean curve of a setting in each resample; as measured, [1, E], without a stream."""
    steps = np.unique(np.concatenate([seed.steps for seed in seeds])) if seeds else np.zeros(0)
    # [seeds, draws, E], NaN where a seed was not evaluated at a step.
    shape = len(seeds), draws, len(steps)
    fields = {name: np.full(shape, np.nan) for name in ("steps", "seconds", "scores", "kls")}
    for i, seed in enumerate(seeds):
        at = np.searchsorted(steps, seed.steps)
        fields["steps"][i][:, at] = seed.steps
        fields["seconds"][i][:, at] = seed.seconds
        for name, values in (("scores", seed.scores), ("kls", seed.kls)):
            if stream is None:
                fields[name][i][:, at] = _weighted_mean(values.T, np.ones((values.shape[1], 1)))
            else:
                fields[name][i][:, at] = _over_prompts(values, draws)
    weights = np.ones((draws, len(seeds)))
    if stream is not None and seeds:
        weights = draw_weights(len(seeds), draws, stream)
    means = {name: _weighted_mean(x, weights.T[:, :, None]) for name, x in fields.items()}
    return Curve(**_without_gaps(means))


def _without_gaps(fields: dict[str, Floats]) -> dict[str, Floats]:
    """An evaluation that none of the drawn seeds has repeats the one before it (or the first one).

    A repeated evaluation changes neither where a curve passes a KL nor when it reaches a score.
    """
    known = np.isfinite(fields["scores"])
    if known.all():
        return fields
    last_known = np.maximum.accumulate(np.where(known, np.arange(known.shape[1]), 0), axis=1)
    at = np.maximum(last_known, known.argmax(axis=1)[:, None])
    return {name: np.take_along_axis(values, at, axis=1) for name, values in fields.items()}


def score_at_kl(scores: Floats, kls: Floats, level: float) -> Floats:
    """The score where KL first passes a level, between evaluations; NaN where it never does.

    Over the last axis, [..., E] -> [...].
    """
    if kls.shape[-1] < 2:
        return np.full(kls.shape[:-1], np.nan)
    passes = (kls[..., :-1] <= level) & (level <= kls[..., 1:])
    first = passes.argmax(axis=-1)[..., None]
    kl_0, kl_1, score_0, score_1 = (
        np.take_along_axis(values, first + offset, axis=-1)[..., 0]
        for values in (kls, scores)
        for offset in (0, 1)
    )
    rise = np.where(kl_1 > kl_0, kl_1 - kl_0, 1.0)
    share = np.where(kl_1 > kl_0, (level - kl_0) / rise, 1.0)
    return np.where(passes.any(axis=-1), score_0 + share * (score_1 - score_0), np.nan)


def first_reaching(curve: Curve, target: Floats | float) -> tuple[Floats, Floats]:
    """(step, seconds) of the first evaluation at or above a score; infinity if there is none."""
    reached = curve.scores >= np.asarray(target)[..., None]
    first = reached.argmax(axis=-1)[..., None]
    step, seconds = (
        np.where(reached.any(axis=-1), np.take_along_axis(x, first, axis=-1)[..., 0], np.inf)
        for x in (curve.steps, curve.seconds)
    )
    return step, seconds
