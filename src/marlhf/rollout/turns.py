"""Conversations as they grow, whatever samples their turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from marlhf.data.collate import pad_right
from marlhf.models.sequences import send
from marlhf.rollout.engine import Reply, Rollout

MAX_WORKERS = 256
"""Replies that are waited for at the same time. Most of them wait for something themselves."""


class Conversations:
    """The responses of a batch: turns of the model, and what the world said in between.

    >>> talk = Conversations([[5]], limits=[4], max_new_tokens=2)
    >>> talk.add_turn(0, [7, 1], [-0.5, -0.1]), talk.add_reply(0, [8]), talk.turn_limit(0)
    (True, True, 1)
    >>> talk.add_turn(0, [9], [-0.2])  # and full
    False
    >>> talk.texts, talk.sampled
    ([[5, 7, 1, 8, 9]], [[True, True, False, True]])
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], max_new_tokens: int
    ) -> None:
        self.prompts, self.limits, self.max_new_tokens = prompts, limits, max_new_tokens
        self.texts = [list(prompt) for prompt in prompts]  # with the responses so far
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.sampled: list[list[bool]] = [[] for _ in prompts]

    def used(self, row: int) -> int:
        """Tokens of a response so far."""
        return len(self.sampled[row])

    def turn_limit(self, row: int) -> int:
        """The most tokens of a row's next turn."""
        return min(self.max_new_tokens, self.limits[row] - self.used(row))

    def add_turn(self, row: int, tokens: list[int], logprobs: list[float]) -> bool:
        """Whether there is room for more, so that the world is to be asked."""
        self._add(row, tokens, logprobs, sampled=True)
        return self.used(row) < self.limits[row]

    def add_reply(self, row: int, reply: list[int] | None) -> bool:
        """Whether the conversation goes on. A reply that leaves no room for a turn ends it."""
        if reply is None or self.used(row) + len(reply) >= self.limits[row]:
            return False
        self._add(row, reply, [0.0] * len(reply), sampled=False)
        return True

    def rollout(self, end_tokens: Sequence[int], device: torch.device | str) -> Rollout:
        """Every conversation ends with a turn, so its last token tells how that ended."""
        responses = [text[len(p) :] for text, p in zip(self.texts, self.prompts)]
        ended = torch.tensor([response[-1] in end_tokens for response in responses])
        sampled, there = pad_right(self.sampled, 0)
        logprobs = torch.zeros(sampled.shape)
        logprobs[there] = torch.tensor([x for row in self.logprobs for x in row])
        on_device = (send(x, device) for x in (logprobs, ended, sampled.bool()))
        return Rollout(responses, *on_device)

    def _add(self, row: int, tokens: list[int], logprobs: list[float], *, sampled: bool) -> None:
        self.texts[row] += tokens
        self.logprobs[row] += logprobs
        self.sampled[row] += [sampled] * len(tokens)


def converse_in_rounds(
    conversations: Conversations,
    sample_turns: Callable[[list[int]], Sequence[tuple[list[int], list[float]]]],
    ask: Callable[[dict[int, list[int]]], list[list[int] | None]],
) -> None:
    """All conversations turn by turn, each round once the slowest of the last one is done.

    `sample_turns` gives tokens and log-probs of the next turns of some rows; `ask` the replies to
    the turns of some rows.
    """
    rows = list(range(len(conversations.texts)))
    while rows:
        turns = dict(zip(rows, sample_turns(rows), strict=True))
        asked = {
            row: tokens
            for row, (tokens, logprobs) in turns.items()
            if conversations.add_turn(row, tokens, logprobs)
        }
        replies = ask(asked) if asked else []
        rows = [row for row, reply in zip(asked, replies) if conversations.add_reply(row, reply)]


def ask_all(reply: Reply, turns: dict[int, list[int]]) -> list[list[int] | None]:
    """The replies to the turns of some rows, all of which are asked for at once."""
    pool = ThreadPoolExecutor(min(len(turns), MAX_WORKERS), thread_name_prefix="reply")
    try:
        return list(pool.map(reply, turns.keys(), turns.values()))
    finally:
        pool.shutdown(cancel_futures=True)
