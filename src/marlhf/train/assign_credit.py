"""From scored responses to the advantages of their macro actions.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.core import boundary_gae, macro_gae, moments, segment, whiten
from marlhf.spans.apply import explain_segmenter_errors
from marlhf.train.credit_choice import Measurement
from marlhf.train.experience import Credit, Experience, SegmentedRewards
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models


@torch.no_grad()
def shape_and_segment(
    experience: Experience,
    models: Models,
    config: RLConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> SegmentedRewards:
    """Token rewards (the KL penalty, and the score at the end), and the macro actions."""
    responses = experience.responses(models.vocabulary, shuffler)
    rewards = experience.token_rewards(config, kl_coef)
    with explain_segmenter_errors(config.segmenter):  # it may be the user's own code
        segments = segment(config.segmenter, responses, split_last=config.split_last)
        if experience.spans is not None or not _is_ours(config.segmenter):
            segments.validate()  # waits for the device
    return SegmentedRewards(rewards, segments)


def _is_ours(segmenter: Any) -> bool:
    """Whether a segmenter is one of this package, which are known to count as they should."""
    return type(segmenter).__module__.startswith("marlhf.core.")


@torch.no_grad()
def assign_credit(segmented: SegmentedRewards, values: Tensor, config: PPOConfig) -> Credit:
    """Advantages and returns of macro actions: the method itself."""
    rewards, segments = segmented.rewards, segmented.segments
    lambdas = {"gamma": config.gamma, "lam": config.lam, "lam_value": config.lam_value}
    if config.credit == "boundary":
        advantages, returns = boundary_gae(rewards, values, segments, **lambdas)
    else:
        advantages, returns = macro_gae(
            rewards,
            values,
            segments,
            rho=config.rho,
            sigma=config.sigma,
            pooling=config.pooling,
            **lambdas,
        )
    return Credit(rewards, segments, values, advantages, returns)


def whitened_advantages(credit: Credit, config: PPOConfig) -> Tensor:
    """Advantages at unit scale, each token or each macro action having one vote."""
    mask = credit.segments.mask
    if config.whiten == "none":
        return credit.advantages
    if config.whiten == "tokens":
        return whiten(credit.advantages, mask)
    stats = moments(credit.segments.first(credit.advantages), credit.segments.macro_mask)
    return whiten(credit.advantages, mask, stats=stats)


@torch.no_grad()
def measure_options(
    configs: Iterable[PPOConfig],
    experience: Experience,
    credit: Credit,
    models: Models,
    shuffler: torch.Generator,
) -> Measurement:
    """The advantages of a batch by every way to assign credit that is compared."""
    responses = experience.responses(models.vocabulary, shuffler)
    advantages: list[Tensor] = []
    for config in configs:
        segments = segment(config.segmenter, responses, split_last=config.split_last)
        segmented = SegmentedRewards(credit.rewards, segments)
        assigned = assign_credit(segmented, credit.values, config)
        advantages.append(whitened_advantages(assigned, config))
    return Measurement.of(torch.stack(advantages) / credit.segments.mask.sum().clamp(min=1))
