"""How much a response repeats itself."""

from __future__ import annotations

from collections.abc import Sequence


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that have occurred before: 0 for none, near 1 for a loop.

    >>> repetition([1, 2, 1, 2, 1, 2], n=2)  # 12 21 12 21 12: three of five are repeats
    0.6
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
