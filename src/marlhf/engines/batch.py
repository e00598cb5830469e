"""Responses as engines store them: rows of groups, of episodes in steps, of conversations in turns.

Axes: B rows, T response tokens, E episodes, S steps of the longest episode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlhf.core import Segments
from marlhf.errors import MarlhfError


class EngineError(MarlhfError, ValueError):
    """An engine's configuration that cannot work with macro actions, and the remedy."""


@dataclass(frozen=True)
class EngineBatch:
    """Responses as an engine stores them. What an engine cannot see is None."""

    rewards: Tensor  # [B, T], of tokens, any KL penalty included
    mask: Tensor  # [B, T], not 0 on tokens that the policy wrote
    values: Tensor | None = None  # [B, T], of the state before each token
    tokens: Tensor | None = None  # [B, T] int64
    ref_logprobs: Tensor | None = None  # [B, T], of the reference
    logprobs: Tensor | None = None  # [B, T], of the policy that sampled
    groups: Sequence[Any] | None = None  # [B], equal for responses to one prompt
    episodes: EpisodeSteps | None = None  # where an episode has several rows
    prompts: Sequence[Sequence[int]] | None = None  # [B], tokens before each response
    turn_rewards: Sequence[Any] | None = None  # [B], a number for each turn
    turn_states: Sequence[Any] | None = None  # [B], a name for each turn's state


@dataclass(frozen=True)
class EpisodeSteps:
    """Rows that are steps of episodes, and how an episode becomes one row.

    >>> episodes = EpisodeSteps.of(["a", "b", "a"], [0, 0, 1])
    >>> episodes.join(torch.tensor([[1.0], [2.0], [3.0]]))
    tensor([[1., 0., 3., 0.],
            [2., 0., 0., 0.]])
    """

    episode: Tensor  # [B] int64, counted from 0
    step: Tensor  # [B] int64, counted from 0 within the episode

    @classmethod
    def of(cls, ids: Sequence[Any], steps: Sequence[int]) -> EpisodeSteps:
        """From an episode's name and a step's number for each row, in any order of rows."""
        (row, times), *_ = Counter(zip(ids, steps, strict=True)).most_common(1)
        if times > 1:
            raise EngineError(f"Episode {row[0]} has {times} rows for its step {row[1]}.")
        step, taken = torch.zeros(len(ids), dtype=torch.int64), Counter()
        for i in sorted(range(len(ids)), key=lambda i: steps[i]):
            step[i] = taken[ids[i]]
            taken[ids[i]] += 1
        return cls(number(ids), step)

    @property
    def last_steps(self) -> Tensor:
        """The number of the last step of each row's episode: [B] int64."""
        last = torch.zeros_like(self.step).scatter_reduce(0, self.episode, self.step, "amax")
        return last[self.episode]

    def join(self, x: Tensor) -> Tensor:
        """One row per episode, [B, T] -> [E, S * (T + 1)].

        The empty column behind each step is a hole in the mask, which no macro action spans.
        """
        shape = (int(self.episode.max()) + 1, int(self.step.max()) + 1, x.shape[1] + 1)
        joined = x.new_zeros(shape)
        joined[self.episode, self.step, :-1] = x
        return joined.flatten(1)

    def split(self, x: Tensor) -> Tensor:
        """The way back: [E, S * (T + 1)] -> [B, T]."""
        steps = int(self.step.max()) + 1
        return x.unflatten(1, (steps, -1))[self.episode, self.step, :-1]


def number(names: Sequence[Any]) -> Tensor:
    """Equal names as equal numbers, counted from 0: [B] int64."""
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def move_to_policy_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards with those of masked tokens moved to the last policy token before them: [B, T].

    Engines put a reward on the last token of a turn or response, which may be tool output or an EOS
    that the policy did not write. Rewards before the first policy token move to that one. Without
    any they are lost.

    >>> mask = torch.tensor([[False, True, True, False]])
    >>> move_to_policy_tokens(torch.tensor([[1.0, 2.0, 0.0, 4.0]]), mask)
    tensor([[0., 3., 4., 0.]])
    """
    if not mask.shape[1]:
        return rewards
    position = torch.arange(mask.shape[1], device=mask.device)
    before = torch.where(mask, position, -1).cummax(dim=1).values  # [B, T]
    first = mask.int().argmax(dim=1, keepdim=True)
    target = torch.where(before < 0, first, before)
    return torch.zeros_like(rewards).scatter_add(1, target, rewards) * mask


def place_turn_rewards(rewards: Sequence[Any], mask: Tensor) -> Tensor:
    """One reward per turn, at the last token of each: [B, T].

    >>> place_turn_rewards([[1.0, 2.0]], torch.tensor([[True, True, False, True]]))
    tensor([[0., 1., 0., 2.]])
    """
    turns = _turns(mask)
    _check_turns("turn_rewards", rewards, turns)
    placed = torch.zeros_like(mask, dtype=torch.float32)
    placed[turns.ends] = placed.new_tensor([float(x) for of_row in rewards for x in of_row])
    return placed


def turn_states(batch: EngineBatch, groups: Sequence[int], mask: Tensor) -> Tensor:
    """A number for the state in which each turn was taken, equal within a group: [B, T].

    States have the names that the batch gives them. Otherwise the state of a turn is what the
    policy read last: the tokens since its previous turn, or the prompt.
    """
    turns, names = _turns(mask), batch.turn_states
    if names is not None:
        _check_turns("turn_states", names, turns)
    numbers: dict[Any, int] = {}
    states = torch.zeros_like(mask, dtype=torch.int64)
    for row, (group, starts, ends) in enumerate(zip(groups, turns.starts, turns.ends)):
        read = () if batch.prompts is None else tuple(batch.prompts[row])
        starts, ends = starts.nonzero().flatten().tolist(), ends.nonzero().flatten().tolist()
        for turn, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if turn and names is None:
                assert batch.tokens is not None
                read = tuple(batch.tokens[row, ends[turn - 1] + 1 : start].tolist())
            key = (group, read if names is None else names[row][turn])
            states[row, start : end + 1] = numbers.setdefault(key, len(numbers))
    return states


def _turns(mask: Tensor) -> Segments:
    """Tokens without a hole between them."""
    return Segments.from_starts(torch.zeros_like(mask), mask)


def _check_turns(name: str, given: Sequence[Any], turns: Segments) -> None:
    for row, (entries, count) in enumerate(zip(given, turns.starts.sum(dim=1).tolist())):
        if not isinstance(entries, list | tuple) or len(entries) != count:
            raise EngineError(
                f"Row {row} has {count} turns, and its {name} are {entries!r:.80}. Give a list "
                "with an entry per turn, and only for turns that are left where a response is cut."
            )
