"""The reward model: from pairs of responses, one number that says which people prefer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import reward_loss
from marlhf.models.forward import final_scores
from marlhf.models.load import STEP_SEPARATOR
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.runtime.model_loader import load_trained_scalar
from marlhf.runtime.optim import check_finite
from marlhf.runtime.stage import Example
from marlhf.train.reward_config import RewardConfig
from marlhf.train.supervised import Passes, SupervisedRun

MAX_HELD_OUT = 1024
"""Held-out pairs that an evaluation looks at, at most."""


@in_run_folder("reward")
def train(config: RewardConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the model."""
    stage = SupervisedRun(config, run, load_trained_scalar, "reward")
    stage.model.config.pad_token_id = stage.tokenizer.pad_token_id
    vars(stage.model.config).pop(STEP_SEPARATOR, None)  # where it starts from a process model
    passes = stage.place()
    measure = partial(evaluate, passes, stage.held_out[:MAX_HELD_OUT])
    with stage.begin(measure, metric="accuracy") as loop:
        for step in stage.steps():
            rows = [stage.examples[i] for i in stage.row_numbers(step)]
            compute = partial(backward, passes, rows, config.center_coef)
            (loss, margins), numbers = stage.update(step, compute, ["reward/loss", "reward/margin"])
            metrics = {
                "reward/loss": float(loss),
                "reward/accuracy": accuracy(margins),
                "reward/margin": float(margins.mean()),
            } | {f"reward/{k}": x for k, x in numbers.items()}
            loop.log(metrics, show=("reward/loss", "reward/accuracy"))
        return stage.close(f"marlhf ppo, with reward_model: {run.folder.model}")


def backward(passes: Passes, rows: list[Example], center_coef: float) -> tuple[Tensor, Tensor]:
    """Gradients of the batch's mean loss, micro-batch by micro-batch: the loss, and margins [B]."""
    world = passes.world
    total = torch.zeros((), device=world.device)
    margins = torch.zeros(len(rows), device=world.device)
    for micro, pairs in passes.pairs(rows):
        with passes.autocast():
            chosen, rejected = final_scores(passes.model, pairs).chunk(2)
        loss = reward_loss(chosen, rejected, center_coef=center_coef, num_pairs=len(rows))
        loss = loss * micro.weight
        loss.backward()
        total += loss.detach()
        margins[micro.rows] += (chosen - rejected).detach() * micro.weight
    return world.sum(total), world.sum(margins)


@torch.no_grad()
def evaluate(passes: Passes, rows: list[Example]) -> dict[str, float]:
    """Accuracy and loss on held-out pairs; NaN when there are none."""
    if not rows:
        return {"eval/accuracy": float("nan"), "eval/loss": float("nan")}
    scores = torch.zeros(2, len(rows), device=passes.world.device)
    for micro, pairs in passes.pairs(rows):
        with passes.autocast():
            scores[:, micro.rows] += final_scores(passes.model, pairs).view(2, -1) * micro.weight
    scores = passes.world.sum(scores)
    check_finite([("the held-out scores", scores)])
    chosen, rejected = scores
    return {
        "eval/accuracy": accuracy(chosen - rejected),
        "eval/loss": float(reward_loss(chosen, rejected)),
        "eval/margin": float((chosen - rejected).mean()),
    }


def accuracy(margins: Tensor) -> float:
    """Share of pairs whose chosen response scores higher; a tie counts half."""
    return float(((margins > 0).float() + 0.5 * (margins == 0).float()).mean())
