"""Batches of conversations: an environment answers between the model's turns.

A conversation is one row of a batch. Its response has all that followed the prompt; what the
environment said is a hole in the mask.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.data import Row
from marlhf.data.rows import Conversation
from marlhf.environments import (
    ChatTokens,
    ConversationError,
    Environment,
    EpisodeRecord,
    Episodes,
    find_environment,
    preflight,
)
from marlhf.models.base import Model, Tokenizer
from marlhf.rollout.engine import Engine, Rollout, Sampling
from marlhf.runtime.distributed import World, gather_rollout
from marlhf.runtime.objects import GivenObjects
from marlhf.runtime.stage import Example


@dataclass(frozen=True)
class Conversations:
    """How a prompt becomes a conversation."""

    make: Callable[[], Environment]
    chat: ChatTokens
    max_turns: int
    episode_tokens: int
    timeout: float

    @classmethod
    def of(
        cls, config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer, world: World
    ) -> Conversations | None:
        """Those that the config asks for, checked; None where a response is a single turn."""
        if not config.environment:
            return None
        if world.size > 1 and config.vllm_url:
            raise ConversationError(
                "A vLLM server samples conversations for one training process, not for several. "
                "Start without torchrun, or leave out vllm_url."
            )
        make = objects.environment
        if make is None:
            make = find_environment(config.environment, config.code, **config.environment_options)
        limits = config.max_turns, config.episode_tokens, config.environment_timeout
        return cls(make, ChatTokens(tokenizer), *limits)

    def check(self, row: Row) -> None:
        """Refuse an environment that cannot begin with a row, or a template that cannot play."""
        limits = {"max_turns": self.max_turns, "episode_tokens": self.episode_tokens}
        preflight(self.make, row, self.chat, **limits, timeout=self.timeout)

    def check_positions(self, model: Model, name: str) -> None:
        """Refuse conversations longer than a model has positions."""
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self.episode_tokens > limit:
            raise ConversationError(
                f"A conversation may take {self.episode_tokens} tokens, but the {name} has {limit} "
                f"positions. Set episode_tokens to {limit} or less."
            )

    def play(
        self,
        examples: Sequence[Example],
        seeds: Sequence[int],
        engine: Engine,
        sampling: Sampling,
        share: Sequence[int],
        group: int,
    ) -> tuple[Rollout, list[Example]]:
        """The conversations of some rows, and their examples with what the model saw first.

        Samples of one prompt, `group` neighbours, have one seed for their environments: they begin
        in the same state.
        """
        episodes = Episodes(
            self.make,
            [examples[i].row for i in share],
            [seeds[i - i % group] for i in share],
            self.chat,
            max_turns=self.max_turns,
            episode_tokens=self.episode_tokens,
            timeout=self.timeout,
        )
        rollout = engine.generate(
            episodes.prompts, sampling, [seeds[i] for i in share], episodes.limits, episodes.reply
        )
        records = episodes.records(rollout.responses)
        played = [
            replace(examples[i], prompt=prompt, episode=record)
            for i, prompt, record in zip(share, episodes.prompts, records)
        ]
        return rollout, played


def gather_played(
    world: World, rollout: Rollout | None, played: list[Example], share: list[int], rows: int
) -> tuple[Rollout, list[Example]]:
    """The conversations of all ranks, in the order of the rows."""
    whole = gather_rollout(world, rollout, share, rows)
    if world.size == 1:
        return whole, played
    by_row = {i: e for part in world.gather_objects(list(zip(share, played))) for i, e in part}
    return whole, [by_row[i] for i in range(rows)]


def scored_row(example: Example) -> Row:
    """The row as rewards see it: of a conversation its first messages, and what followed."""
    record = example.episode
    if record is None:
        return example.row
    first = opening(record)
    ends = [turn.stop for turn in record.turns]
    said = Conversation(record.messages[first:], ends)
    return replace(example.row, prompt=record.messages[:first], conversation=said)


def opening(record: EpisodeRecord) -> int:
    """How many messages the model saw before its first turn."""
    said = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    return said[-len(record.turns)] if record.turns else len(record.messages)


def turn_rewards(records: Sequence[EpisodeRecord], like: Tensor) -> Tensor:
    """What the environment gave for each turn, at the turn's last token: [B, T]."""
    rewards = torch.zeros(like.shape)
    for row, record in enumerate(records):
        for turn in record.turns:
            rewards[row, turn.stop - 1] += turn.reward
    return rewards.to(like.device)


def turn_states(records: Sequence[EpisodeRecord], group: int, like: Tensor) -> Tensor:
    """A number for the state of each token's turn, equal within a prompt's episodes: [B, T]."""
    numbers: dict[tuple[int, str], int] = {}
    states = torch.zeros(like.shape, dtype=torch.int64)
    for row, record in enumerate(records):
        for turn in record.turns:
            key = (row // group, turn.state)
            states[row, turn.start : turn.stop] = numbers.setdefault(key, len(numbers))
    return states.to(like.device)


def episode_metrics(records: Sequence[EpisodeRecord], prefix: str = "rl/") -> dict[str, float]:
    """Turns, success, tool calls and how episodes end, as means over episodes."""

    def mean(values: Sequence[Any]) -> float:
        return sum(values) / len(values)

    metrics = {
        "turns": mean([len(record.turns) for record in records]),
        "cut_episodes": mean([r.reason in ("max_turns", "episode_tokens") for r in records]),
        "failed_episodes": mean([r.reason.startswith(("error", "timeout")) for r in records]),
    }
    if any(record.tool_calls for record in records):
        metrics["tool_calls"] = mean([record.tool_calls for record in records])
        metrics["tool_errors"] = mean([record.tool_errors for record in records])
    known = [record.success for record in records if record.success is not None]
    if known:
        metrics["success"] = mean(known)
    return {prefix + name: value for name, value in metrics.items()}
