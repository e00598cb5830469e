"""RLOO and GRPO over macro actions: several responses to a prompt instead of a critic.

Each step: sample `num_samples` responses to each prompt, score them, compare each with the others
to the same prompt, update the policy. With one action per response (the default) this is RLOO;
shorter macro actions are credited with their reward-to-go. With `tree` responses branch at macro
boundaries, and each segment is compared with the others that continue the same beginning.

Axes: B rows, T response tokens, M macro actions. Rows come prompt by prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import (
    Segments,
    group_advantages,
    kl_estimate,
    macro_gae,
    ppo_policy_loss,
    rloo_advantages,
)
from marlhf.models.base import autocast
from marlhf.models.forward import token_stats
from marlhf.runtime.distributed import start
from marlhf.runtime.loop import open_run
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.objects import NO_OBJECTS, GivenObjects
from marlhf.runtime.optim import Update, apply_updates
from marlhf.runtime.timing import Clock, to_numbers
from marlhf.train.assign_credit import shape_and_segment
from marlhf.train.experience import (
    POLICY_METRICS,
    Credit,
    Experience,
    MetricSums,
    batch_metrics,
    count_terms,
    drift_metrics,
    mean_metrics,
    micro_batches,
    mini_batches,
    must_be_finite,
    score_rollout,
    staleness_metrics,
    weigh_samples,
)
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import RLRun
from marlhf.train.rl_warnings import SamplingWatch, warn_about_sampling
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.tree_rollout import Tree, grow_tree


def train(config: RLOOConfig, objects: GivenObjects = NO_OBJECTS) -> Path:
    """Train, or resume training; returns the folder of the policy."""
    world = start(config.device, config.parallel)
    run = open_run(config, "rloo", world)
    if run.finished:
        return run.model
    warn_about_sampling(config)
    rates = {"policy": config.learning_rate}
    rl = RLRun(config, run, world, objects, held_out_credit, rates)
    models, evaluation = rl.models, rl.evaluation
    sampling_watch = SamplingWatch(config)

    with rl.loop as loop:
        if not loop.done:
            evaluation(0, rl.kl.coef)
        for step in loop:
            clock = Clock(world.device)
            tree = None
            if config.tree is None:
                batch, rollout = rl.sample(step)
            else:
                prompts, batch = rl.prompts(step), rl.batch(step)
                rollout, tree = grow_tree(prompts, models, config, rl.response_seeds, rl.shuffler)
            clock.mark("rollout")
            experience = score_rollout(batch, rollout, models, config, evaluation.normalise, clock)
            credit = assign_credit(experience, models, config, rl.kl.coef, rl.shuffler, tree)
            clock.mark("credit")
            optimizer, rate = rl.optimizers["policy"], rl.rates(step)["policy"]
            trained = experience, credit
            if tree is not None:  # leaves share tokens, and each is trained once
                trained = tree.own_tokens(experience, credit, models.tokenizer.pad_token_id)
            metrics = update(*trained, models, optimizer, config, rl.kl.coef, rate, rl.shuffler)
            clock.mark("update")
            metrics |= batch_metrics(experience, credit, models, rl.kl.coef)
            by_prompt = experience.scores.view(-1, config.responses_per_prompt)
            metrics["rl/group_std"] = by_prompt.std(dim=1).mean()
            if config.async_steps:
                metrics |= staleness_metrics(experience, credit.segments, config, rl.age)
            numbers = to_numbers(metrics) | clock.times(len(batch))
            if rl.age == 0:  # else log-probs of sampling are of older weights
                sampling_watch(step, experience, numbers)
            rl.kl.update(numbers["rl/kl"], len(batch))
            loop.log(numbers, show=("rl/score", "rl/kl", "rl/length"))
            if loop.must_evaluate:
                loop.verdict = evaluation(step, rl.kl.coef)
            if loop.must_save:
                rl.save()
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
    if tree is not None:
        advantages = tree.advantages(credit, config)
    elif config.baseline == "leave_one_out":
        advantages = rloo_advantages(
            credit.rewards, config.num_samples, credit.segments, gamma=config.gamma
        )
    else:
        advantages = group_advantages(
            credit.rewards,
            config.num_samples,
            credit.segments,
            gamma=config.gamma,
            scale=config.scale_group,
        )
    return replace(credit, advantages=advantages)


@torch.no_grad()
def held_out_credit(
    experience: Experience,
    models: Models,
    config: RLOOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Credit of held-out samples: each prompt has one response, so all of them are one group."""
    credit = reward_to_go(experience, models, config, kl_coef, shuffler)
    advantages = credit.returns - credit.returns[:, :1].mean()
    return replace(credit, advantages=torch.where(credit.segments.mask, advantages, 0.0))


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
    segmented = shape_and_segment(experience, models, config, penalty, shuffler)
    if tree is not None:
        segmented = replace(segmented, segments=tree.split(segmented.segments))
    # With lambda 1 and values of 0, generalised advantage estimation is the reward-to-go.
    zeros = torch.zeros_like(segmented.rewards)
    advantages, returns = macro_gae(
        segmented.rewards, zeros, segmented.segments, gamma=config.gamma, lam=1.0
    )
    return Credit(segmented.rewards, segmented.segments, zeros, advantages, returns)


def update(
    experience: Experience,
    credit: Credit,
    models: Models,
    optimizer: torch.optim.Optimizer,
    config: RLOOConfig,
    kl_coef: float,
    learning_rate: float,
    shuffler: torch.Generator,
) -> dict[str, Tensor]:
    """All updates that this batch of responses is used for; none where it holds NaN."""
    advantages = weigh_samples(credit.advantages, experience, credit.segments, config)
    credit = replace(credit, advantages=advantages)
    updates: list[dict[str, Tensor]] = []
    for rows in mini_batches(len(experience.scores), config, shuffler):
        compute = partial(backward, rows, experience, credit, models, config, kl_coef)
        metrics = fit_memory(models.world, compute, models.policy)
        [metrics["rl/policy_grad_norm"]] = apply_updates(
            [Update(models.policy, optimizer, learning_rate)],
            config.max_grad_norm,
            models.world,
            [*must_be_finite(experience, credit), ("rl/policy_loss", metrics["rl/policy_loss"])],
        )
        updates.append(metrics)
    models.engine.update_weights(models.policy)
    return mean_metrics(updates) | {"rl/learning_rate": torch.tensor(learning_rate)}


def backward(
    rows: list[int],
    experience: Experience,
    credit: Credit,
    models: Models,
    config: RLOOConfig,
    kl_coef: float,
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean."""
    sequences, world = experience.sequences, models.world
    counts = count_terms(credit.segments, rows)
    num_terms = counts["token" if config.ratio == "token" else "macro"]
    sums = MetricSums(POLICY_METRICS, sequences.mask.device)
    for micro in micro_batches(sequences, config.pass_tokens, world, rows):
        segments = micro.segments(credit.segments)
        with autocast(world.device, config.precision):
            logprobs = token_stats(models.policy, micro.sequences, config.sampling.scale).logprobs
        if experience.old_logprobs is None:
            old_logprobs = logprobs.detach()
        else:
            old_logprobs = micro.take(experience.old_logprobs)
        loss = ppo_policy_loss(
            logprobs,
            old_logprobs,
            micro.take(credit.advantages),
            segments.mask,
            clip=config.clip,
            dual_clip=config.dual_clip,
            ratio=config.ratio,
            segments=segments,
            num_tokens=num_terms,
        )
        if config.kl_in == "loss":
            kl = kl_estimate(logprobs, micro.take(experience.ref_logprobs), "k3")
            loss = loss + kl_coef * sum_as_ratio(kl, segments, config) / num_terms
        (loss * micro.weight).backward()
        sampled = micro.take(experience.logprobs)
        metrics = drift_metrics(logprobs, old_logprobs, sampled, segments, counts["token"], config)
        sums.add(metrics | {"rl/policy_loss": loss}, micro.weight)
    return sums.over_ranks(world)


def sum_as_ratio(x: Tensor, segments: Segments, config: RLOOConfig) -> Tensor:
    """The sum of [B, T], with the weight that the policy loss gives each token (`ratio`)."""
    if config.ratio == "macro_mean":
        return segments.mean(x).sum()
    return torch.where(segments.mask, x, 0.0).sum()
