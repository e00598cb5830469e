"""RLOO and GRPO over macro actions: several responses to a prompt instead of a critic.

Each step: sample `num_samples` responses to each prompt, score them, compare each with the others
to the same prompt, update the policy. With one action per response (the default) this is RLOO;
shorter macro actions are credited with their reward-to-go. With `tree` responses branch at macro
boundaries, and each segment is compared with the others that continue the same beginning.

With `dynamic_sampling` (DAPO) other prompts take the place of those whose responses all have the
same score, where there is nothing to compare. With `update_share` only the responses with the
largest advantages are trained.

Axes: B rows, prompt by prompt; G groups, the responses to one prompt; T response tokens, M macro
actions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from marlhf.core import (
    Segments,
    group_advantages,
    kl_estimate,
    macro_gae,
    rloo_advantages,
    state_advantages,
)
from marlhf.environments import EpisodeRecord
from marlhf.errors import SettingError
from marlhf.models.sequences import send
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.train.experience import Credit, Experience, PolicyMetrics, count_terms
from marlhf.train.ppo import policy_loss, shape_and_segment
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import Learner, RLRun
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.sampling import sample_examples
from marlhf.train.tree_rollout import Tree, grow_tree


@in_run_folder("rloo")
def train(config: RLOOConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the policy."""
    if config.group == "state" and not config.environment:
        raise SettingError(
            "group: state compares turns that were taken in the same state of an environment, and "
            "there is none. Set environment, or leave out group."
        )
    rates = {"policy": config.learning_rate}
    rl = RLRun(config, run, partial(held_out_credit, config), rates)

    with rl.loop:
        for step in rl.steps():
            tree = None
            if config.tree is None:
                batch, rollout = rl.sample(step)
            else:
                batch = rl.batch(step)
                rollout, tree = grow_tree(rl.prompts(step), config, rl)
            rl.clock.mark("rollout")
            experience = rl.score(batch, rollout)
            rl.clock.mark("score")
            experience, resampled = replace_equal_groups(experience, rl, config)
            credit = assign_credit(experience, rl.models, config, rl.kl.coef, rl.shuffler, tree)
            rl.clock.mark("credit")
            trained = experience, credit
            if tree is not None:  # leaves share tokens, and each is trained once
                trained = tree.own_tokens(experience, credit, rl.models)
            rows = rows_to_train(*trained, config)
            metrics = update(*trained, rl.learner, rl.rates(step), config, rl.kl.coef, rows)
            rl.clock.mark("update")
            by_prompt = experience.scores.view(-1, config.responses_per_prompt)
            metrics["rl/group_std"] = by_prompt.std(dim=1).mean()
            metrics["rl/zero_std_groups"] = all_equal(by_prompt).float().mean()
            rl.log(experience, credit, metrics | resampled)
        return rl.close()


@torch.no_grad()
def assign_credit(
    experience: Experience,
    models: Models,
    config: RLOOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
    tree: Tree | None = None,
) -> Credit:
    """What each macro action brought above the other responses to its prompt.

    In a tree: above the other continuations of the same beginning.
    """
    credit = reward_to_go(experience, models, config, kl_coef, shuffler, tree)
    rewards, segments = credit.rewards, credit.segments
    options = {"gamma": config.gamma}
    if tree is not None:
        advantages = tree.advantages(credit, config)
    elif config.baseline == "leave_one_out":
        advantages = rloo_advantages(rewards, config.num_samples, segments, **options)
    else:
        advantages = group_advantages(
            rewards, config.num_samples, segments, scale=config.scale_group, **options
        )
    if config.group == "state":
        assert experience.episodes is not None
        states = turn_states(experience.episodes, config.num_samples, rewards)
        same_state = {"baseline": config.baseline, "scale": config.scale_group, **options}
        advantages = advantages + state_advantages(rewards, states, segments, **same_state)
    return replace(credit, advantages=advantages)


@torch.no_grad()
def held_out_credit(
    config: RLOOConfig,
    experience: Experience,
    models: Models,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Credit of held-out samples: each prompt has one response, so all of them are one group."""
    credit = reward_to_go(experience, models, config, kl_coef, shuffler)
    advantages = credit.returns - credit.returns[:, :1].mean()
    return replace(credit, advantages=torch.where(credit.segments.mask, advantages, 0.0))


def turn_states(records: Sequence[EpisodeRecord], group: int, like: Tensor) -> Tensor:
    """A number for the state of each token's turn, equal within a prompt's episodes: [B, T]."""
    numbers: dict[tuple[int, str], int] = {}
    states = torch.zeros(like.shape, dtype=torch.int64)
    for row, record in enumerate(records):
        for turn in record.turns:
            key = (row // group, turn.state)
            states[row, turn.start : turn.stop] = numbers.setdefault(key, len(numbers))
    return states.to(like.device)


def reward_to_go(
    experience: Experience,
    models: Models,
    config: RLOOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
    tree: Tree | None = None,
) -> Credit:
    """Rewards, macro actions and returns, without any baseline yet."""
    penalty = kl_coef if config.kl_in == "reward" else 0.0
    rewards, segments = shape_and_segment(experience, models, config, penalty, shuffler)
    if tree is not None:
        segments = tree.split(segments)
    # With lambda 1 and values of 0, generalised advantage estimation is the reward-to-go.
    zeros = torch.zeros_like(rewards)
    advantages, returns = macro_gae(rewards, zeros, segments, gamma=config.gamma, lam=1.0)
    return Credit(rewards, segments, zeros, advantages, returns)


def update(
    experience: Experience,
    credit: Credit,
    learner: Learner,
    learning_rates: dict[str, float],
    config: RLOOConfig,
    kl_coef: float,
    rows: list[int] | None = None,
) -> dict[str, Tensor]:
    """All updates that this batch of responses, or some rows of it, is used for."""
    weights = experience.sample_weights(credit.segments, config.ratio, config.importance_cap)
    credit = replace(credit, advantages=credit.advantages * weights)
    compute = partial(backward, experience, credit, learner.models, config, kl_coef)
    return learner.update([compute], experience, credit, learning_rates, rows=rows)


def backward(
    experience: Experience,
    credit: Credit,
    models: Models,
    config: RLOOConfig,
    kl_coef: float,
    rows: list[int],
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean."""
    counts = count_terms(credit.segments, rows)
    sums = PolicyMetrics(experience, counts["token"], config)
    counts = divisors(counts, len(rows), config)
    for micro in experience.micro_batches(models, rows):
        segments = micro.segments(credit.segments)
        logprobs = models.logprobs(models.policy, micro.sequences)
        old_logprobs = micro.old_logprobs(experience, logprobs)
        advantages = micro.take(credit.advantages)
        loss = policy_loss(logprobs, old_logprobs, advantages, segments, counts, config)
        if config.kl_in == "loss":
            kl = kl_estimate(logprobs, micro.take(experience.ref_logprobs), "k3")
            loss = loss + kl_coef * sum_as_ratio(kl, segments, config) / counts[config.ratio]
        (loss * micro.weight).backward()
        sums.add(micro, segments, logprobs, old_logprobs, {"rl/policy_loss": loss})
    return sums.over_ranks(models.world)


def all_equal(groups: Tensor) -> Tensor:
    """Which prompts have responses that all score alike, and teach nothing: [G, k] -> [G]."""
    return (groups == groups[:, :1]).all(dim=1)


def divisors(counts: dict[str, Tensor], num_rows: int, config: RLOOConfig) -> dict[str, Tensor]:
    """What sums over tokens or macro actions are divided by."""
    if config.divide_by == "tokens":
        return counts
    most = num_rows * config.sampling.max_new_tokens
    return counts | {"token": torch.full_like(counts["token"], most)}


def sum_as_ratio(x: Tensor, segments: Segments, config: RLOOConfig) -> Tensor:
    """The sum of [B, T], with the weight that the policy loss gives each token (`ratio`)."""
    if config.ratio == "macro_mean":
        return segments.mean(x).sum()
    return torch.where(segments.mask, x, 0.0).sum()


T = TypeVar("T")


def equal_groups(experience: Experience, config: RLOOConfig) -> list[int]:
    """Prompts whose responses all have the same score, before penalties for length."""
    scores = experience.raw_scores.view(-1, config.num_samples)
    return all_equal(scores).nonzero().flatten().tolist()


def replace_equal_groups(
    experience: Experience, rl: RLRun, config: RLOOConfig
) -> tuple[Experience, dict[str, Tensor]]:
    """With `dynamic_sampling`: other prompts in the place of those with nothing to compare.

    Prompts and seeds come from the run's own generator, whose state is in checkpoints.
    """
    if not config.dynamic_sampling:
        return experience, {}
    replaced, size = 0, config.num_samples
    for _ in range(config.dynamic_sampling):
        groups = equal_groups(experience, config)
        if not groups:
            break
        drawn = torch.randint(len(rl.examples), (len(groups),), generator=rl.sampler).tolist()
        examples = [rl.examples[i] for i in drawn for _ in range(size)]
        seeds = rl.response_seeds(len(examples))
        reward = rl.models.reward
        of_batch = reward.latest
        new = rl.score(*sample_examples(examples, rl.models, seeds, size))
        rows = [group * size + i for group in groups for i in range(size)]
        if (experience.earned is None) != (new.earned is None):  # one has rewards with places
            experience, new = with_places(experience), with_places(new)
        experience = replace_rows(experience, new, rows)
        reward.latest = of_batch  # means over the prompts that were drawn without looking
        replaced += len(groups)
    share = replaced * size / len(experience.scores)
    return experience, {"rl/replaced_prompts": torch.tensor(share)}


def with_places(experience: Experience) -> Experience:
    """The same scores, all of them earned at the end if none has a place."""
    if experience.earned is not None:
        return experience
    return dataclasses.replace(experience, earned=torch.zeros_like(experience.ref_logprobs))


def rows_to_train(experience: Experience, credit: Credit, config: RLOOConfig) -> list[int] | None:
    """The rows of a batch that the update uses; None for all."""
    if config.update_share == 1 and not config.dynamic_sampling:
        return None
    rows = list(range(len(experience.scores)))
    if config.dynamic_sampling:
        equal = set(equal_groups(experience, config))
        # All of them where there is nothing to compare at all: the KL penalty still counts.
        rows = [row for row in rows if row // config.num_samples not in equal] or rows
    sizes = credit.advantages.abs().amax(dim=1)[send(torch.tensor(rows), credit.advantages.device)]
    count = max(1, math.ceil(config.update_share * len(rows)))
    largest = sizes.argsort(descending=True, stable=True)[:count].tolist()
    return sorted(rows[i] for i in largest)


def replace_rows(old: T, new: T, rows: list[int]) -> T:
    """`old` with `rows` of everything that has rows taken from `new`; widths are padded with 0."""
    if isinstance(old, Tensor):
        assert isinstance(new, Tensor)
        if not old.ndim:
            return old
        width = max(old.shape[1:2], new.shape[1:2])

        def widened(x: Tensor) -> Tensor:
            return pad(x, (0, 0) * (x.ndim - 2) + (0, width[0] - x.shape[1])) if width else x

        return widened(old).index_copy(0, send(torch.tensor(rows), old.device), widened(new))
    assert (old is None) == (new is None), "a batch has what the others have"
    if isinstance(old, (tuple, list)):  # one entry per row
        changed: list[Any] = list(old)
        for row, value in zip(rows, cast(Any, new)):
            changed[row] = value
        return cast(T, type(old)(changed))
    if dataclasses.is_dataclass(old) and not isinstance(old, type):
        fields = [field.name for field in dataclasses.fields(old)]
        parts = {x: replace_rows(getattr(old, x), getattr(new, x), rows) for x in fields}
        return dataclasses.replace(old, **parts)
    return old
