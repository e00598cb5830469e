"""The reward model: from pairs of responses, one number that says which people prefer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import reward_loss
from marlhf.data.collate import Micro
from marlhf.models.base import Model, autocast
from marlhf.models.forward import final_scores
from marlhf.models.sequences import Sequences
from marlhf.runtime.distributed import World, start
from marlhf.runtime.loop import Loop, open_run
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.model_loader import load_trained_scalar
from marlhf.runtime.objects import NO_OBJECTS, GivenObjects
from marlhf.runtime.optim import Update, apply_updates, check_finite, make_optimizer
from marlhf.runtime.stage import Example, batch_rows, count_steps, load_supervised, seed_run
from marlhf.train.reward_config import RewardConfig

MAX_HELD_OUT = 1024
"""Held-out pairs that an evaluation looks at, at most."""


def train(config: RewardConfig, objects: GivenObjects = NO_OBJECTS) -> Path:
    """Train, or resume training; returns the folder of the model."""
    world = start(config.device, config.parallel)
    run = open_run(config, "reward", world)
    if run.finished:
        return run.model
    seed_run(config)
    tokenizer, model, examples, held_out = load_supervised(
        config, "reward", objects, world, load_trained_scalar
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    model = world.place(model, config.precision, compiled=config.compile)
    optimizer = make_optimizer(model, config.learning_rate, config.weight_decay)
    total = count_steps(config, len(examples))
    pad = tokenizer.pad_token_id
    loop = Loop(
        run,
        config,
        world,
        total,
        models={"model": model},
        optimizers={"model": optimizer},
        tokenizer=tokenizer,
        objects=objects,
        rows=(len(examples), len(held_out)),
        metric="accuracy",
    )
    measure = partial(evaluate, model, held_out, pad, config, world)
    measure = partial(fit_memory, world, measure)
    loop.resume()
    with loop:
        if not loop.done:
            loop.evaluated(measure())
        for step in loop:
            rows = [examples[i] for i in batch_rows(step - 1, config, len(examples))]
            rate = config.rate(step, total)
            loss, margins = fit_memory(
                world, partial(backward, model, rows, pad, config, world), model
            )
            finite = [("reward/loss", loss), ("reward/margin", margins)]
            [norm] = apply_updates(
                [Update(model, optimizer, rate)], config.max_grad_norm, world, finite
            )
            metrics = {
                "reward/loss": float(loss),
                "reward/accuracy": accuracy(margins),
                "reward/margin": float(margins.mean()),
                "reward/grad_norm": float(norm),
                "reward/learning_rate": rate,
            }
            loop.log(metrics, show=("reward/loss", "reward/accuracy"))
            if loop.must_evaluate:
                loop.evaluated(measure())
            if loop.must_save:
                loop.save()
        final = loop.final_metrics(measure)
        next_step = f"marlhf ppo, with reward_model: {run.model}"
        return loop.close(model, {**final, "steps": loop.step}, next_step)


def backward(
    model: Model, rows: list[Example], pad_id: int, config: RewardConfig, world: World
) -> tuple[Tensor, Tensor]:
    """Gradients of the batch's mean loss, micro-batch by micro-batch: the loss, and margins [B]."""
    total = torch.zeros((), device=world.device)
    margins = torch.zeros(len(rows), device=world.device)
    for micro in pair_batches(rows, config.pass_tokens, world):
        pairs = [rows[i] for i in micro.rows]
        chosen, rejected = score_pairs(model, pairs, pad_id, config, world.device)
        loss = reward_loss(chosen, rejected, center_coef=config.center_coef, num_pairs=len(rows))
        loss = loss * micro.weight
        loss.backward()
        total += loss.detach()
        margins[micro.rows] += (chosen - rejected).detach() * micro.weight
    return world.sum(total), world.sum(margins)


@torch.no_grad()
def evaluate(
    model: Model, rows: list[Example], pad_id: int, config: RewardConfig, world: World
) -> dict[str, float]:
    """Accuracy and loss on held-out pairs; NaN when there are none."""
    rows = rows[:MAX_HELD_OUT]
    if not rows:
        return {"eval/accuracy": float("nan"), "eval/loss": float("nan")}
    scores = torch.zeros(2, len(rows), device=world.device)
    for micro in pair_batches(rows, config.pass_tokens, world):
        pairs = [rows[i] for i in micro.rows]
        chosen, rejected = score_pairs(model, pairs, pad_id, config, world.device)
        scores[:, micro.rows] += torch.stack((chosen, rejected)) * micro.weight
    scores = world.sum(scores)
    check_finite([("the held-out scores", scores)])
    chosen, rejected = scores
    return {
        "eval/accuracy": accuracy(chosen - rejected),
        "eval/loss": float(reward_loss(chosen, rejected)),
        "eval/margin": float((chosen - rejected).mean()),
    }


def score_pairs(
    model: Model, rows: list[Example], pad_id: int, config: RewardConfig, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Scores of chosen and rejected, [B] each, from one pass over both."""
    prompts = [e.prompt for e in rows]
    responses = [e.chosen for e in rows] + [e.rejected for e in rows]
    both = Sequences.from_lists(prompts + prompts, responses, pad_id, device)
    with autocast(device, config.precision):
        chosen, rejected = final_scores(model, both).chunk(2)
    return chosen, rejected


def pair_batches(rows: list[Example], token_budget: int, world: World) -> list[Micro]:
    """Micro-batches of pairs: half the budget each, as both responses are in one pass."""
    longest = [len(e.prompt) + max(len(e.chosen), len(e.rejected)) for e in rows]
    return world.batches(longest, max(1, token_budget // 2))


def accuracy(margins: Tensor) -> float:
    """Share of pairs whose chosen response scores higher; a tie counts half."""
    return float(((margins > 0).float() + 0.5 * (margins == 0).float()).mean())
