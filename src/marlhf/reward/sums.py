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
def each_line(prompts: Sequence[str], completions: Sequence[str]) -> list[list[float]]:
    """For each line 1 if it follows from the line before it, else 0: rewards with a place.

    >>> each_line(["7+2413\\n"], ["a7+2=9\\nb9+4=4\\nc4+1=5"])
    [[1.0, 0.0, 1.0]]
    """
    rewards: list[list[float]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        lines = completion.splitlines()
        right = right_lines(prompt, "\n".join(lines)) + [False] * len(lines)
        rewards.append([float(each) for each in right[: len(lines)]])
    return rewards


@reward_function
def share_right(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The share of lines that follow from the lines before them: a dense reward beside `solved`.

    >>> share_right(["7+2413\\n"], ["a7+2=9\\nb9+4=3\\nc3+1=5"])[0] * NUM_LINES
    2.0
    """
    pairs = zip(prompts, completions, strict=True)
    return [sum(right_lines(*pair)) / NUM_LINES for pair in pairs]
