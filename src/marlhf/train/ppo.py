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
from marlhf.data.collate import token_budget_batches
from marlhf.models.forward import Sequences, token_stats, token_values
from marlhf.models.load import autocast
from marlhf.train.checkpoint import generator_state, save_checkpoint, set_generator_state
from marlhf.train.guards import warn_early
from marlhf.train.kl import KLController
from marlhf.train.measure import Clock, explained_variance, to_numbers
from marlhf.train.optim import apply_update, check_finite, learning_rate_at, make_optimizer
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.ppo_models import Models, load_models
from marlhf.train.probe import Probe
from marlhf.train.progress import Steps, say, warn
from marlhf.train.run import RunFolder
from marlhf.train.stage import (
    batch_rows,
    check_positions,
    count_steps,
    due,
    each_prompt_once,
    finish,
    load_examples,
    orderly,
    resume,
)


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


def train(config: PPOConfig) -> Path:
    """Train, or go on training; returns the folder of the policy."""
    run = RunFolder(config.output_dir, "ppo", config)
    if run.finished:
        say(f"{run.path.name} is finished: {run.model}")
        return run.model
    warn_early(config)
    torch.manual_seed(config.seed)
    models = load_models(config)
    device = models.policy.device
    loaded = load_examples(config, "ppo", models.tokenizer, needs=("prompt",))
    examples, held_out = map(each_prompt_once, loaded)
    readers = {"policy": models.policy, "reference": models.reference, "critic": models.critic}
    if not models.reward.foreign:  # else it counts other tokens
        readers["reward model"] = models.reward.model
    for name, model in readers.items():
        check_positions(model, examples + held_out, config.sampling.max_new_tokens, name)
    prompts = [e.prompt for e in examples]
    optimizers = {
        "policy": make_optimizer(models.policy, config.learning_rate, config.weight_decay),
        "critic": make_optimizer(models.critic, config.critic_learning_rate, config.weight_decay),
    }
    trained = {"policy": models.policy, "critic": models.critic}
    total = count_steps(config, len(prompts))
    sampler = torch.Generator(device).manual_seed(config.seed)
    shuffler = torch.Generator().manual_seed(config.seed + 1)  # mini-batches, random segments
    controller = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
    probe = Probe(config, models, held_out, run, collect, credit)

    state = resume(run, models=trained, optimizers=optimizers)
    done = step = 0
    verdict = ""
    if state:
        done = step = state["step"]
        set_generator_state(sampler, state["sampler"])
        set_generator_state(shuffler, state["shuffler"])
        controller.coef = state["kl_coef"]
        probe.load_state(state["probe"])
        verdict = state["verdict"]

    with orderly(run) as interrupts, Steps(run.path.name, total, done) as progress:
        if not done:
            probe(0, controller.coef)
            interrupts.check("before the first step")
        for step in range(done + 1, (done if verdict else total) + 1):
            clock = Clock(device)
            batch = [prompts[i] for i in batch_rows(step - 1, config, len(prompts))]
            experience = collect(batch, models, config, sampler, probe.normalise, clock)
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
            metrics |= describe(experience, plan, controller.coef)
            numbers = to_numbers(metrics) | clock.times(len(batch))
            controller.update(numbers["ppo/kl"], len(batch))
            run.log("train", step, numbers)
            progress.advance(step, {k: numbers[f"ppo/{k}"] for k in ("score", "kl", "length")})

            verdict = probe(step, controller.coef) if due(step, config.eval_every, total) else ""
            if due(step, config.save_every, 0) or interrupts.asked or verdict:
                state = {
                    "sampler": generator_state(sampler),
                    "shuffler": generator_state(shuffler),
                    "kl_coef": controller.coef,
                    "probe": probe.state(),
                    "verdict": verdict,
                }
                save_checkpoint(
                    run,
                    step,
                    models=trained,
                    optimizers=optimizers,
                    state=state,
                    keep=config.keep_checkpoints,
                )
            interrupts.check(f"saved at step {step} in {run.path}")
            if verdict:
                break
        if verdict:
            warn(verdict)
            run.state["note"] = verdict
        run.save_model(models.policy, models.tokenizer)
    next_step = f"marlhf report {run.path.parent} -o {run.path.parent / 'report.html'}"
    return finish(run, probe.latest | {"steps": step}, next_step)


@torch.no_grad()
def collect(
    prompts: list[list[int]],
    models: Models,
    config: PPOConfig,
    sampler: torch.Generator,
    normalise: Callable[[Tensor], Tensor],
    clock: Clock,
) -> Experience:
    """Sample, then ask reward model, reference and critic."""
    rollout = models.engine.generate(prompts, config.sampling, sampler)
    clock.mark("rollout")
    sequences = Sequences.from_lists(
        prompts, rollout.responses, models.tokenizer.pad_token_id, models.policy.device
    )
    raw_scores = models.reward(prompts, rollout.responses)
    scores = normalise(raw_scores) - config.missing_eos_penalty * (~rollout.ended).float()
    temperature = config.sampling.scale
    shape, device = sequences.mask.shape, models.policy.device
    ref_logprobs, values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    # With one update the old policy is the new one, and its log-probs need no pass of their own.
    old_logprobs = None if config.one_update else torch.zeros(shape, device=device)
    for micro in token_budget_batches(sequences.total_lengths, 2 * config.token_budget):
        part = sequences.rows(micro)
        where, width = torch.tensor(micro, device=device), part.mask.shape[1]
        with autocast(device, config.precision):
            ref = token_stats(models.reference, part, temperature).logprobs
            ref_logprobs[where, :width] = ref
            values[where, :width] = token_values(models.critic, part)
            if old_logprobs is not None:
                old = token_stats(models.policy, part, temperature).logprobs
                old_logprobs[where, :width] = old
    clock.mark("score")
    return Experience(
        sequences,
        scores,
        raw_scores,
        rollout.ended,
        rollout.logprobs,
        ref_logprobs,
        values,
        old_logprobs,
    )


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
    warmup = config.warmup_steps
    warmup = round(config.warmup_ratio * total) if warmup is None else warmup
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
                apply_update(model, optimizers[name], rate, config.max_grad_norm)
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
    chosen = experience.sequences.rows(mini)
    device = chosen.mask.device
    where = torch.tensor(mini, device=device)
    num_tokens = chosen.mask.sum().clamp(min=1)
    num_macros = plan.segments.macro_mask[where].sum().clamp(min=1)
    names = ("ppo/policy_loss", "ppo/value_loss", "ppo/clip_fraction", "ppo/approx_kl")
    sums = {name: torch.zeros((), device=device) for name in (*names, "ppo/logprob_gap")}
    for micro in token_budget_batches(chosen.total_lengths, config.token_budget):
        part, index = chosen.rows(micro), where[torch.tensor(micro, device=device)]
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
        policy_loss.backward()
        value_loss.backward()
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
                sums[name] += value.detach()
    return sums


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
