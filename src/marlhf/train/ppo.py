"""PPO over macro actions, from top to bottom.

Each step of `train`: sample responses and score them, shape the rewards of their tokens, segment
them into macro actions, estimate each one's advantage, update policy and critic. With
`segmenter: {type: ngram, n: 1}` this is ordinary PPO.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.core import (
    Segments,
    adaptive_lam,
    boundary_gae,
    macro_gae,
    ppo_policy_loss,
    ppo_value_loss,
    segment,
    sft_loss,
    shape_rewards,
)
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.spans.apply import explain_segmenter_errors
from marlhf.train.credit_choice import CreditChooser, Measurement
from marlhf.train.critic_training import CriticTraining
from marlhf.train.experience import Credit, Experience, PolicyMetrics, count_terms
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import Learner, RLRun
from marlhf.train.state_values import StateValues


@in_run_folder("ppo")
def train(config: PPOConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the policy."""
    rates = {"policy": config.learning_rate}
    if config.has_critic:
        rates["critic"] = config.critic_learning_rate
    chooser = CreditChooser(config)
    critic = CriticTraining(config, shape_and_segment, lambda_one_returns)
    checkpointed = {**chooser.checkpointed, **critic.checkpointed}
    rl = RLRun(config, run, partial(held_out_credit, chooser), rates, checkpointed)
    rl.score.provide_for(option.config.segmenter for option in chooser.options)
    values_without_critic = StateValues(rl, config)

    with rl.loop:
        for step in rl.steps():
            critic.begin(step, rl)
            config = chooser.config  # with `credit: auto`, the candidate in use
            batch, rollout = rl.sample(step)
            rl.clock.mark("rollout")
            experience = rl.score(batch, rollout)
            rl.clock.mark("score")
            rewards, segments = shape_and_segment(
                experience, rl.models, config, rl.kl.coef, rl.shuffler
            )
            metrics: dict[str, Tensor] = {}
            if not config.has_critic:
                segments, values = values_without_critic(
                    batch, experience, segments, rewards, config
                )
            elif config.one_update:
                values, metrics = critic_values_and_backward(
                    experience, rewards, segments, rl.models, config
                )
            else:
                values = experience.critic_values(rl.models)
            credit = assign_credit(rewards, values, segments, config)
            learning_rates, measurement = rl.rates(step), None
            if step <= config.critic_warmup_steps:
                del learning_rates["policy"]
            else:
                measurement = chooser.measure(step, experience, credit, rl, assign_credit)
            rl.clock.mark("credit")
            metrics |= update(experience, credit, rl.learner, learning_rates, config, measurement)
            metrics |= critic.learn(step, batch, experience, credit, config, rl, learning_rates)
            rl.clock.mark("update")
            chosen = chooser.update(step, experience, credit, measurement, rl.models)
            numbers = rl.log(experience, credit, metrics | credit.value_metrics(), chosen)
            chooser.note(numbers)
            critic.watch(step, credit, numbers)
        policy = rl.close()
        critic.close(rl)
        return policy


@torch.no_grad()
def shape_and_segment(
    experience: Experience,
    models: Models,
    config: RLConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> tuple[Tensor, Segments]:
    """Token rewards [B, T], the KL penalty and the score at the end; and the macro actions."""
    rewards = shape_rewards(
        experience.token_scores,
        experience.policy_logprobs,
        experience.ref_logprobs,
        experience.mask,
        kl_coef,
        kl=config.kl_estimator,
    )
    responses = experience.responses(models.vocabulary, shuffler)
    with explain_segmenter_errors(config.segmenter):  # it may be the user's own code
        segments = segment(config.segmenter, responses, split_last=config.split_last)
    return rewards, segments


def critic_values_and_backward(
    experience: Experience, rewards: Tensor, segments: Segments, models: Models, config: PPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's values, [B, T], and its loss, whose gradients are left for `update`.

    Where a batch makes one update, the pass that computes the values can also train the critic,
    which saves a forward pass: the returns of a row need the values of no other row.
    """
    counts = count_terms(segments)

    def compute() -> tuple[Tensor, Tensor]:
        values, total_loss = torch.zeros_like(rewards), torch.zeros((), device=rewards.device)
        for micro in experience.micro_batches(models):
            new_values = models.values(micro.sequences)
            old_values, own = new_values.detach(), micro.segments(segments)
            micro.add(values, old_values)
            returns = assign_credit(micro.take(rewards), old_values, own, config).returns
            loss = value_loss(new_values, old_values, returns, own, counts, config) * micro.weight
            loss.backward()
            total_loss += loss.detach()
        return values, total_loss

    values, loss = models.fit_memory(compute, models.critic)
    return models.world.sum(values), {"rl/value_loss": models.world.sum(loss)}


@torch.no_grad()
def assign_credit(rewards: Tensor, values: Tensor, segments: Segments, config: PPOConfig) -> Credit:
    """Advantages and returns of macro actions: the method itself."""
    lam = adaptive_lam(segments, config.lam_alpha) if config.lam == "adaptive" else config.lam
    lambdas = {"gamma": config.gamma, "lam": lam, "lam_value": config.lam_value}
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


def lambda_one_returns(rewards: Tensor, segments: Segments, config: PPOConfig) -> Tensor:
    """The reward that really came after each macro action's start, [B, T]: no value is in it."""
    plain = replace(config, lam=1.0, lam_value=None)
    return assign_credit(rewards, torch.zeros_like(rewards), segments, plain).returns


def update(
    experience: Experience,
    credit: Credit,
    learner: Learner,
    learning_rates: Mapping[str, float],
    config: PPOConfig,
    measurement: Measurement | None = None,
) -> dict[str, Tensor]:
    """All updates that this batch is used for, of those models that have a learning rate.

    The first pass over the batch also takes the `measurement` for `credit: auto`, if there is one.
    """
    advantages = credit.whitened(config.whiten)
    weights = experience.sample_weights(credit.segments, config.ratio, config.importance_cap)
    credit = replace(credit, advantages=advantages * weights)
    train_policy = "policy" in learning_rates
    compute = partial(backward, experience, credit, learner.models, config, train_policy)
    passes = [partial(compute, None)] * config.num_ppo_epochs
    passes[0] = partial(compute, measurement)
    # The pass that computed the critic's values has left its gradients.
    ready = ["critic"] if config.has_critic and config.one_update else []
    return learner.update(passes, experience, credit, learning_rates, ready=ready)


def backward(
    experience: Experience,
    credit: Credit,
    models: Models,
    config: PPOConfig,
    train_policy: bool,
    measurement: Measurement | None,
    rows: list[int],
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean.

    While only the critic trains, the policy's pass has no gradients: its metrics are logged still.
    """
    counts = count_terms(credit.segments, rows)
    train_critic = config.has_critic and not config.one_update
    sums = PolicyMetrics(
        experience, counts["token"], config, *(["rl/value_loss"] if train_critic else [])
    )
    measured = measurement and measurement.begin()
    positive, num_positive = positive_examples(experience, credit.segments, rows, config)
    for micro in experience.micro_batches(models, rows):
        segments = micro.segments(credit.segments)
        with torch.set_grad_enabled(train_policy):
            scores = measured and measured.watch()
            logprobs = models.logprobs(models.policy, micro.sequences, scores)
        old_logprobs = micro.old_logprobs(experience, logprobs)
        advantages = micro.take(credit.advantages)
        loss = policy_loss(logprobs, old_logprobs, advantages, segments, counts, config)
        if config.positive_lm_coef:
            imitation = sft_loss(logprobs, micro.take(positive), num_tokens=num_positive)
            loss = loss + config.positive_lm_coef * imitation
        if measured:
            measured.add(micro)
        # Before the critic's pass: only one graph is in memory at a time.
        if train_policy:
            (loss * micro.weight).backward()
        losses = {"rl/policy_loss": loss}
        if train_critic:
            values = models.values(micro.sequences)
            old_values, returns = micro.take(credit.values), micro.take(credit.returns)
            loss = value_loss(values, old_values, returns, segments, counts, config)
            (loss * micro.weight).backward()
            losses["rl/value_loss"] = loss
        sums.add(micro, segments, logprobs, old_logprobs, losses)
    if measured:
        measured.end()
    return sums.over_ranks(models.world)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segments: Segments,
    counts: Mapping[str, Tensor],
    config: RLConfig,
) -> Tensor:
    """The policy's loss on some rows of a batch, as a part of the whole batch's mean."""
    return ppo_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        segments.mask,
        clip=config.clip_range,
        dual_clip=config.dual_clip,
        ratio=config.ratio,
        segments=segments,
        num_tokens=counts[config.ratio],
    )


def positive_examples(
    experience: Experience, segments: Segments, rows: list[int], config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """The tokens of responses that scored well, [B, T], and their number in some rows.

    They are imitated as well, with VAPO's loss (arXiv 2504.05118).
    """
    mask = segments.mask & (experience.raw_scores > config.positive_score)[:, None]
    return mask, count_terms(replace(segments, mask=mask), rows)["token"]


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


def held_out_credit(
    chooser: CreditChooser,
    experience: Experience,
    models: Models,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Credit of held-out samples, from which nothing learns, by the settings that are in use."""
    config = chooser.config
    rewards, segments = shape_and_segment(experience, models, config, kl_coef, shuffler)
    if config.has_critic:
        return assign_credit(rewards, experience.critic_values(models), segments, config)
    # Continuations of held-out responses would only be looked at: the batch's mean return is the
    # value of every state.
    values = torch.where(segments.mask, rewards.sum(dim=1).mean(), 0.0)
    return assign_credit(rewards, values, segments, replace(config, lam=1.0))
