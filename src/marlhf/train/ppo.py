"""PPO over macro actions, from top to bottom.

Each step: sample responses, score them, cut them into macro actions, credit each with an
advantage, update policy and critic. With `segmenter: {type: ngram, n: 1}` this is ordinary PPO.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import (
    Segments,
    macro_gae,
    masked_mean,
    moments,
    ppo_policy_loss,
    ppo_value_loss,
    whiten,
)
from marlhf.models.base import autocast
from marlhf.models.forward import send, token_stats, token_values
from marlhf.train.checkpoint import generator_state, set_generator_state
from marlhf.train.distributed import start
from marlhf.train.experience import (
    Credit,
    Decisions,
    Experience,
    collect,
    count,
    decide,
    drift,
    reward_parts,
)
from marlhf.train.held_out import HeldOutEvaluation
from marlhf.train.kl import KLController
from marlhf.train.loop import Loop, open_run
from marlhf.train.objects import NO_OBJECTS, GivenObjects
from marlhf.train.optim import apply_update, check_finite, make_optimizer
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.stage import batch_rows, count_steps
from marlhf.train.timing import Clock, explained_variance, to_numbers
from marlhf.train.watch import CriticWatch, warn_divided, warn_early


def train(config: PPOConfig, objects: GivenObjects = NO_OBJECTS) -> Path:
    """Train, or go on training; returns the folder of the policy."""
    world = start(config.device, config.parallel)
    run = open_run(config, "ppo", world)
    if run.finished:
        return run.model
    warn_early(config)
    warn_divided(config)
    torch.manual_seed(config.seed)
    models = load_models(config, objects, world, critic=True)
    examples, held_out = load_prompts(config, models, objects)
    if sandbox_layers := models.reward.sandbox:
        run.state["sandbox"] = sandbox_layers
    trained = {"policy": models.policy, "critic": models.critic}
    rates = {"policy": config.learning_rate, "critic": config.critic_learning_rate}
    optimizers = {
        name: make_optimizer(model, rates[name], config.weight_decay)
        for name, model in trained.items()
    }
    total = count_steps(config, len(examples))
    sampler = torch.Generator().manual_seed(config.seed)  # a seed for each response
    shuffler = torch.Generator().manual_seed(config.seed + 1)  # mini-batches, random segments
    controller = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
    loop = Loop(
        run,
        config,
        world,
        total,
        models=trained,
        optimizers=optimizers,
        tokenizer=models.tokenizer,
        objects=objects,
        rows=(len(examples), len(held_out)),
        metric="score",
    )
    probe = HeldOutEvaluation(config, models, held_out, loop, collect, sample_credit)
    watch = CriticWatch(config)
    if state := loop.resume():
        set_generator_state(sampler, state["sampler"])
        set_generator_state(shuffler, state["shuffler"])
        controller.coef = state["kl_coef"]
        probe.load_state(state["probe"])

    with loop:
        if not loop.done:
            probe(0, controller.coef)
        for step in loop:
            clock = Clock(world.device)
            batch = [examples[i] for i in batch_rows(step - 1, config, len(examples))]
            seeds = torch.randint(2**62, (len(batch),), generator=sampler).tolist()
            experience = collect(batch, models, config, seeds, probe.normalise, clock)
            decisions = decide(experience, models.vocabulary, config, controller.coef, shuffler)
            values, losses = appraise(experience, decisions, models, config)
            plan = credit(decisions, values, config)
            check_finite(
                [
                    ("the scores", experience.scores),
                    ("the reference's log-probs", experience.ref_logprobs),
                    ("the critic's values", plan.values),
                    ("the rewards", plan.rewards),
                ]
            )
            clock.mark("credit")
            metrics = losses | update(
                experience, plan, models, optimizers, config, step, total, shuffler
            )
            clock.mark("update")
            metrics |= describe(experience, plan, controller.coef) | reward_parts(models)
            numbers = to_numbers(metrics) | clock.times(len(batch))
            controller.update(numbers["rl/kl"], len(batch))
            watch(step, numbers["rl/explained_variance"])
            loop.log(numbers, show=("rl/score", "rl/kl", "rl/length"))
            if loop.must_evaluate:
                loop.verdict = probe(step, controller.coef)
            if loop.must_save:
                loop.save(
                    sampler=generator_state(sampler),
                    shuffler=generator_state(shuffler),
                    kl_coef=controller.coef,
                    probe=probe.state(),
                )
        next_step = f"marlhf report {run.path.parent} -o {run.path.parent / 'report.html'}"
        return loop.close(models.policy, probe.latest | {"steps": loop.step}, next_step)


def appraise(
    experience: Experience,
    decisions: Decisions,
    models: Models,
    config: PPOConfig,
    *,
    learn: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's values, [B, T], and its loss where it has learnt from them already.

    Where a batch makes one update, the pass that tells the values is also the one that trains the
    critic, whose gradients it leaves behind: a row's returns need no other row.
    """
    learn = learn and config.one_update
    sequences, world = experience.sequences, models.world
    values, device = torch.zeros_like(decisions.rewards), sequences.mask.device
    counts, total = count(decisions.segments), torch.zeros((), device=device)
    for micro in world.batches(sequences.total_lengths, (2 - learn) * config.token_budget):
        part, index = sequences.rows(micro.rows), send(torch.tensor(micro.rows), device)
        width = part.mask.shape[1]
        with torch.set_grad_enabled(learn), autocast(device, config.precision):
            found = token_values(models.critic, part)
        told = found.detach()
        values[index, :width] += told * micro.weight
        if learn:
            segments = Segments(decisions.segments.ids[index, :width], part.mask)
            own = Decisions(decisions.rewards[index, :width], segments)
            plan = credit(own, told, config)
            loss = value_loss(found, told, plan.returns, segments, counts, config) * micro.weight
            loss.backward()
            total += loss.detach()
    return world.sum(values), {"rl/value_loss": world.sum(total)} if learn else {}


@torch.no_grad()
def credit(decisions: Decisions, values: Tensor, config: PPOConfig) -> Credit:
    """Advantages and returns: the method itself."""
    advantages, returns = macro_gae(
        decisions.rewards,
        values,
        decisions.segments,
        gamma=config.gamma,
        lam=config.lam,
        rho=config.rho,
        sigma=config.sigma,
        pooling=config.pooling,
    )
    return Credit(decisions.rewards, decisions.segments, values, advantages, returns)


def update(
    experience: Experience,
    plan: Credit,
    models: Models,
    optimizers: Mapping[str, torch.optim.Optimizer],
    config: PPOConfig,
    step: int,
    total: int,
    shuffler: torch.Generator,
) -> dict[str, Tensor]:
    """All updates that this batch of responses is used for."""
    policy_rate = config.rate(step, total)
    critic_rate = config.rate(step, total, config.critic_learning_rate)
    plan = replace(plan, advantages=whitened(plan, config))
    rows = len(experience.scores)
    gathered: list[dict[str, Tensor]] = []
    for _ in range(config.num_ppo_epochs):
        alone = config.num_mini_batches == 1
        order = torch.arange(rows) if alone else torch.randperm(rows, generator=shuffler)
        for mini in order.chunk(config.num_mini_batches):
            losses = backward(mini.tolist(), experience, plan, models, config)
            check_finite(losses.items())
            norms = [
                apply_update(model, optimizers[name], rate, config.max_grad_norm, models.world)
                for name, model, rate in (
                    ("policy", models.policy, policy_rate),
                    ("critic", models.critic, critic_rate),
                )
            ]
            gathered.append(
                losses | {"rl/policy_grad_norm": norms[0], "rl/critic_grad_norm": norms[1]}
            )
    models.engine.update_weights(models.policy)
    means = {name: torch.stack([g[name] for g in gathered]).mean() for name in gathered[0]}
    return means | {"rl/learning_rate": torch.tensor(policy_rate)}


def backward(
    mini: list[int], experience: Experience, plan: Credit, models: Models, config: PPOConfig
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean."""
    chosen, world = experience.sequences.rows(mini), models.world
    device = chosen.mask.device
    where = send(torch.tensor(mini), device)
    counts = count(Segments(plan.segments.ids[where], plan.segments.mask[where]))
    names = ["rl/policy_loss", "rl/clip_fraction", "rl/approx_kl", "rl/logprob_gap"]
    names += [] if config.one_update else ["rl/value_loss"]  # `appraise` has seen to it
    sums = {name: torch.zeros((), device=device) for name in names}
    for micro in world.batches(chosen.total_lengths, config.token_budget):
        part, index = chosen.rows(micro.rows), where[send(torch.tensor(micro.rows), device)]
        width = part.mask.shape[1]

        def cut(x: Tensor, index: Tensor = index, width: int = width) -> Tensor:
            return x[index, :width]

        segments = Segments(cut(plan.segments.ids), part.mask)
        with autocast(device, config.precision):
            logprobs = token_stats(models.policy, part, config.sampling.scale).logprobs
        old = experience.old_logprobs
        old = logprobs.detach() if old is None else cut(old)
        loss = ppo_policy_loss(
            logprobs,
            old,
            cut(plan.advantages),
            part.mask,
            clip=config.clip,
            dual_clip=config.dual_clip,
            ratio=config.ratio,
            segments=segments,
            num_tokens=counts["token" if config.ratio == "token" else "macro"],
        )
        (loss * micro.weight).backward()  # before the critic's pass: less is in memory at once
        found = {"rl/policy_loss": loss}
        if not config.one_update:
            with autocast(device, config.precision):
                values = token_values(models.critic, part)
            before, returns = cut(plan.values), cut(plan.returns)
            loss = value_loss(values, before, returns, segments, counts, config)
            (loss * micro.weight).backward()
            found["rl/value_loss"] = loss
        moved = drift(logprobs, old, cut(experience.logprobs), segments, counts["token"], config)
        found |= {f"rl/{name}": value for name, value in moved.items()}
        for name, value in found.items():
            sums[name] += value.detach() * micro.weight
    return dict(zip(sums, world.sum(torch.stack(list(sums.values())))))


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


def sample_credit(
    experience: Experience,
    models: Models,
    config: PPOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Credit without learning, for held-out samples."""
    decisions = decide(experience, models.vocabulary, config, kl_coef, shuffler)
    values, _ = appraise(experience, decisions, models, config, learn=False)
    return credit(decisions, values, config)


def whitened(plan: Credit, config: PPOConfig) -> Tensor:
    """Advantages at unit scale, each token or each macro action having one vote."""
    mask = plan.segments.mask
    if config.whiten == "none":
        return plan.advantages
    if config.whiten == "tokens":
        return whiten(plan.advantages, mask)
    stats = moments(plan.segments.first(plan.advantages), plan.segments.macro_mask)
    return whiten(plan.advantages, mask, stats=stats)


@torch.no_grad()
def describe(experience: Experience, plan: Credit, kl_coef: float) -> dict[str, Tensor]:
    """Numbers about a batch, all still on the device."""
    mask = experience.sequences.mask
    kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0.0).sum(dim=1)
    lengths = mask.sum(dim=1).float()
    actions = plan.segments.macro_mask.sum().float()
    return {
        "rl/score": experience.scores.mean(),
        "rl/score_std": experience.scores.std(correction=0),
        "rl/reward": plan.rewards.sum(dim=1).mean(),
        "rl/kl": kl.mean(),
        "rl/kl_coef": torch.tensor(kl_coef),
        "rl/length": lengths.mean(),
        "rl/ended": experience.ended.float().mean(),
        "rl/entropy": -masked_mean(experience.logprobs, mask),
        "rl/macro_length": lengths.sum() / actions.clamp(min=1),
        "rl/advantage_norm": torch.linalg.vector_norm(plan.advantages),
        "rl/q_norm": torch.linalg.vector_norm(plan.returns),
        "rl/value": masked_mean(plan.values, mask),
        "rl/explained_variance": explained_variance(plan.values, plan.returns, mask),
    }
