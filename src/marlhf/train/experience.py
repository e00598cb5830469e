"""A batch of responses and its scores, and what PPO and RLOO compute alike from it.

Sampling and scoring are the same for every method that learns from its own samples. The rest of a
step, from rewards to the update, is written out in `ppo.py` and `rloo.py`; here are the pieces of
it that both use: micro-batches, metrics, mini-batches.

Axes: B rows, b rows of a micro-batch, T response tokens, M macro actions, S spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.core import (
    Responses,
    Segments,
    Vocabulary,
    importance_weights,
    kl_estimate,
    masked_mean,
    shape_rewards,
)
from marlhf.models.base import autocast
from marlhf.models.forward import token_stats
from marlhf.models.sequences import Sequences, send
from marlhf.rollout import Sampling
from marlhf.rollout.engine import Rollout
from marlhf.rollout.vllm_server import VLLMServer
from marlhf.runtime.distributed import World, gather_rollout
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.optim import Named
from marlhf.runtime.stage import Example
from marlhf.runtime.timing import Clock
from marlhf.train.rl_models import Models


@dataclass(frozen=True)
class Experience:
    """A batch of responses with all scores and log-probs, before any update."""

    sequences: Sequences
    normalised_scores: Tensor  # [B]
    raw_scores: Tensor  # [B], what the reward model says
    ended: Tensor  # [B] bool
    logprobs: Tensor  # [B, T], of the policy that sampled
    ref_logprobs: Tensor  # [B, T]
    old_logprobs: Tensor | None  # [B, T], by the training pass; None where it is not needed
    spans: Tensor | None = None  # [B, S, 2], constituents, where the segmenter needs them
    eos_penalty: Tensor | float = 0.0  # [B], of responses that did not end by themselves

    @property
    def scores(self) -> Tensor:
        """Normalised scores less the penalty for a missing end, [B]."""
        return self.normalised_scores - self.eos_penalty

    def clipped_scores(self, score_clip: float | None) -> Tensor:
        """Scores as rewards, [B]. The penalty comes after clipping, which would swallow it."""
        if score_clip is None:
            return self.scores
        return self.normalised_scores.clamp(-score_clip, score_clip) - self.eos_penalty

    def token_rewards(self, config: RLConfig, kl_coef: float) -> Tensor:
        """The KL penalty of each token, and the score at the last: [B, T]."""
        logprobs = self.logprobs
        if config.async_steps and self.old_logprobs is not None:
            logprobs = self.old_logprobs  # of the policy that learns, which is not what sampled
        return shape_rewards(
            self.clipped_scores(config.score_clip),
            logprobs,
            self.ref_logprobs,
            self.sequences.mask,
            kl_coef,
            kl=config.kl_estimator,
        )

    def responses(self, vocabulary: Vocabulary, shuffler: torch.Generator) -> Responses:
        """What a segmenter sees. Each row has a seed, for segmenters that draw lengths."""
        mask = self.sequences.mask
        seeds = torch.randint(2**62, (len(mask),), generator=shuffler)
        return Responses(
            self.sequences.responses,
            mask,
            ref_logprobs=self.ref_logprobs,
            spans=self.spans,
            vocabulary=vocabulary,
            seeds=send(seeds, mask.device),
            logprobs=self.logprobs,
        )


@dataclass(frozen=True)
class SegmentedRewards:
    """The reward of each token, and the macro actions that tokens belong to."""

    rewards: Tensor  # [B, T]
    segments: Segments


@dataclass(frozen=True)
class Credit(SegmentedRewards):
    """What each macro action is credited with."""

    values: Tensor  # [B, T], of the state before each token
    advantages: Tensor  # [B, T], constant within a macro action
    returns: Tensor  # [B, T]


@torch.no_grad()
def rollout_and_score(
    examples: list[Example],
    models: Models,
    config: RLConfig,
    seeds: list[int],
    normalise: Callable[[Tensor], Tensor],
    clock: Clock,
) -> Experience:
    """Sample a response to each prompt; score them by the reward and by the reference."""
    rollout = sample_responses([e.prompt for e in examples], models, config.sampling, seeds)
    clock.mark("rollout")
    return score_rollout(examples, rollout, models, config, normalise, clock)


@torch.no_grad()
def score_rollout(
    examples: list[Example],
    rollout: Rollout,
    models: Models,
    config: RLConfig,
    normalise: Callable[[Tensor], Tensor],
    clock: Clock,
) -> Experience:
    """Score sampled responses by the reward and by the reference."""
    prompts = [e.prompt for e in examples]
    world, device = models.world, models.world.device
    # Parsers run in processes of their own, while the models score on this one.
    parse = models.parsing and models.parsing.begin(rollout.responses)
    score = partial(models.reward, prompts, rollout.responses, [e.row for e in examples])
    raw_scores = fit_memory(world, score)
    eos_penalty = config.missing_eos_penalty * (~rollout.ended).float()
    pad_id = models.tokenizer.pad_token_id
    sequences = Sequences.from_lists(prompts, rollout.responses, pad_id, device)
    ref_logprobs, old_logprobs = fit_memory(
        world, partial(reference_and_old_logprobs, sequences, models, config)
    )
    spans = send(parse(), device) if parse else None
    clock.mark("score")
    return Experience(
        sequences,
        normalise(raw_scores),
        raw_scores,
        rollout.ended,
        rollout.logprobs,
        ref_logprobs,
        old_logprobs,
        spans,
        eos_penalty,
    )


@torch.no_grad()
def reference_logprobs(sequences: Sequences, models: Models, config: RLConfig) -> Tensor:
    """Log-probs of the response tokens under the reference, [B, T], by a pass of their own."""
    logprobs = torch.zeros(sequences.mask.shape, device=sequences.mask.device)
    for micro in micro_batches(sequences, 2 * config.pass_tokens, models.world):
        with autocast(models.world.device, config.precision):
            stats = token_stats(models.reference, micro.sequences, config.sampling.scale)
        micro.add(logprobs, stats.logprobs)
    return models.world.sum(logprobs)


@torch.no_grad()
def reference_and_old_logprobs(
    sequences: Sequences, models: Models, config: RLConfig
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [B, T] of the reference, and of the policy before its updates."""
    world, device, temperature = models.world, models.world.device, config.sampling.scale
    ref_logprobs = torch.zeros(sequences.mask.shape, device=device)
    # With one update the old policy is the new one, and its log-probs need no pass of their own.
    old_logprobs = torch.zeros_like(ref_logprobs) if config.needs_old_logprobs else None
    for micro in micro_batches(sequences, 2 * config.pass_tokens, world):
        with autocast(device, config.precision):
            ref = token_stats(models.reference, micro.sequences, temperature).logprobs
            micro.add(ref_logprobs, ref)
            if old_logprobs is not None:
                old = token_stats(models.policy, micro.sequences, temperature).logprobs
                micro.add(old_logprobs, old)
    ref_logprobs = world.sum(ref_logprobs)
    return ref_logprobs, None if old_logprobs is None else world.sum(old_logprobs)


def sample_responses(
    prompts: list[list[int]],
    models: Models,
    sampling: Sampling,
    seeds: list[int],
    limits: list[int] | None = None,
) -> Rollout:
    """A response to each prompt. Each rank samples its share and then has all of them."""
    if isinstance(models.engine, VLLMServer):  # rank 0 asks it for all, and no weights are needed
        return models.engine.generate(prompts, sampling, seeds, limits)
    share, rollout = models.world.share([len(p) for p in prompts]), None
    with models.world.gathered(models.policy):
        if share:
            rollout = models.engine.generate(
                [prompts[i] for i in share],
                sampling,
                [seeds[i] for i in share],
                None if limits is None else [limits[i] for i in share],
            )
    return gather_rollout(models.world, rollout, share, len(prompts))


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, for one forward pass."""

    sequences: Sequences
    index: Tensor  # [b], which rows of the batch they are
    weight: float  # 0 for a pass that only keeps this rank in step with the others

    def take(self, x: Tensor) -> Tensor:
        """Their part of a tensor of the whole batch: [B, T] -> [b, t]."""
        return x[self.index, : self.sequences.mask.shape[1]]

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add `part` [b, t] to these rows of `x` [B, T], which a sum over ranks completes."""
        x[self.index, : self.sequences.mask.shape[1]] += part * self.weight

    def segments(self, segments: Segments) -> Segments:
        return Segments(self.take(segments.ids), self.sequences.mask)


def micro_batches(
    sequences: Sequences, token_budget: int, world: World, rows: list[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of a batch, or of some `rows` of it, as the token budget allows."""
    chosen = sequences if rows is None else sequences.rows(rows)
    for micro in world.batches(chosen.total_lengths, token_budget):
        index = micro.rows if rows is None else [rows[i] for i in micro.rows]
        where = send(torch.tensor(index), sequences.mask.device)
        yield MicroBatch(chosen.rows(micro.rows), where, micro.weight)


def mini_batches(num_rows: int, config: RLConfig, shuffler: torch.Generator) -> list[list[int]]:
    """The rows of each update of one pass over a batch, shuffled where there are several."""
    if config.num_mini_batches == 1:
        return [list(range(num_rows))]
    order = torch.randperm(num_rows, generator=shuffler)
    return [rows.tolist() for rows in order.chunk(config.num_mini_batches)]


def count_terms(segments: Segments, rows: list[int] | None = None) -> dict[str, Tensor]:
    """What a loss is a mean over: tokens, or macro actions. Of some rows, if given."""
    if rows is not None:
        where = send(torch.tensor(rows), segments.mask.device)
        segments = Segments(segments.ids[where], segments.mask[where])
    return {
        "token": segments.mask.sum().clamp(min=1),
        "macro": segments.macro_mask.sum().clamp(min=1),
    }


class MetricSums:
    """Metrics of a mini-batch, added up over micro-batches and then over ranks.

    All names are there from the start: a rank without any rows must sum the same tensors.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.sums = {name: torch.zeros((), device=device) for name in names}

    def add(self, metrics: Mapping[str, Tensor], weight: float) -> None:
        for name, value in metrics.items():
            self.sums[name] += value.detach() * weight

    def over_ranks(self, world: World) -> dict[str, Tensor]:
        return dict(zip(self.sums, world.sum(torch.stack(list(self.sums.values())))))


NO_CAP = 1e30
"""A cap on importance weights that is none, but keeps their logged maximum finite."""
POLICY_METRICS = ("rl/policy_loss", "rl/clip_fraction", "rl/approx_kl", "rl/logprob_gap")
"""What every update of a policy measures."""


@torch.no_grad()
def drift_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    sampled_logprobs: Tensor,
    segments: Segments,
    num_tokens: Tensor,
    config: RLConfig,
) -> dict[str, Tensor]:
    """How far the policy has moved in this step, and how far sampling is from training."""
    mask, change = segments.mask, logprobs - old_logprobs
    if config.ratio != "token":
        pool = segments.sum if config.ratio == "macro" else segments.mean
        change = segments.spread(pool(change))
    outside = ((change.exp() - 1).abs() > config.clip).float()
    return {
        "rl/clip_fraction": masked_mean(outside, mask, num_tokens),
        "rl/approx_kl": masked_mean(kl_estimate(old_logprobs, logprobs, "k3"), mask, num_tokens),
        "rl/logprob_gap": masked_mean((logprobs - sampled_logprobs).abs(), mask, num_tokens),
    }


def weigh_samples(
    advantages: Tensor, experience: Experience, segments: Segments, config: RLConfig
) -> Tensor:
    """Advantages [B, T] of responses that older weights sampled, as the policy would sample them.

    Each is multiplied by its truncated importance weight. Without `async_steps` it is 1.
    """
    if not config.async_steps:
        return advantages
    return advantages * _weights(experience, segments, config, config.importance_cap)


@torch.no_grad()
def staleness_metrics(
    experience: Experience, segments: Segments, config: RLConfig, age: int
) -> dict[str, Tensor]:
    """How far the weights that sampled are from the policy, and what importance weights do.

    The largest weight is from before truncation, the mean from after it.
    """
    assert experience.old_logprobs is not None
    mask = experience.sequences.mask
    counted = mask if config.ratio == "token" else segments.starts
    weights = _weights(experience, segments, config, NO_CAP)
    cap = config.importance_cap
    kl = kl_estimate(experience.logprobs, experience.old_logprobs, "k3")
    return {
        "async/age": torch.tensor(float(age)),
        "async/kl": masked_mean(kl, mask),
        "async/weight_mean": masked_mean(weights.clamp(max=cap), counted),
        "async/weight_max": weights.max(),
        "async/truncated": masked_mean((weights > cap).float(), counted),
    }


def _weights(experience: Experience, segments: Segments, config: RLConfig, cap: float) -> Tensor:
    assert experience.old_logprobs is not None
    return importance_weights(
        experience.old_logprobs,
        experience.logprobs,
        segments.mask,
        cap=cap,
        ratio=config.ratio,
        segments=segments,
    )


def must_be_finite(experience: Experience, credit: Credit) -> Named:
    """What would spread NaN or infinity to the weights."""
    return [
        ("the scores", experience.scores),
        ("the reference's log-probs", experience.ref_logprobs),
        ("the critic's values", credit.values),
        ("the rewards", credit.rewards),
    ]


@torch.no_grad()
def batch_metrics(
    experience: Experience, credit: Credit, models: Models, kl_coef: float
) -> dict[str, Tensor]:
    """Metrics of a batch of responses, all still on the device."""
    mask = experience.sequences.mask
    kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0.0).sum(dim=1)
    lengths = mask.sum(dim=1).float()
    num_macros = credit.segments.macro_mask.sum().float()
    metrics = {
        "rl/score": experience.scores.mean(),
        "rl/score_std": experience.scores.std(correction=0),
        "rl/reward": credit.rewards.sum(dim=1).mean(),
        "rl/kl": kl.mean(),
        "rl/kl_coef": torch.tensor(kl_coef),
        "rl/length": lengths.mean(),
        "rl/ended": experience.ended.float().mean(),
        "rl/entropy": -masked_mean(experience.logprobs, mask),
        "rl/macro_length": lengths.sum() / num_macros.clamp(min=1),
        "rl/advantage_norm": torch.linalg.vector_norm(credit.advantages),
        "rl/q_norm": torch.linalg.vector_norm(credit.returns),
    }
    latest = models.reward.latest
    if len(latest) > 1:
        metrics |= {f"rewards/{name}": mean for name, mean in latest.items()}
    return metrics


def mean_metrics(updates: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each metric over the updates of a step."""
    return {name: torch.stack([u[name] for u in updates]).mean() for name in updates[0]}
