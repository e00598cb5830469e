"""A batch of responses and its scores, and what PPO and RLOO compute alike from it.

Scoring is the same for every method that learns from its own samples. The rest of a step, from
rewards to losses, is written out in `ppo.py` and `rloo.py`; here are the pieces of it that both
use: micro-batches, importance weights, metrics.

Axes: B rows, b rows of a micro-batch, T response tokens, M macro actions, S spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from marlhf.config.rl import Ratio, RLConfig
from marlhf.core import (
    Responses,
    Segmenter,
    Segments,
    Vocabulary,
    at_last_token,
    importance_weights,
    kl_estimate,
    masked_mean,
    moments,
    needs,
    overlong_penalty,
    whiten,
)
from marlhf.core.losses import pool_ratio
from marlhf.environments import EpisodeRecord, episode_metrics, scored_row, turn_rewards
from marlhf.models.base import Model, loaded
from marlhf.models.sequences import Sequences, send
from marlhf.rollout.engine import Rollout
from marlhf.runtime.distributed import World
from marlhf.runtime.stage import Example
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
    score_clip: float | None = None
    stale: bool = False  # sampled by other weights than those that learn
    earned: Tensor | None = None  # [B, T], parts of the normalised scores that have a place
    episodes: Sequence[EpisodeRecord] | None = None  # with an environment
    # [B, T], where a segmenter or the choice of boundaries needs them
    entropy: Tensor | None = None
    values: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """True on response tokens, [B, T]."""
        return self.sequences.mask

    @property
    def scores(self) -> Tensor:
        """Normalised scores less the penalty for a missing end, [B]."""
        return self.normalised_scores - self.eos_penalty

    @property
    def clipped_scores(self) -> Tensor:
        """Scores as rewards, [B]. The penalty comes after clipping, which would swallow it."""
        if self.score_clip is None:
            return self.scores
        return self.normalised_scores.clamp(-self.score_clip, self.score_clip) - self.eos_penalty

    @property
    def token_scores(self) -> Tensor:
        """Scores as rewards: [B], at the end, or [B, T], where parts were earned on the way."""
        if self.earned is None:
            return self.clipped_scores
        return self.earned + at_last_token(self.clipped_scores - self.earned.sum(dim=1), self.mask)

    @property
    def policy_logprobs(self) -> Tensor:
        """[B, T], of the policy that learns, by whose KL rewards are reduced."""
        return self.old_logprobs if self.stale and self.old_logprobs is not None else self.logprobs

    def responses(self, vocabulary: Vocabulary, shuffler: torch.Generator) -> Responses:
        """What a segmenter sees. Each row has a seed, for segmenters that draw lengths."""
        seeds = torch.randint(2**62, (len(self.mask),), generator=shuffler)
        return Responses(
            self.sequences.responses,
            self.mask,
            ref_logprobs=self.ref_logprobs,
            spans=self.spans,
            vocabulary=vocabulary,
            seeds=send(seeds, self.mask.device),
            logprobs=self.logprobs,
            entropy=self.entropy,
            values=self.values,
        )

    def micro_batches(self, models: Models, rows: list[int] | None = None) -> Iterator[MicroBatch]:
        """Parts of the batch, or of some of its rows, for passes with gradients."""
        return micro_batches(self.sequences, models.pass_tokens, models.world, rows)

    def critic_values(self, models: Models) -> Tensor:
        """The critic's value of the state before each token, [B, T], without gradients."""
        return all_values(self.sequences, models)

    def sample_weights(self, segments: Segments, ratio: Ratio, cap: float) -> Tensor | float:
        """Truncated importance weights of responses that older weights sampled, [B, T]; else 1."""
        if not self.stale:
            return 1.0
        assert self.old_logprobs is not None
        return importance_weights(
            self.old_logprobs, self.logprobs, self.mask, cap=cap, ratio=ratio, segments=segments
        )

    def response_tokens(self) -> list[list[int]]:
        """The tokens of each response, without padding."""
        rows = self.sequences.responses.tolist()
        return [row[:length] for row, length in zip(rows, self.sequences.lengths)]

    def sampled_tokens(self) -> list[list[int]]:
        """The tokens of each response that the policy sampled."""
        rows, masks = self.sequences.responses.tolist(), self.mask.tolist()
        return [[t for t, own in zip(row, mask) if own] for row, mask in zip(rows, masks)]


@dataclass(frozen=True)
class Credit:
    """What each macro action is credited with."""

    rewards: Tensor  # [B, T]
    segments: Segments
    values: Tensor  # [B, T], of the state before each token
    advantages: Tensor  # [B, T], constant within a macro action
    returns: Tensor  # [B, T]

    def whitened(self, how: Literal["tokens", "macros", "none"]) -> Tensor:
        """Advantages at unit scale, weighting tokens or macro actions equally."""
        if how == "none":
            return self.advantages
        stats = None
        if how == "macros":
            stats = moments(self.segments.first(self.advantages), self.segments.macro_mask)
        return whiten(self.advantages, self.segments.mask, stats=stats)

    @torch.no_grad()
    def value_metrics(self) -> dict[str, Tensor]:
        mask = self.segments.mask
        return {
            "rl/value": masked_mean(self.values, mask),
            "rl/explained_variance": explained_variance(self.values, self.returns, mask),
        }

    def reach(self, lam: float | Literal["adaptive"], alpha: float) -> Tensor:
        """Over how many tokens credit is passed back on average, at most a whole response."""
        mask = self.segments.mask
        length = mask.sum() / len(mask)
        if lam == "adaptive":
            return length * min(alpha, 1.0)
        macro_length = mask.sum() / self.segments.macro_mask.sum().clamp(min=1)
        return length if lam == 1 else torch.minimum(length, macro_length / (1 - lam))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of returns that values explain: 1 is all, 0 no more than their mean."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    return 1 - variance(returns - values) / variance(returns).clamp(min=1e-8)


class RolloutScorer:
    """Scores responses by the reward and by the reference."""

    def __init__(self, models: Models, config: RLConfig) -> None:
        self.models, self.score_clip = models, config.score_clip
        self.missing_eos_penalty = config.missing_eos_penalty
        self.needs_old_logprobs, self.stale = config.needs_old_logprobs, config.async_steps > 0
        self.overlong, self.overlong_penalty = config.overlong, config.overlong_penalty
        self.reads_entropy, self.reads_values = False, False
        self.provide_for([config.segmenter])
        self.mean, self.std = 0.0, 1.0
        """Of the starting policy's scores, with `normalize_scores`."""

    def provide_for(self, rules: Iterable[Segmenter]) -> None:
        """Compute what these rules read of the policy or the critic, from now on."""
        for rule in rules:
            self.reads_entropy |= needs(rule, "entropy")
            self.reads_values |= needs(rule, "values")

    def normalise(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.std

    @torch.no_grad()
    def __call__(
        self,
        examples: Sequence[Example],
        rollout: Rollout,
        prefixes: Sequence[list[int]] | None = None,
        *,
        reference: bool = True,
    ) -> Experience:
        """The experience of a batch; of what was sampled after `prefixes` of responses, if given.

        The reward always sees a whole response, the log-probs are of what was sampled. Without a
        pass of the `reference` the policy's stand in for its own, so that the KL is 0.
        """
        models, world = self.models, self.models.world
        prompts, responses = [e.prompt for e in examples], rollout.responses
        whole = responses if prefixes is None else _joined(prefixes, responses)
        # Parsers run in processes of their own, while the models score on this one.
        parse = models.parsing and prefixes is None and models.parsing.begin(responses)
        rows = [scored_row(e.row, e.episode) for e in examples]
        raw = models.fit_memory(partial(models.reward, prompts, whole, rows))
        before = prompts if prefixes is None else _joined(prompts, prefixes)
        sequences = models.sequences(before, responses, rollout.sampled)
        episodes = [e.episode for e in examples if e.episode is not None] or None
        raw = raw.to(sequences.mask.device)  # zeros of a CPU, where only an environment rewards
        earned = self._earned(raw, sequences, prefixes, episodes)
        if earned is not None:
            raw = earned.sum(dim=1) if raw.ndim == 2 else raw + earned.sum(dim=1)
        ref_logprobs = rollout.logprobs
        if reference:
            ref_logprobs = all_logprobs(models.reference, sequences, models)
        old_logprobs = None
        if self.needs_old_logprobs and prefixes is None:
            old_logprobs = all_logprobs(models.policy, sequences, models)
        # Passes of their own: with entropy, log-probs of the same pass may round differently.
        entropy = values = None
        if self.reads_entropy and prefixes is None:
            entropy = all_entropy(sequences, models)
        if self.reads_values and prefixes is None:
            values = all_values(sequences, models)
        penalty = self.missing_eos_penalty * (~rollout.ended).float()
        if self.overlong is not None:
            begin, end = (share * models.sampling.max_new_tokens for share in self.overlong)
            lengths = send(torch.tensor([float(len(x)) for x in whole]), penalty.device)
            penalty += overlong_penalty(lengths, begin, end, most=self.overlong_penalty)
        return Experience(
            sequences,
            self.normalise(raw),
            raw,
            rollout.ended,
            rollout.logprobs,
            ref_logprobs,
            old_logprobs,
            send(parse(), world.device) if parse else None,
            penalty,
            self.score_clip,
            self.stale and prefixes is None,
            None if earned is None else earned / self.std,
            episodes,
            entropy,
            values,
        )

    @staticmethod
    def _earned(
        raw: Tensor,
        sequences: Sequences,
        prefixes: Sequence[list[int]] | None,
        episodes: Sequence[EpisodeRecord] | None,
    ) -> Tensor | None:
        """Rewards with a place among the sampled tokens, [B, T]; None where there are none."""
        earned, lengths = None, [len(p) for p in prefixes or [()] * len(raw)]
        if raw.ndim == 2:
            first = torch.tensor(lengths, device=raw.device)
            columns = torch.arange(sequences.mask.shape[1], device=raw.device) + first[:, None]
            inside = columns.clamp(max=raw.shape[1] - 1)
            earned = torch.where(sequences.present, raw.gather(1, inside), 0.0)
        if episodes is not None:
            by_turn = turn_rewards(episodes, sequences.mask, lengths)
            earned = by_turn if earned is None else earned + by_turn
        return earned


def _joined(first: Sequence[list[int]], second: Sequence[list[int]]) -> list[list[int]]:
    return [[*a, *b] for a, b in zip(first, second)]


def all_logprobs(model: Model, sequences: Sequences, models: Models) -> Tensor:
    """Log-probs of the response tokens under a model, [B, T], without gradients."""
    with loaded(model):
        return _pass_over(sequences, models, partial(models.logprobs, model))


def all_values(sequences: Sequences, models: Models) -> Tensor:
    """The critic's value of the state before each token, [B, T], without gradients."""
    return _pass_over(sequences, models, models.values)


def all_entropy(sequences: Sequences, models: Models) -> Tensor:
    """The entropy of the policy's choice of each response token, [B, T], without gradients."""
    return _pass_over(sequences, models, models.entropy)


def _pass_over(
    sequences: Sequences, models: Models, compute: Callable[[Sequences], Tensor]
) -> Tensor:
    def whole() -> Tensor:
        result = torch.zeros(sequences.mask.shape, device=sequences.mask.device)
        # Twice the budget: without gradients a pass needs far less memory.
        for micro in micro_batches(sequences, 2 * models.pass_tokens, models.world):
            micro.add(result, compute(micro.sequences))
        return models.world.sum(result)

    with torch.no_grad():
        return models.fit_memory(whole)


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

    def old_logprobs(self, experience: Experience, logprobs: Tensor) -> Tensor:
        """Of the policy before its updates: those given, where there is only one update."""
        old = experience.old_logprobs
        return logprobs.detach() if old is None else self.take(old)


def micro_batches(
    sequences: Sequences, token_budget: int, world: World, rows: list[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of a batch, or of some `rows` of it, as the token budget allows."""
    chosen = sequences if rows is None else sequences.rows(rows)
    for micro in world.batches(chosen.total_lengths, token_budget):
        index = micro.rows if rows is None else [rows[i] for i in micro.rows]
        where = send(torch.tensor(index), sequences.mask.device)
        yield MicroBatch(chosen.rows(micro.rows), where, micro.weight)


def count_terms(segments: Segments, rows: list[int] | None = None) -> dict[str, Tensor]:
    """What a loss is a mean over: tokens, or macro actions. Of some rows, if given."""
    if rows is not None:
        where = send(torch.tensor(rows), segments.mask.device)
        segments = Segments(segments.ids[where], segments.mask[where])
    macros = segments.macro_mask.sum().clamp(min=1)
    return {"token": segments.mask.sum().clamp(min=1), "macro": macros, "macro_mean": macros}


class PolicyMetrics:
    """Metrics of a mini-batch, added up over micro-batches and then over ranks.

    All names are there from the start: a rank without any rows must sum the same tensors.
    """

    def __init__(
        self, experience: Experience, num_tokens: Tensor, config: RLConfig, *more: str
    ) -> None:
        self.experience, self.num_tokens = experience, num_tokens
        self.ratio: Ratio = config.ratio
        self.clip_range = config.clip_range
        names = ("rl/policy_loss", "rl/clip_fraction", "rl/approx_kl", "rl/logprob_gap", *more)
        self.sums = {name: torch.zeros((), device=num_tokens.device) for name in names}

    @torch.no_grad()
    def add(
        self,
        micro: MicroBatch,
        segments: Segments,
        logprobs: Tensor,
        old_logprobs: Tensor,
        losses: dict[str, Tensor],
    ) -> None:
        """Losses, how far the policy has moved in this step, and sampling is from training."""
        mask, change, tokens = segments.mask, logprobs - old_logprobs, self.num_tokens
        change = pool_ratio(change, self.ratio, segments)
        low, high = self.clip_range
        outside = ((change.exp() < 1 - low) | (change.exp() > 1 + high)).float()
        gap = (logprobs - micro.take(self.experience.logprobs)).abs()
        drift = {
            "rl/clip_fraction": masked_mean(outside, mask, tokens),
            "rl/approx_kl": masked_mean(kl_estimate(old_logprobs, logprobs, "k3"), mask, tokens),
            "rl/logprob_gap": masked_mean(gap, mask, tokens),
        }
        for name, value in (losses | drift).items():
            self.sums[name] += value.detach() * micro.weight

    def over_ranks(self, world: World) -> dict[str, Tensor]:
        return dict(zip(self.sums, world.sum(torch.stack(list(self.sums.values())))))


NO_CAP = 1e30
"""A cap on importance weights that is none, but keeps their logged maximum finite."""


@torch.no_grad()
def staleness_metrics(
    experience: Experience, segments: Segments, ratio: Ratio, cap: float, age: int
) -> dict[str, Tensor]:
    """How far the weights that sampled are from the policy, and what importance weights do.

    The largest weight is from before truncation, the mean from after it.
    """
    if not experience.stale:
        return {}
    assert experience.old_logprobs is not None
    counted = experience.mask if ratio == "token" else segments.starts
    weights = torch.as_tensor(experience.sample_weights(segments, ratio, NO_CAP))
    kl = kl_estimate(experience.logprobs, experience.old_logprobs, "k3")
    return {
        "async/age": torch.tensor(float(age)),
        "async/kl": masked_mean(kl, experience.mask),
        "async/weight_mean": masked_mean(weights.clamp(max=cap), counted),
        "async/weight_max": weights.max(),
        "async/truncated": masked_mean((weights > cap).float(), counted),
    }


@torch.no_grad()
def batch_metrics(experience: Experience, credit: Credit, kl_coef: float) -> dict[str, Tensor]:
    """Metrics of a batch of responses, all still on the device."""
    mask = experience.mask
    kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0.0).sum(dim=1)
    lengths = mask.sum(dim=1).float()
    num_macros = credit.segments.macro_mask.sum().float()
    return {
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
    } | _conversation_metrics(experience)


def _conversation_metrics(experience: Experience) -> dict[str, Tensor]:
    if experience.episodes is None:
        return {}
    world = (experience.sequences.present & ~experience.mask).sum() / len(experience.mask)
    metrics = {k: torch.tensor(v) for k, v in episode_metrics(experience.episodes).items()}
    return metrics | {"rl/world_tokens": world}
