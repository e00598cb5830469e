"""Batches of conversations: an environment answers between the model's turns.

A conversation is one row of a batch. Its response has all that followed the prompt; what the
environment said is a hole in the mask.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.environments import (
    Beginning,
    ChatTokens,
    ConversationError,
    Conversations,
    EpisodeRecord,
    find_environment,
)
from marlhf.models.base import Tokenizer
from marlhf.rollout.engine import Engine, Rollout, Sampling
from marlhf.runtime.distributed import World, gather_rollout
from marlhf.runtime.stage import Example, GivenObjects


def conversations_of(
    config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer, world: World
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
    return Conversations(make, ChatTokens(tokenizer, raw=config.raw_turns), *limits)


def play_share(
    conversations: Conversations,
    examples: Sequence[Example],
    seeds: Sequence[int],
    engine: Engine,
    sampling: Sampling,
    share: Sequence[int],
    group: int,
    beginnings: Sequence[Beginning] = (),
) -> tuple[Rollout, list[Example]]:
    """The conversations of some rows, and their examples with what the model saw first.

    Samples of one prompt, `group` neighbours, have one seed for their environments: they begin
    in the same state.
    """
    chosen = [beginnings[i] for i in share] if beginnings else []
    starts = [begun.seed for begun in chosen] or [seeds[i - i % group] for i in share]
    rollout, prompts, records = conversations.play(
        [examples[i].row for i in share],
        [seeds[i] for i in share],
        engine,
        sampling,
        starts,
        chosen,
    )
    played = [
        replace(examples[i], prompt=prompt, episode=record)
        for i, prompt, record in zip(share, prompts, records)
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


def turn_states(records: Sequence[EpisodeRecord], group: int, like: Tensor) -> Tensor:
    """A number for the state of each token's turn, equal within a prompt's episodes: [B, T]."""
    numbers: dict[tuple[int, str], int] = {}
    states = torch.zeros(like.shape, dtype=torch.int64)
    for row, record in enumerate(records):
        for turn in record.turns:
            key = (row // group, turn.state)
            states[row, turn.start : turn.stop] = numbers.setdefault(key, len(numbers))
    return states.to(like.device)
