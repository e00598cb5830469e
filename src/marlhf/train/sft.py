"""Supervised fine-tuning on the chosen responses: the loss is on response tokens only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import sft_loss
from marlhf.models.forward import token_stats
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.runtime.model_loader import load_trained_policy
from marlhf.runtime.optim import check_finite
from marlhf.runtime.stage import Example
from marlhf.train.supervised import Passes, SupervisedRun
from marlhf.train.supervised_config import SFTConfig

MAX_HELD_OUT = 512
"""Held-out rows that an evaluation looks at, at most."""


@in_run_folder("sft")
def train(config: SFTConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the model."""
    sft = SupervisedRun(config, run, load_trained_policy, "sft")
    passes = sft.place()
    with sft.begin(partial(evaluate, passes, sft.held_out[:MAX_HELD_OUT]), metric="loss") as loop:
        for step in sft.steps():
            start_time = time.perf_counter()
            rows = [sft.examples[i] for i in sft.row_numbers(step)]
            [loss], numbers = sft.update(step, partial(backward, passes, rows), ["sft/loss"])
            tokens = sum(len(e.prompt) + len(e.chosen) for e in rows)
            metrics = {"sft/loss": float(loss)} | {f"sft/{k}": x for k, x in numbers.items()}
            metrics["time/tokens_per_second"] = tokens / (time.perf_counter() - start_time)
            loop.log(metrics, show=("sft/loss",))
        return sft.close(f"marlhf reward, and then marlhf ppo, with model: {run.folder.model}")


def backward(passes: Passes, rows: list[Example]) -> list[Tensor]:
    """Gradients of the batch's mean loss, micro-batch by micro-batch; returns the loss."""
    total = torch.zeros((), device=passes.world.device)
    for loss in loss_parts(passes, rows):
        loss.backward()
        total += loss.detach()
    return [passes.world.sum(total)]


@torch.no_grad()
def evaluate(passes: Passes, rows: list[Example]) -> dict[str, float]:
    """Mean loss on held-out rows; NaN when there are none."""
    if not rows:
        return {"eval/loss": float("nan")}
    total = torch.zeros((), device=passes.world.device)
    for loss in loss_parts(passes, rows):
        total += loss
    total = passes.world.sum(total)
    check_finite([("the held-out loss", total)])
    return {"eval/loss": float(total)}


def loss_parts(passes: Passes, rows: list[Example]) -> Iterator[Tensor]:
    """The loss of each micro-batch of this rank, as a part of the mean over all rows."""
    batch = passes.sequences([e.prompt for e in rows], [e.chosen for e in rows])
    for micro in passes.world.batches(batch.total_lengths, passes.pass_tokens):
        part = batch.rows(micro.rows)
        with passes.autocast():
            logprobs = token_stats(passes.model, part).logprobs
        yield sft_loss(logprobs, part.mask, num_tokens=sum(batch.lengths)) * micro.weight
