"""Rewards for parts of a response: at which of its tokens each is earned."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marlhf.data.rows import Conversation

FORMS = (
    "For parts of a completion return a list: one number per turn of a conversation or per line of "
    "a single response, or pairs (character, reward)."
)


def is_list(value: Any) -> bool:
    """Whether a reward is given part by part."""
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1


def place(
    value: Any,
    text: str,
    count: int,
    conversation: Conversation | None,
    anchors: Callable[[], Sequence[int]],
) -> list[tuple[int, float]]:
    """The token at which each reward of a list is earned, and the reward.

    `count` is the number of tokens, `anchors` gives the character at which each stands. Raises
    `ValueError` where the list does not fit the response.

    >>> place([1.0, -1.0], "Yes.\\nNo.", 4, None, lambda: [0, 3, 5, 7])
    [(1, 1.0), (3, -1.0)]
    >>> place([(0, 1.0)], "Yes.\\nNo.", 4, None, lambda: [0, 3, 5, 7])
    [(0, 1.0)]
    """
    items = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)
    pairs = bool(items) and all(isinstance(item, (list, tuple)) for item in items)
    if pairs and any(len(item) != 2 for item in items):
        raise ValueError(f"not every item is a pair (character, reward). {FORMS}")
    rewards = [_finite(item[1] if pairs else item) for item in items]
    if pairs and conversation is not None:
        raise ValueError("a conversation has turns: return one number per turn, or a single number")
    if pairs:
        where = [item[0] for item in items]
        for character in where:
            if isinstance(character, bool) or not isinstance(character, (int, np.integer)):
                raise ValueError(f"the place {character!r} is no character number")
            if not 0 <= character <= len(text):
                raise ValueError(f"the place {character} is outside its {len(text)} characters")
    elif conversation is not None:
        turns = conversation.turn_ends
        if len(items) != len(turns):
            raise ValueError(f"it has {len(turns)} turns, but there are {len(items)} rewards")
        return [(end - 1, reward) for end, reward in zip(turns, rewards)]
    else:
        lines = text.splitlines(keepends=True)
        if len(items) != len(lines):
            raise ValueError(f"it has {len(lines)} lines, but there are {len(items)} rewards")
        ends = np.cumsum([len(line) for line in lines]).tolist()
        where = [end - 1 - (len(x) - len(x.rstrip())) for end, x in zip(ends, lines)]
    starts = list(anchors()) if items else []
    last = count - 1
    return [(min(max(bisect_right(starts, c) - 1, 0), last), r) for c, r in zip(where, rewards)]


def at_last_tokens(scores: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """One number per row as a reward at the row's last token: [B] -> [B, T].

    >>> at_last_tokens(torch.tensor([2.0, 3.0]), [1, 3], 3)
    tensor([[2., 0., 0.],
            [0., 0., 3.]])
    """
    columns = torch.arange(width, device=scores.device)
    last = torch.tensor(lengths, device=scores.device)[:, None] - 1
    return torch.where(columns == last, scores[:, None], 0.0)


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number. {FORMS}") from None
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number
