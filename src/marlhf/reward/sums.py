"""Rewards for the offline task of chained sums, `marlhf.data.sums`.

reward_funcs: ["marlhf.reward.sums:solved"]
"""

from __future__ import annotations

from collections.abc import Sequence

from marlhf.data.sums import NUM_LINES, first_wrong_line, right_lines
from marlhf.reward.functions import reward_function


@reward_function
def solved(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """1 where every line is right, and so is the answer, else 0.

    The answer alone would not do: one digit is right by chance once in ten.

    >>> solved(["7+2413\\n"], ["a7+2=9"])
    [0.0]
    """
    pairs = zip(prompts, completions, strict=True)
    return [float(first_wrong_line(*pair) is None) for pair in pairs]


@reward_function
def share_right(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The share of lines that follow from the lines before them: a dense reward beside `solved`.

    >>> share_right(["7+2413\\n"], ["a7+2=9\\nb9+4=3\\nc3+1=5"])[0] * NUM_LINES
    2.0
    """
    pairs = zip(prompts, completions, strict=True)
    return [sum(right_lines(*pair)) / NUM_LINES for pair in pairs]
