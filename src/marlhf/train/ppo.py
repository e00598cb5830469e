"""PPO over macro actions, from top to bottom.

Each step: sample responses, score them, cut them into macro actions, credit each with an
advantage, update policy and critic. With `segmenter: {type: ngram, n: 1}` this is ordinary PPO.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import (
    Responses,
    Segments,
    Vocabulary,
    kl_estimate,
    macro_gae,
    masked_mean,
    moments,
    ppo_policy_loss,
    ppo_value_loss,
    segment,
    shape_rewards,
    whiten,
)
from marlhf.models.forward import Sequences, token_stats, token_values
from marlhf.models.load import autocast
from marlhf.rollout import Rollout, Sampling
from marlhf.train.checkpoint import generator_state, set_generator_state
from marlhf.train.distributed import gather_rollout, start
from marlhf.train.guards import warn_early
from marlhf.train.kl import KLController
from marlhf.train.loop import Loop, open_run
from marlhf.train.measure import Clock, explained_variance, to_numbers
from marlhf.train.optim import apply_update, check_finite, learning_rate_at, make_optimizer
from marlhf.train.parts import NOTHING, Parts
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.probe import Probe
from marlhf.train.rl_config import RLConfig
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.stage import Example, batch_rows, count_steps


@dataclass(frozen=True)
class Experience:
    """A batch of responses and what everyone thinks of them, before any update."""

    sequences: Sequences
    scores: Tensor  # [B], normalised, with the penalty for a missing end
    raw_scores: Tensor  # [B], what the reward model says
    ended: Tensor  # [B] bool
    logprobs: Tensor  # [B, T], of the policy that sampled
    ref_logprobs: Tensor  # [B, T]
    values: Tensor  # [B, T]
    old_logprobs: Tensor | None  # [B, T], by the training pass; None when one update follows


@dataclass(frozen=True)
class Credit:
    """Who earned what."""

    rewards: Tensor  # [B, T]
    segments: Segments
    advantages: Tensor  # [B, T], constant within a macro action
    returns: Tensor  # [B, T]


def train(config: PPOConfig, parts: Parts = NOTHING) -> Path:
    """Train, or go on training; returns the folder of the policy."""
    world = start(config.device, config.parallel)
    run = open_run(config, "ppo", world)
    if run.finished:
        return run.model
    warn_early(config)
    torch.manual_seed(config.seed)
    models = load_models(config, parts, world, critic=True)
    examples, held_out = load_prompts(config, models, parts)
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
        parts=parts,
        rows=(len(examples), len(held_out)),
        metric="score",
    )
    probe = Probe(config, models, held_out, loop, collect, credit)
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
            plan = credit(experience, models.vocabulary, config, controller.coef, shuffler)
            check_finite(
                [
                    ("the scores", experience.scores),
                    ("the reference's log-probs", experience.ref_logprobs),
                    ("the critic's values", experience.values),
                    ("the rewards", plan.rewards),
                ]
            )
            clock.mark("credit")
            metrics = update(experience, plan, models, optimizers, config, step, total, shuffler)
            clock.mark("update")
            metrics |= describe(experience, plan, controller.coef) | reward_parts(models)
            numbers = to_numbers(metrics) | clock.times(len(batch))
            controller.update(numbers["ppo/kl"], len(batch))
            loop.log(numbers, show=("ppo/score", "ppo/kl", "ppo/length"))
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


@torch.no_grad()
def collect(
    examples: list[Example],
    models: Models,
    config: RLConfig,
    seeds: list[int],
    normalise: Callable[[Tensor], Tensor],
    clock: Clock,
) -> Experience:
    """Sample, then ask reward model, reference and critic."""
    prompts = [e.prompt for e in examples]
    world, device = models.world, models.world.device
    rollout = sample(prompts, models, config.sampling, seeds)
    clock.mark("rollout")
    raw_scores = models.reward(prompts, rollout.responses, [e.row for e in examples])
    scores = normalise(raw_scores) - config.missing_eos_penalty * (~rollout.ended).float()
    pad_id, temperature = models.tokenizer.pad_token_id, config.sampling.scale
    sequences = Sequences.from_lists(prompts, rollout.responses, pad_id, device)
    # With one update the old policy is the new one, and its log-probs need no pass of their own.
    names = ("ref", "value") if config.one_update else ("ref", "value", "old")
    found = {name: torch.zeros(sequences.mask.shape, device=device) for name in names}
    for micro in world.batches(sequences.total_lengths, 2 * config.token_budget):
        part = sequences.rows(micro.rows)
        where, width = torch.tensor(micro.rows, device=device), part.mask.shape[1]
        with autocast(device, config.precision):
            answers = {"ref": token_stats(models.reference, part, temperature).logprobs}
            if models.critic is not None:
                answers["value"] = token_values(models.critic, part)
            if "old" in found:
                answers["old"] = token_stats(models.policy, part, temperature).logprobs
        for name, answer in answers.items():
            found[name][where, :width] += answer * micro.weight
    found = {name: world.sum(x) for name, x in found.items()}
    clock.mark("score")
    return Experience(
        sequences,
        scores,
        raw_scores,
        rollout.ended,
        rollout.logprobs,
        found["ref"],
        found["value"],
        found.get("old"),
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
def credit(
    experience: Experience,
    table: Vocabulary,
    config: PPOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Rewards, macro actions, advantages: the method itself."""
    sequences = experience.sequences
    seeds = torch.randint(2**62, (len(sequences.mask),), generator=shuffler)
    responses = Responses(
        sequences.responses,
        sequences.mask,
        ref_logprobs=experience.ref_logprobs,
        vocabulary=table,
        seeds=seeds.to(sequences.mask.device),
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
    segments = segment(config.segmenter, responses, split_last=config.split_last).validate()
    advantages, returns = macro_gae(
        rewards,
        experience.values,
        segments,
        gamma=config.gamma,
        lam=config.lam,
        rho=config.rho,
        sigma=config.sigma,
        pooling=config.pooling,
    )
    return Credit(rewards, segments, advantages, returns)


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
    warmup = config.warmup(total)
    policy_rate, critic_rate = (
        learning_rate_at(step - 1, peak, total=total, warmup=warmup, schedule=config.schedule)
        for peak in (config.learning_rate, config.critic_learning_rate)
    )
    plan = replace(plan, advantages=whitened(plan, config))
    rows = len(experience.scores)
    gathered: list[dict[str, Tensor]] = []
    for _ in range(config.num_ppo_epochs):
        alone = config.num_mini_batches == 1
        order = torch.arange(rows) if alone else torch.randperm(rows, generator=shuffler)
        for mini in order.chunk(config.num_mini_batches):
            losses = backward(mini.tolist(), experience, plan, models, config)
            check_finite((name, losses[name]) for name in ("ppo/policy_loss", "ppo/value_loss"))
            norms = [
                apply_update(model, optimizers[name], rate, config.max_grad_norm, models.world)
                for name, model, rate in (
                    ("policy", models.policy, policy_rate),
                    ("critic", models.critic, critic_rate),
                )
            ]
            gathered.append(
                losses | {"ppo/policy_grad_norm": norms[0], "ppo/critic_grad_norm": norms[1]}
            )
    models.engine.update_weights(models.policy)
    means = {name: torch.stack([g[name] for g in gathered]).mean() for name in gathered[0]}
    return means | {"ppo/learning_rate": torch.tensor(policy_rate)}


def backward(
    mini: list[int], experience: Experience, plan: Credit, models: Models, config: PPOConfig
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean."""
    chosen, world = experience.sequences.rows(mini), models.world
    device = chosen.mask.device
    where = torch.tensor(mini, device=device)
    num_tokens = chosen.mask.sum().clamp(min=1)
    num_macros = plan.segments.macro_mask[where].sum().clamp(min=1)
    names = ("ppo/policy_loss", "ppo/value_loss", "ppo/clip_fraction", "ppo/approx_kl")
    sums = {name: torch.zeros((), device=device) for name in (*names, "ppo/logprob_gap")}
    for micro in world.batches(chosen.total_lengths, config.token_budget):
        part, index = chosen.rows(micro.rows), where[torch.tensor(micro.rows, device=device)]
        mask, width = part.mask, part.mask.shape[1]

        def cut(x: Tensor, index: Tensor = index, width: int = width) -> Tensor:
            return x[index, :width]

        segments = Segments(cut(plan.segments.ids), mask)
        with autocast(device, config.precision):
            logprobs = token_stats(models.policy, part, config.sampling.scale).logprobs
            values = token_values(models.critic, part)
        old = experience.old_logprobs
        old = logprobs.detach() if old is None else cut(old)
        policy_loss = ppo_policy_loss(
            logprobs,
            old,
            cut(plan.advantages),
            mask,
            clip=config.clip,
            dual_clip=config.dual_clip,
            ratio=config.ratio,
            segments=segments,
            num_tokens=num_tokens if config.ratio == "token" else num_macros,
        )
        value_loss = ppo_value_loss(
            values,
            cut(experience.values),
            cut(plan.returns),
            mask,
            clip=config.value_clip,
            level=config.value_level,
            sigma=config.sigma,
            segments=segments,
            num_tokens=num_tokens if config.value_level == "token" else num_macros,
        )
        (policy_loss * micro.weight).backward()
        (value_loss * micro.weight).backward()
        with torch.no_grad():
            change = logprobs - old
            if config.ratio != "token":
                pool = segments.sum if config.ratio == "macro" else segments.mean
                change = segments.spread(pool(change))
            outside = ((change.exp() - 1).abs() > config.clip).float()
            gap = (logprobs - cut(experience.logprobs)).abs()
            found = (
                policy_loss,
                value_loss,
                masked_mean(outside, mask, num_tokens),
                masked_mean(kl_estimate(old, logprobs, "k3"), mask, num_tokens),
                masked_mean(gap, mask, num_tokens),
            )
            for name, value in zip(sums, found):
                sums[name] += value.detach() * micro.weight
    return dict(zip(sums, world.sum(torch.stack(list(sums.values())))))


def whitened(plan: Credit, config: PPOConfig) -> Tensor:
    """Advantages at unit scale, each token or each macro action having one vote."""
    mask = plan.segments.mask
    if config.whiten == "none":
        return plan.advantages
    if config.whiten == "tokens":
        return whiten(plan.advantages, mask)
    stats = moments(plan.segments.first(plan.advantages), plan.segments.macro_mask)
    return whiten(plan.advantages, mask, stats=stats)


def reward_parts(models: Models) -> dict[str, Tensor]:
    """The mean of each reward, where there are several."""
    latest = models.reward.latest
    return {f"rewards/{name}": x for name, x in latest.items()} if len(latest) > 1 else {}


@torch.no_grad()
def describe(experience: Experience, plan: Credit, kl_coef: float) -> dict[str, Tensor]:
    """Numbers about a batch, all still on the device."""
    mask = experience.sequences.mask
    kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0.0).sum(dim=1)
    lengths = mask.sum(dim=1).float()
    actions = plan.segments.macro_mask.sum().float()
    return {
        "ppo/score": experience.scores.mean(),
        "ppo/score_std": experience.scores.std(correction=0),
        "ppo/reward": plan.rewards.sum(dim=1).mean(),
        "ppo/kl": kl.mean(),
        "ppo/kl_coef": torch.tensor(kl_coef),
        "ppo/length": lengths.mean(),
        "ppo/ended": experience.ended.float().mean(),
        "ppo/entropy": -masked_mean(experience.logprobs, mask),
        "ppo/macro_length": lengths.sum() / actions.clamp(min=1),
        "ppo/advantage_norm": torch.linalg.vector_norm(plan.advantages),
        "ppo/q_norm": torch.linalg.vector_norm(plan.returns),
        "ppo/value": masked_mean(experience.values, mask),
        "ppo/explained_variance": explained_variance(experience.values, plan.returns, mask),
    }
