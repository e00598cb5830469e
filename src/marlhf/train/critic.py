"""The critic's values of states, and its training. Axes: B rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from marlhf.core import Segments, masked_mean, ppo_value_loss
from marlhf.models.base import autocast
from marlhf.models.forward import token_values
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.timing import explained_variance
from marlhf.train.assign_credit import assign_credit
from marlhf.train.experience import (
    Credit,
    Experience,
    SegmentedRewards,
    count_terms,
    micro_batches,
)
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models


def critic_values(experience: Experience, models: Models, config: PPOConfig) -> Tensor:
    """The critic's value of the state before each token, [B, T]."""
    return fit_memory(models.world, partial(_critic_values, experience, models, config))


@torch.no_grad()
def _critic_values(experience: Experience, models: Models, config: PPOConfig) -> Tensor:
    sequences, world = experience.sequences, models.world
    values = torch.zeros(sequences.mask.shape, device=sequences.mask.device)
    # Twice the budget: without gradients a pass needs far less memory.
    for micro in micro_batches(sequences, 2 * config.pass_tokens, world):
        with autocast(world.device, config.precision):
            micro.add(values, token_values(models.critic, micro.sequences))
    return world.sum(values)


def values_and_critic_backward(
    experience: Experience, segmented: SegmentedRewards, models: Models, config: PPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's values, [B, T], and its loss, whose gradients are left for `update`.

    Where a batch makes one update, the pass that computes the values can also train the critic,
    which saves a forward pass: the returns of a row need the values of no other row.
    """
    sequences, world = experience.sequences, models.world
    values = torch.zeros(sequences.mask.shape, device=sequences.mask.device)
    counts = count_terms(segmented.segments)
    total_loss = torch.zeros((), device=sequences.mask.device)
    for micro in micro_batches(sequences, config.pass_tokens, world):
        with autocast(world.device, config.precision):
            new_values = token_values(models.critic, micro.sequences)
        old_values = new_values.detach()
        micro.add(values, old_values)
        segments = micro.segments(segmented.segments)
        rewards = micro.take(segmented.rewards)
        credit = assign_credit(SegmentedRewards(rewards, segments), old_values, config)
        loss = value_loss(new_values, old_values, credit.returns, segments, counts, config)
        loss = loss * micro.weight
        loss.backward()
        total_loss += loss.detach()
    return world.sum(values), {"rl/value_loss": world.sum(total_loss)}


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    segments: Segments,
    counts: Mapping[str, Tensor],
    config: PPOConfig,
) -> Tensor:
    """The critic's loss on some rows of a batch, as a part of the whole batch's mean."""
    return ppo_value_loss(
        values,
        old_values,
        returns,
        segments.mask,
        clip=config.value_clip,
        level=config.value_level,
        sigma=config.sigma,
        segments=segments,
        num_tokens=counts[config.value_level],
    )


@torch.no_grad()
def value_metrics(credit: Credit) -> dict[str, Tensor]:
    mask = credit.segments.mask
    return {
        "rl/value": masked_mean(credit.values, mask),
        "rl/explained_variance": explained_variance(credit.values, credit.returns, mask),
    }
