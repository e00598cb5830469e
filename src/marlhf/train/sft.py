"""Supervised fine-tuning on the chosen responses: the loss is on response tokens only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import sft_loss
from marlhf.models.base import Model, autocast
from marlhf.models.forward import token_stats
from marlhf.models.sequences import Sequences
from marlhf.runtime.distributed import World, start
from marlhf.runtime.loop import Loop, open_run
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.model_loader import load_trained_policy
from marlhf.runtime.objects import NO_OBJECTS, GivenObjects
from marlhf.runtime.optim import Update, apply_updates, check_finite, make_optimizer
from marlhf.runtime.stage import Example, batch_rows, count_steps, load_supervised, seed_run
from marlhf.train.sft_config import SFTConfig

MAX_HELD_OUT = 512
"""Held-out rows that an evaluation looks at, at most."""


def train(config: SFTConfig, objects: GivenObjects = NO_OBJECTS) -> Path:
    """Train, or resume training; returns the folder of the model."""
    world = start(config.device, config.parallel)
    run = open_run(config, "sft", world)
    if run.finished:
        return run.model
    seed_run(config)
    tokenizer, model, examples, held_out = load_supervised(
        config, "sft", objects, world, load_trained_policy
    )
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
        metric="loss",
    )
    measure = partial(evaluate, model, held_out, pad, config, world)
    measure = partial(fit_memory, world, measure)
    loop.resume()
    with loop:
        if not loop.done:
            loop.evaluated(measure())
        for step in loop:
            start_time = time.perf_counter()
            rows = [examples[i] for i in batch_rows(step - 1, config, len(examples))]
            rate = config.rate(step, total)
            loss = fit_memory(world, partial(backward, model, rows, pad, config, world), model)
            finite = [("sft/loss", loss)]
            [norm] = apply_updates(
                [Update(model, optimizer, rate)], config.max_grad_norm, world, finite
            )
            tokens = sum(len(e.prompt) + len(e.chosen) for e in rows)
            metrics = {
                "sft/loss": float(loss),
                "sft/grad_norm": float(norm),
                "sft/learning_rate": rate,
                "time/tokens_per_second": tokens / (time.perf_counter() - start_time),
            }
            loop.log(metrics, show=("sft/loss",))
            if loop.must_evaluate:
                loop.evaluated(measure())
            if loop.must_save:
                loop.save()
        final = loop.final_metrics(measure)
        next_step = f"marlhf reward, and then marlhf ppo, with model: {run.model}"
        return loop.close(model, {**final, "steps": loop.step}, next_step)


def backward(
    model: Model, rows: list[Example], pad_id: int, config: SFTConfig, world: World
) -> Tensor:
    """Gradients of the batch's mean loss, micro-batch by micro-batch; returns the loss."""
    total = torch.zeros((), device=world.device)
    for loss in loss_parts(model, rows, pad_id, config, world):
        loss.backward()
        total += loss.detach()
    return world.sum(total)


@torch.no_grad()
def evaluate(
    model: Model, rows: list[Example], pad_id: int, config: SFTConfig, world: World
) -> dict[str, float]:
    """Mean loss on held-out rows; NaN when there are none."""
    rows = rows[:MAX_HELD_OUT]
    if not rows:
        return {"eval/loss": float("nan")}
    total = torch.zeros((), device=world.device)
    for loss in loss_parts(model, rows, pad_id, config, world):
        total += loss
    total = world.sum(total)
    check_finite([("the held-out loss", total)])
    return {"eval/loss": float(total)}


def loss_parts(
    model: Model, rows: list[Example], pad_id: int, config: SFTConfig, world: World
) -> Iterator[Tensor]:
    """The loss of each micro-batch of this rank, as a part of the mean over all rows."""
    prompts, responses = [e.prompt for e in rows], [e.chosen for e in rows]
    batch = Sequences.from_lists(prompts, responses, pad_id, world.device)
    for micro in world.batches(batch.total_lengths, config.pass_tokens):
        part = batch.rows(micro.rows)
        with autocast(world.device, config.precision):
            logprobs = token_stats(model, part).logprobs
        yield sft_loss(logprobs, part.mask, num_tokens=sum(batch.lengths)) * micro.weight
