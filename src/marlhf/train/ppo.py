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

from marlhf.core import ppo_policy_loss
from marlhf.models.base import autocast
from marlhf.models.forward import token_stats, token_values
from marlhf.runtime.distributed import start
from marlhf.runtime.loop import open_run
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.objects import NO_OBJECTS, GivenObjects
from marlhf.runtime.optim import Update, apply_updates
from marlhf.runtime.stage import Example
from marlhf.runtime.timing import Clock, to_numbers
from marlhf.train.assign_credit import (
    assign_credit,
    measure_options,
    shape_and_segment,
    whitened_advantages,
)
from marlhf.train.continuations import count_continuations, monte_carlo_values
from marlhf.train.credit_choice import CreditChooser, Measurement, reach
from marlhf.train.critic import (
    critic_values,
    value_loss,
    value_metrics,
    values_and_critic_backward,
)
from marlhf.train.experience import (
    POLICY_METRICS,
    Credit,
    Experience,
    MetricSums,
    SegmentedRewards,
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
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import RLRun
from marlhf.train.rl_warnings import (
    CriticWatch,
    SamplingWatch,
    warn_about_divided_scores,
    warn_about_sampling,
    warn_about_short_reach,
)


def train(config: PPOConfig, objects: GivenObjects = NO_OBJECTS) -> Path:
    """Train, or resume training; returns the folder of the policy."""
    world = start(config.device, config.parallel)
    run = open_run(config, "ppo", world)
    if run.finished:
        return run.model
    warn_about_sampling(config)
    warn_about_divided_scores(config)
    rates = {"policy": config.learning_rate}
    if config.has_critic:
        rates["critic"] = config.critic_learning_rate
    chooser = CreditChooser(config) if config.credit == "auto" else None
    credit_of_samples = partial(held_out_credit, chooser=chooser)
    rl = RLRun(config, run, world, objects, credit_of_samples, rates)
    models, evaluation = rl.models, rl.evaluation
    if chooser and "credit" in rl.saved:
        chooser.load_state(rl.saved["credit"])
    sampling_watch, critic_watch = SamplingWatch(config), CriticWatch(config)

    with rl.loop as loop:
        if not loop.done:
            evaluation(0, rl.kl.coef)
        for step in loop:
            clock = Clock(world.device)
            if chooser:
                config = chooser.config
            batch, rollout = rl.sample(step)
            clock.mark("rollout")
            experience = score_rollout(batch, rollout, models, config, evaluation.normalise, clock)
            segmented = shape_and_segment(experience, models, config, rl.kl.coef, rl.shuffler)
            values, losses = state_values(batch, experience, segmented, config, rl)
            credit = assign_credit(segmented, values, config)
            train_policy = step > config.critic_warmup_steps
            measurement = None
            if chooser and train_policy:
                measurement = measure_options(
                    chooser.configs, experience, credit, models, rl.shuffler
                )
            clock.mark("credit")
            losses |= update(
                experience,
                credit,
                models,
                rl.optimizers,
                rl.rates(step),
                config,
                rl.shuffler,
                train_policy=train_policy,
                measurement=measurement,
            )
            clock.mark("update")
            metrics = losses | batch_metrics(experience, credit, models, rl.kl.coef)
            metrics |= value_metrics(credit)
            if config.async_steps:
                metrics |= staleness_metrics(experience, credit.segments, config, rl.age)
            if chooser:
                metrics["credit/reach"] = reach(credit, config.lam)
            numbers = to_numbers(metrics) | clock.times(len(batch))
            if chooser and measurement is not None:
                numbers |= chooser.update(step, world.sum(measurement.sums))
            if rl.age == 0:  # else log-probs of sampling are of older weights
                sampling_watch(step, experience, numbers)
            if config.has_critic:
                critic_watch(step, numbers["rl/explained_variance"])
                if step == 1 and not chooser:
                    tokens_back = float(reach(credit, config.lam))
                    warn_about_short_reach(tokens_back, numbers["rl/length"], config.lam)
            rl.kl.update(numbers["rl/kl"], len(batch))
            loop.log(numbers, show=("rl/score", "rl/kl", "rl/length"))
            if loop.must_evaluate:
                loop.verdict = evaluation(step, rl.kl.coef)
            if loop.must_save:
                rl.save(**({"credit": chooser.state()} if chooser else {}))
        return rl.close()


def state_values(
    batch: list[Example],
    experience: Experience,
    segmented: SegmentedRewards,
    config: PPOConfig,
    rl: RLRun,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The value of the state before each token, [B, T], and the critic's loss if it trained."""
    models = rl.models
    if not config.has_critic:
        seeds = rl.response_seeds(count_continuations(segmented.segments, config))
        values = monte_carlo_values(
            batch,
            segmented.segments,
            experience,
            models,
            config,
            seeds,
            rl.kl.coef,
            rl.evaluation.normalise,
        )
        return values, {}
    if config.one_update:
        compute = partial(values_and_critic_backward, experience, segmented, models, config)
        return fit_memory(models.world, compute, models.critic)
    return critic_values(experience, models, config), {}


def held_out_credit(
    experience: Experience,
    models: Models,
    config: PPOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
    chooser: CreditChooser | None = None,
) -> Credit:
    """Credit of held-out samples, from which nothing learns, by the settings that are in use."""
    if chooser is not None:
        config = chooser.config
    segmented = shape_and_segment(experience, models, config, kl_coef, shuffler)
    if config.has_critic:
        return assign_credit(segmented, critic_values(experience, models, config), config)
    # Continuations of held-out responses would only be looked at: the batch's mean return is the
    # value of every state.
    returns = segmented.rewards.sum(dim=1).mean()
    values = torch.where(segmented.segments.mask, returns, 0.0)
    return assign_credit(segmented, values, replace(config, lam=1.0))


def update(
    experience: Experience,
    credit: Credit,
    models: Models,
    optimizers: Mapping[str, torch.optim.Optimizer],
    learning_rates: Mapping[str, float],
    config: PPOConfig,
    shuffler: torch.Generator,
    *,
    train_policy: bool = True,
    measurement: Measurement | None = None,
) -> dict[str, Tensor]:
    """All updates of policy and critic that this batch of responses is used for.

    The first pass over the batch also takes the `measurement` for `credit: auto`, if there is one.
    None is made where the batch holds NaN or infinity.
    """
    advantages = whitened_advantages(credit, config)
    advantages = weigh_samples(advantages, experience, credit.segments, config)
    credit = replace(credit, advantages=advantages)
    trained = {"policy": models.policy, "critic": models.critic}
    learning = [name for name in optimizers if name != "policy" or train_policy]
    # With one update the critic has its gradients already, and `backward` adds none.
    in_backward = [trained[name] for name in learning if name == "policy" or not config.one_update]
    updates: list[dict[str, Tensor]] = []
    for epoch in range(config.num_ppo_epochs):
        for rows in mini_batches(len(experience.scores), config, shuffler):
            measured = measurement if epoch == 0 else None
            compute = partial(
                backward,
                rows,
                experience,
                credit,
                models,
                config,
                train_policy=train_policy,
                measurement=measured,
            )
            undo = None if measured is None else partial(measured.sums.copy_, measured.sums.clone())
            metrics = fit_memory(models.world, compute, *in_backward, undo=undo)
            norms = apply_updates(
                [Update(trained[x], optimizers[x], learning_rates[x]) for x in learning],
                config.max_grad_norm,
                models.world,
                [*must_be_finite(experience, credit), *metrics.items()],
            )
            norm_names = [f"rl/{name}_grad_norm" for name in learning]
            updates.append(metrics | dict(zip(norm_names, norms)))
    if train_policy:
        models.engine.update_weights(models.policy)
    rate = learning_rates["policy"] if train_policy else 0.0
    return mean_metrics(updates) | {"rl/learning_rate": torch.tensor(rate)}


def backward(
    rows: list[int],
    experience: Experience,
    credit: Credit,
    models: Models,
    config: PPOConfig,
    *,
    train_policy: bool = True,
    measurement: Measurement | None = None,
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean.

    While only the critic trains, the policy's pass has no gradients: its metrics are logged still.
    """
    sequences, world = experience.sequences, models.world
    counts = count_terms(credit.segments, rows)
    # With one update, `values_and_critic_backward` has computed the critic's gradients already.
    train_critic = config.has_critic and not config.one_update
    names = (*POLICY_METRICS, "rl/value_loss") if train_critic else POLICY_METRICS
    sums = MetricSums(names, sequences.mask.device)
    for micro in micro_batches(sequences, config.pass_tokens, world, rows):
        segments = micro.segments(credit.segments)
        with torch.set_grad_enabled(train_policy), autocast(world.device, config.precision):
            scores = measurement.watch() if measurement else None
            logprobs = token_stats(
                models.policy, micro.sequences, config.sampling.scale, scores=scores
            ).logprobs
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
            num_tokens=counts["token" if config.ratio == "token" else "macro"],
        )
        # Before the critic's pass: only one graph is in memory at a time.
        if train_policy:
            (loss * micro.weight).backward()
        if measurement is not None:
            measurement.add(micro)
        metrics = {"rl/policy_loss": loss}
        if train_critic:
            with autocast(world.device, config.precision):
                values = token_values(models.critic, micro.sequences)
            old_values, returns = micro.take(credit.values), micro.take(credit.returns)
            loss = value_loss(values, old_values, returns, segments, counts, config)
            (loss * micro.weight).backward()
            metrics["rl/value_loss"] = loss
        sampled = micro.take(experience.logprobs)
        metrics |= drift_metrics(logprobs, old_logprobs, sampled, segments, counts["token"], config)
        sums.add(metrics, micro.weight)
    return sums.over_ranks(world)
