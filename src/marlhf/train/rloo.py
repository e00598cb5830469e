"""RLOO and GRPO over macro actions: several responses to a prompt instead of a critic.

Each step: sample `num_samples` responses to each prompt, score them, credit each against the
others to the same prompt, update the policy. With one action a response (the default) this is
RLOO; with shorter macro actions each is credited with the reward that is still to come.

Axes: B rows, T response tokens, M macro actions. Rows come prompt by prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import (
    Segments,
    Vocabulary,
    group_advantages,
    kl_estimate,
    macro_gae,
    ppo_policy_loss,
    rloo_advantages,
)
from marlhf.models.base import autocast
from marlhf.models.forward import send, token_stats
from marlhf.train import ppo
from marlhf.train.checkpoint import generator_state, set_generator_state
from marlhf.train.distributed import start
from marlhf.train.experience import (
    Credit,
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
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.stage import batch_rows, count_steps
from marlhf.train.timing import Clock, to_numbers
from marlhf.train.watch import warn_early

OF_THE_CRITIC = ("rl/value", "rl/explained_variance")
"""What PPO measures and these methods do not have."""


def train(config: RLOOConfig, objects: GivenObjects = NO_OBJECTS) -> Path:
    """Train, or go on training; returns the folder of the policy."""
    world = start(config.device, config.parallel)
    run = open_run(config, "rloo", world)
    if run.finished:
        return run.model
    warn_early(config)
    torch.manual_seed(config.seed)
    models = load_models(config, objects, world, critic=False)
    examples, held_out = load_prompts(config, models, objects)
    if sandbox_layers := models.reward.sandbox:
        run.state["sandbox"] = sandbox_layers
    optimizer = make_optimizer(models.policy, config.learning_rate, config.weight_decay)
    total = count_steps(config, len(examples))
    sampler = torch.Generator().manual_seed(config.seed)  # a seed for each response
    shuffler = torch.Generator().manual_seed(config.seed + 1)  # mini-batches, random segments
    controller = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
    loop = Loop(
        run,
        config,
        world,
        total,
        models={"policy": models.policy},
        optimizers={"policy": optimizer},
        tokenizer=models.tokenizer,
        objects=objects,
        rows=(len(examples), len(held_out)),
        metric="score",
    )
    probe = HeldOutEvaluation(config, models, held_out, loop, collect, held_out_credit)
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
            prompts = [examples[i] for i in batch_rows(step - 1, config, len(examples))]
            batch = [e for e in prompts for _ in range(config.num_samples)]
            seeds = torch.randint(2**62, (len(batch),), generator=sampler).tolist()
            experience = collect(batch, models, config, seeds, probe.normalise, clock)
            plan = credit(experience, models.vocabulary, config, controller.coef, shuffler)
            check_finite(
                [
                    ("the scores", experience.scores),
                    ("the reference's log-probs", experience.ref_logprobs),
                    ("the rewards", plan.rewards),
                ]
            )
            clock.mark("credit")
            rate = config.rate(step, total)
            metrics = update(
                experience, plan, models, optimizer, config, controller.coef, rate, shuffler
            )
            clock.mark("update")
            metrics |= describe(experience, plan, config, controller.coef) | reward_parts(models)
            numbers = to_numbers(metrics) | clock.times(len(batch))
            controller.update(numbers["rl/kl"], len(batch))
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


@torch.no_grad()
def credit(
    experience: Experience,
    table: Vocabulary,
    config: RLOOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Rewards, macro actions, and what each brought above the other responses to its prompt."""
    plan = still_to_come(experience, table, config, kl_coef, shuffler)
    settings = (plan.rewards, config.num_samples, plan.segments)
    if config.baseline == "leave_one_out":
        advantages = rloo_advantages(*settings, gamma=config.gamma)
    else:
        advantages = group_advantages(*settings, gamma=config.gamma, scale=config.scale_group)
    return replace(plan, advantages=advantages)


@torch.no_grad()
def held_out_credit(
    experience: Experience,
    models: Models,
    config: RLOOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """For samples to look at: a held-out prompt is answered once, so all of them are one group."""
    plan = still_to_come(experience, models.vocabulary, config, kl_coef, shuffler)
    above = plan.returns - plan.returns[:, :1].mean()
    return replace(plan, advantages=torch.where(plan.segments.mask, above, 0.0))


def still_to_come(
    experience: Experience,
    table: Vocabulary,
    config: RLOOConfig,
    kl_coef: float,
    shuffler: torch.Generator,
) -> Credit:
    """Rewards, macro actions and the return from each on, held against nothing yet."""
    penalty = kl_coef if config.kl_in == "reward" else 0.0
    found = decide(experience, table, config, penalty, shuffler)
    # Where nothing is valued, what generalised advantage estimation adds up is the return.
    nothing = torch.zeros_like(found.rewards)
    advantages, returns = macro_gae(
        found.rewards, nothing, found.segments, gamma=config.gamma, lam=1.0
    )
    return Credit(found.rewards, found.segments, nothing, advantages, returns)


def update(
    experience: Experience,
    plan: Credit,
    models: Models,
    optimizer: torch.optim.Optimizer,
    config: RLOOConfig,
    kl_coef: float,
    rate: float,
    shuffler: torch.Generator,
) -> dict[str, Tensor]:
    """All updates that this batch of responses is used for."""
    rows = len(experience.scores)
    alone = config.num_mini_batches == 1
    order = torch.arange(rows) if alone else torch.randperm(rows, generator=shuffler)
    gathered: list[dict[str, Tensor]] = []
    for mini in order.chunk(config.num_mini_batches):
        losses = backward(mini.tolist(), experience, plan, models, config, kl_coef)
        check_finite([("rl/policy_loss", losses["rl/policy_loss"])])
        norm = apply_update(models.policy, optimizer, rate, config.max_grad_norm, models.world)
        gathered.append(losses | {"rl/policy_grad_norm": norm})
    models.engine.update_weights(models.policy)
    means = {name: torch.stack([g[name] for g in gathered]).mean() for name in gathered[0]}
    return means | {"rl/learning_rate": torch.tensor(rate)}


def backward(
    mini: list[int],
    experience: Experience,
    plan: Credit,
    models: Models,
    config: RLOOConfig,
    kl_coef: float,
) -> dict[str, Tensor]:
    """Gradients of one mini-batch, micro-batch by micro-batch, as exact parts of its mean."""
    chosen, world = experience.sequences.rows(mini), models.world
    device = chosen.mask.device
    where = send(torch.tensor(mini), device)
    counts = count(Segments(plan.segments.ids[where], plan.segments.mask[where]))
    num_terms = counts["token" if config.ratio == "token" else "macro"]
    names = ("policy_loss", "clip_fraction", "approx_kl", "logprob_gap")
    sums = {f"rl/{name}": torch.zeros((), device=device) for name in names}
    for micro in world.batches(chosen.total_lengths, config.token_budget):
        part, index = chosen.rows(micro.rows), where[send(torch.tensor(micro.rows), device)]
        mask, width = part.mask, part.mask.shape[1]

        def cut(x: Tensor, index: Tensor = index, width: int = width) -> Tensor:
            return x[index, :width]

        segments = Segments(cut(plan.segments.ids), mask)
        with autocast(device, config.precision):
            logprobs = token_stats(models.policy, part, config.sampling.scale).logprobs
        old = experience.old_logprobs
        old = logprobs.detach() if old is None else cut(old)
        loss = ppo_policy_loss(
            logprobs,
            old,
            cut(plan.advantages),
            mask,
            clip=config.clip,
            dual_clip=config.dual_clip,
            ratio=config.ratio,
            segments=segments,
            num_tokens=num_terms,
        )
        if config.kl_in == "loss":
            kl = kl_estimate(logprobs, cut(experience.ref_logprobs), "k3")
            loss = loss + kl_coef * by_action(kl, segments, config) / num_terms
        (loss * micro.weight).backward()
        moved = drift(logprobs, old, cut(experience.logprobs), segments, counts["token"], config)
        for name, value in ({"policy_loss": loss} | moved).items():
            sums[f"rl/{name}"] += value.detach() * micro.weight
    return dict(zip(sums, world.sum(torch.stack(list(sums.values())))))


def by_action(x: Tensor, segments: Segments, config: RLOOConfig) -> Tensor:
    """The sum of [B, T] as the policy loss counts it: a token's, an action's, or its mean."""
    if config.ratio == "macro_mean":
        return segments.mean(x).sum()
    return torch.where(segments.mask, x, 0.0).sum()


def describe(
    experience: Experience, plan: Credit, config: RLOOConfig, kl_coef: float
) -> dict[str, Tensor]:
    """PPO's numbers about a batch, but for the critic's, and the spread within prompts."""
    numbers = ppo.describe(experience, plan, kl_coef)
    shared = {name: value for name, value in numbers.items() if name not in OF_THE_CRITIC}
    by_prompt = experience.scores.view(-1, config.num_samples)
    return shared | {"rl/group_std": by_prompt.std(dim=1).mean()}
