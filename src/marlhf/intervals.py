"""The few statistics of the report, small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Interval(NamedTuple):
    """A mean with its 95% interval, and how many numbers stand behind it."""

    mean: float
    low: float
    high: float
    size: int


def interval(values: Sequence[float]) -> Interval:
    """The mean and its normal 95% interval, mean +- 1.96 s / sqrt(n), over finite values.

    The interval is about the prompts that were drawn, not about the seed of the training:
    another training may fall outside it. NaN bounds below two values.
    """
    finite = [value for value in values if math.isfinite(value)]
    count = len(finite)
    if count == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(finite) / count
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in finite) / (count - 1)
    half = 1.96 * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half, count)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """How much `after` exceeds `before` prompt by prompt.

    Pairing removes how hard each prompt is, so this interval is narrower, and fairer,
    than comparing the two means.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} prompts cannot be paired.")
    return interval([b - a for a, b in zip(before, after)])


def share_improved(before: Sequence[float], after: Sequence[float]) -> float:
    """The share of prompts whose number rose, a tie counting half."""
    pairs = [(a, b) for a, b in zip(before, after) if math.isfinite(a) and math.isfinite(b)]
    won = sum(1.0 if b > a else 0.5 if b == a else 0.0 for a, b in pairs)
    return won / len(pairs) if pairs else math.nan


def mean_by_position(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Seeds averaged prompt by prompt; None where they were not asked the same number."""
    if not rows or len({len(row) for row in rows}) != 1:
        return None
    return list(rows[0]) if len(rows) == 1 else [interval(column).mean for column in zip(*rows)]


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of `items`, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    if limit < 2:
        return list(items[-limit:]) if limit else []
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]
