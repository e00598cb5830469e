"""What a batch of responses is and was worth, before anyone learns from it.

Sampling, scoring, and cutting into macro actions: the half of a step that PPO and its critic-free
kin share.

Axes: B rows, T response tokens, M macro actions, S spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf.configs.rl import RLConfig
from marlhf.core import (
    Responses,
    Segments,
    Vocabulary,
    kl_estimate,
    masked_mean,
    shape_rewards,
)
from marlhf.models.base import autocast
from marlhf.models.forward import Sequences, send, token_stats
from marlhf.rollout import Sampling
from marlhf.rollout.engine import Rollout
from marlhf.spans.apply import apply_segmenter
from marlhf.train.distributed import gather_rollout
from marlhf.train.rl_models import Models
from marlhf.train.stage import Example
from marlhf.train.timing import Clock


@dataclass(frozen=True)
class Experience:
    """A batch of responses and what everyone thinks of them, before any update."""

    sequences: Sequences
    scores: Tensor  # [B], normalised, with the penalty for a missing end
    raw_scores: Tensor  # [B], what the reward model says
    ended: Tensor  # [B] bool
    logprobs: Tensor  # [B, T], of the policy that sampled
    ref_logprobs: Tensor  # [B, T]
    old_logprobs: Tensor | None  # [B, T], by the training pass; None when one update follows
    spans: Tensor | None = None  # [B, S, 2], constituents, where the rule follows them


@dataclass(frozen=True)
class Decisions:
    """What was decided as one, and what each token was rewarded with."""

    rewards: Tensor  # [B, T]
    segments: Segments


@dataclass(frozen=True)
class Credit(Decisions):
    """Who earned what."""

    values: Tensor  # [B, T], of the state before each token
    advantages: Tensor  # [B, T], constant within a macro action
    returns: Tensor  # [B, T]


@torch.no_grad()
def collect(
    examples: list[Example],
    models: Models,
    config: RLConfig,
    seeds: list[int],
    normalise: Callable[[Tensor], Tensor],
    clock: Clock,
) -> Experience:
    """Sample, then ask reward model and reference."""
    prompts = [e.prompt for e in examples]
    world, device = models.world, models.world.device
    rollout = sample(prompts, models, config.sampling, seeds)
    clock.mark("rollout")
    parse = models.parsing and models.parsing.begin(rollout.responses)  # while all others score
    raw_scores = models.reward(prompts, rollout.responses, [e.row for e in examples])
    scores = normalise(raw_scores) - config.missing_eos_penalty * (~rollout.ended).float()
    pad_id, temperature = models.tokenizer.pad_token_id, config.sampling.scale
    sequences = Sequences.from_lists(prompts, rollout.responses, pad_id, device)
    # With one update the old policy is the new one, and its log-probs need no pass of their own.
    names = ("ref",) if config.one_update else ("ref", "old")
    found = {name: torch.zeros(sequences.mask.shape, device=device) for name in names}
    for micro in world.batches(sequences.total_lengths, 2 * config.token_budget):
        part = sequences.rows(micro.rows)
        where, width = send(torch.tensor(micro.rows), device), part.mask.shape[1]
        with autocast(device, config.precision):
            answers = {"ref": token_stats(models.reference, part, temperature).logprobs}
            if "old" in found:
                answers["old"] = token_stats(models.policy, part, temperature).logprobs
        for name, answer in answers.items():
            found[name][where, :width] += answer * micro.weight
    found = {name: world.sum(x) for name, x in found.items()}
    spans = send(parse(), device) if parse else None
    clock.mark("score")
    return Experience(
        sequences,
        scores,
        raw_scores,
        rollout.ended,
        rollout.logprobs,
        found["ref"],
        found.get("old"),
        spans,
    )


def sample(
    prompts: list[list[int]], models: Models, sampling: Sampling, seeds: list[int]
) -> Rollout:
    """A response to each prompt, by all processes together."""
    mine, rollout = models.world.share([len(p) for p in prompts]), None
    with models.world.gathered(models.policy):
        if mine:
            rollout = models.engine.generate(
                [prompts[i] for i in mine], sampling, [seeds[i] for i in mine]
            )
    return gather_rollout(models.world, rollout, mine, len(prompts))


@torch.no_grad()
def decide(
    experience: Experience,
    table: Vocabulary,
    config: RLConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Decisions:
    """Rewards of tokens, and the macro actions that they are cut into."""
    sequences = experience.sequences
    seeds = torch.randint(2**62, (len(sequences.mask),), generator=shuffler)
    responses = Responses(
        sequences.responses,
        sequences.mask,
        ref_logprobs=experience.ref_logprobs,
        spans=experience.spans,
        vocabulary=table,
        seeds=send(seeds, sequences.mask.device),
    )
    rewards = shape_rewards(
        experience.scores,
        experience.logprobs,
        experience.ref_logprobs,
        sequences.mask,
        kl_coef,
        kl=config.kl_estimator,
        score_clip=config.score_clip,
    )
    segments = apply_segmenter(config.segmenter, responses, split_last=config.split_last)
    return Decisions(rewards, segments)


@torch.no_grad()
def drift(
    logprobs: Tensor,
    old: Tensor,
    sampled: Tensor,
    segments: Segments,
    num_tokens: Tensor,
    config: RLConfig,
) -> dict[str, Tensor]:
    """How far the policy has moved in this step, and how far sampling is from training."""
    mask, change = segments.mask, logprobs - old
    if config.ratio != "token":
        pool = segments.sum if config.ratio == "macro" else segments.mean
        change = segments.spread(pool(change))
    outside = ((change.exp() - 1).abs() > config.clip).float()
    return {
        "clip_fraction": masked_mean(outside, mask, num_tokens),
        "approx_kl": masked_mean(kl_estimate(old, logprobs, "k3"), mask, num_tokens),
        "logprob_gap": masked_mean((logprobs - sampled).abs(), mask, num_tokens),
    }


def count(segments: Segments) -> dict[str, Tensor]:
    """What a loss is a mean over: tokens, or macro actions."""
    return {
        "token": segments.mask.sum().clamp(min=1),
        "macro": segments.macro_mask.sum().clamp(min=1),
    }


def reward_parts(models: Models) -> dict[str, Tensor]:
    """The mean of each reward, where there are several."""
    latest = models.reward.latest
    return {f"rewards/{name}": x for name, x in latest.items()} if len(latest) > 1 else {}
