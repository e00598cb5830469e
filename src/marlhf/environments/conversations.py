"""Conversations of a model with an environment, and what rewards and reports read from them.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from marlhf.data.rows import Conversation, Row
from marlhf.environments.chat_tokens import ChatTokens
from marlhf.environments.episodes import Beginning, Episodes, preflight
from marlhf.environments.protocol import ConversationError, Environment, EpisodeRecord
from marlhf.models.base import Model
from marlhf.rollout.engine import Engine, Rollout, Sampling
from marlhf.runs.evaluations import opening_length


@dataclass(frozen=True)
class Conversations:
    """How a row becomes a conversation."""

    make: Callable[[], Environment]
    chat: ChatTokens
    max_turns: int
    episode_tokens: int
    timeout: float

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
        rows: Sequence[Row],
        seeds: Sequence[int],
        engine: Engine,
        sampling: Sampling,
        starts: Sequence[int] | None = None,
        beginnings: Sequence[Beginning] = (),
    ) -> tuple[Rollout, list[list[int]], list[EpisodeRecord]]:
        """What was sampled, the tokens that the model saw first, and what became of each episode.

        Environments are reset from `starts`, the seeds of sampling unless given. With
        `beginnings` the first turns are replayed, and what is sampled follows them.
        """
        episodes = Episodes(
            self.make,
            rows,
            seeds if starts is None else starts,
            self.chat,
            max_turns=self.max_turns,
            episode_tokens=self.episode_tokens,
            timeout=self.timeout,
        )
        episodes.replay(beginnings)
        said = [begun.tokens for begun in beginnings] or [[] for _ in rows]
        texts = [[*prompt, *before] for prompt, before in zip(episodes.prompts, said)]
        limits = [limit - len(before) for limit, before in zip(episodes.limits, said)]
        rollout = engine.generate(texts, sampling, seeds, limits, episodes.reply)
        whole = [[*before, *after] for before, after in zip(said, rollout.responses)]
        return rollout, episodes.prompts, episodes.records(whole)


def scored_row(row: Row, record: EpisodeRecord | None) -> Row:
    """The row as rewards see it: of a conversation its first messages, and what followed."""
    if record is None:
        return row
    first = opening(record)
    ends = [turn.stop for turn in record.turns]
    said = Conversation(record.messages[first:], ends)
    return replace(row, prompt=record.messages[:first], conversation=said)


def opening(record: EpisodeRecord) -> int:
    """How many messages the model saw before its first turn."""
    return opening_length(record.messages, len(record.turns))


def turn_rewards(
    records: Sequence[EpisodeRecord], like: Tensor, replayed: Sequence[int] | None = None
) -> Tensor:
    """What the environment gave for each turn, at the turn's last token: [B, T].

    So many first tokens of each response were `replayed` and are not in `like`, nor their rewards.
    """
    rewards = torch.zeros(like.shape)
    for row, record in enumerate(records):
        before = 0 if replayed is None else replayed[row]
        for turn in record.turns:
            if turn.stop > before:
                rewards[row, turn.stop - before - 1] += turn.reward
    return rewards.to(like.device)


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
    if any(record.success is not None for record in records):
        metrics["success"] = mean([record.success is True for record in records])
    return {prefix + name: value for name, value in metrics.items()}
