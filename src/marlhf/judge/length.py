"""Win rates at equal length: judges prefer longer responses, and length is cheap to learn.

As in length-controlled AlpacaEval (Dubois et al., 2024) a logistic regression explains wins by
the difference in length, and the win rate is what it predicts for responses of equal length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from marlhf.intervals import NO_INTERVAL, Floats, Interval, bootstrap

RIDGE = 0.01
"""Weak prior on both coefficients: they stay finite where one side always wins."""
STEPS = 25
MIN_PAIRS = 10
"""With fewer, two coefficients would fit whatever there is."""
MAX_DRAWN = 4_000_000
"""Resamples times pairs: beyond it there are fewer resamples, so that memory stays small."""


def win_rate_at_equal_length(
    wins: Sequence[float], lengths_a: Sequence[int], lengths_b: Sequence[int], *, seed: int = 0
) -> Interval:
    """A's win rate with the effect of length removed, with a bootstrap interval over pairs.

    `wins` has 1 where A won, 0 where B did and 0.5 for a tie:
    P(A wins) = sigmoid(theta + phi tanh(d / std(d))), d = length of A - length of B, and the
    result is sigmoid(theta).

    >>> wins = [1] * 6 + [0] * 2 + [1] + [0] * 3  # the longer one wins 3 of 4, on either side
    >>> rate = win_rate_at_equal_length(wins, [90] * 8 + [10] * 4, [10] * 8 + [90] * 4)
    >>> round(sum(wins) / 12, 2), round(rate.mean, 2)
    (0.58, 0.5)
    """
    if len(wins) < MIN_PAIRS:
        return NO_INTERVAL
    won = np.asarray(wins, dtype=np.float64)  # [N]
    difference = np.subtract(lengths_a, lengths_b).astype(np.float64)
    scale = difference.std()
    longer = np.tanh(difference / scale) if scale > 0 else np.zeros_like(difference)

    def at_equal_length(weights: Floats) -> Floats:  # [R, N] -> [R]
        theta = np.zeros(len(weights))
        phi = np.zeros(len(weights))
        for _ in range(STEPS):  # Newton's method on two coefficients per resample
            chance = _sigmoid(theta[:, None] + phi[:, None] * longer)
            error = weights * (won - chance)
            slope = error.sum(1) - RIDGE * theta, (error * longer).sum(1) - RIDGE * phi
            spread = weights * chance * (1 - chance)
            a = spread.sum(1) + RIDGE
            b = (spread * longer).sum(1)
            c = (spread * longer**2).sum(1) + RIDGE
            determinant = a * c - b * b
            # Steps are limited: far from the optimum the curvature is almost zero.
            theta += np.clip((c * slope[0] - b * slope[1]) / determinant, -2, 2)
            phi += np.clip((a * slope[1] - b * slope[0]) / determinant, -2, 2)
        return _sigmoid(theta)

    draws = min(1000, max(100, MAX_DRAWN // len(won)))
    if len(set(wins)) == 1:  # every resample would be the same, as if it were certain
        rate = float(at_equal_length(np.ones((1, len(won))))[0])
        return Interval(rate, math.nan, math.nan, len(won))
    return bootstrap([1] * len(won), at_equal_length, draws=draws, seed=seed)


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
