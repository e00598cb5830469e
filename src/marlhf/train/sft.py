"""Supervised fine-tuning on the chosen responses: the loss is on response tokens only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from marlhf.core import sft_loss
from marlhf.data.collate import token_budget_batches
from marlhf.models.forward import Sequences, token_stats
from marlhf.models.load import (
    Model,
    Tokenizer,
    autocast,
    check_vocabulary,
    load_policy,
    load_tokenizer,
    pick_device,
)
from marlhf.train.checkpoint import save_checkpoint
from marlhf.train.optim import apply_update, check_finite, learning_rate_at, make_optimizer
from marlhf.train.progress import Steps, say
from marlhf.train.run import RunFolder
from marlhf.train.stage import (
    Example,
    StageConfig,
    batch_rows,
    check_positions,
    count_steps,
    due,
    finish,
    load_examples,
    orderly,
    resume,
)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(StageConfig):
    """Settings of supervised fine-tuning. The paper, Gemma-2B: batch 512, 3 epochs, 5e-5."""

    learning_rate: float = 5e-5
    """Peak learning rate of AdamW. The paper: 5e-5 for 2B, 2e-5 for 7B, 5e-6 for 27B."""
    max_response_tokens: int = 512
    """Rows with longer responses are left out: cut short they would teach never to end."""


def train(config: SFTConfig) -> Path:
    """Train, or go on training; returns the folder of the model."""
    run = RunFolder(config.output_dir, "sft", config)
    if run.finished:
        say(f"sft is finished: {run.model}")
        return run.model
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    model = load_policy(
        config.model,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        checkpointing=config.gradient_checkpointing,
    ).to(device)
    check_vocabulary(model, tokenizer, config.model)
    examples, held_out = load_examples(
        config,
        "sft",
        tokenizer,
        needs=("prompt", "chosen"),
        max_response_tokens=config.max_response_tokens,
    )
    check_positions(model, examples + held_out)
    optimizer = make_optimizer(model, config.learning_rate, config.weight_decay)
    total = count_steps(config, len(examples))
    state = resume(run, models={"model": model}, optimizers={"model": optimizer})
    done = state["step"] if state else 0

    with orderly(run) as interrupts, Steps("sft", total, done) as progress:
        if not done:
            run.log("eval", 0, {"eval/loss": evaluate(model, held_out, tokenizer, config)})
            interrupts.check("before the first step")
        for step in range(done + 1, total + 1):
            start = time.perf_counter()
            rows = [examples[i] for i in batch_rows(step - 1, config, len(examples))]
            rate = learning_rate_at(
                step - 1,
                config.learning_rate,
                total=total,
                warmup=round(config.warmup_ratio * total),
                schedule=config.schedule,
            )
            loss = backward(model, rows, tokenizer, config)
            check_finite([("sft/loss", loss)])
            norm = apply_update(model, optimizer, rate, config.max_grad_norm)
            tokens = sum(len(e.prompt) + len(e.chosen) for e in rows)
            metrics = {
                "sft/loss": float(loss),
                "sft/grad_norm": float(norm),
                "sft/learning_rate": rate,
                "time/tokens_per_second": tokens / (time.perf_counter() - start),
            }
            run.log("train", step, metrics)
            progress.advance(step, {"loss": metrics["sft/loss"]})
            if due(step, config.eval_every, total):
                run.log("eval", step, {"eval/loss": evaluate(model, held_out, tokenizer, config)})
            if due(step, config.save_every, 0) or interrupts.asked:
                save_checkpoint(
                    run,
                    step,
                    models={"model": model},
                    optimizers={"model": optimizer},
                    state={},
                    keep=config.keep_checkpoints,
                )
            interrupts.check(f"saved at step {step} in {run.path}")
        final = evaluate(model, held_out, tokenizer, config)
        run.save_model(model, tokenizer)
    next_step = f"marlhf reward, and then marlhf ppo, with model: {run.model}"
    return finish(run, {"eval/loss": final, "steps": total}, next_step)


def backward(
    model: Model, rows: list[Example], tokenizer: Tokenizer, config: SFTConfig
) -> torch.Tensor:
    """Gradients of the batch's mean loss, micro-batch by micro-batch; returns the loss."""
    batch = sequences(rows, tokenizer, model.device)
    num_tokens = sum(batch.lengths)
    total = torch.zeros((), device=model.device)
    for micro in token_budget_batches(batch.total_lengths, config.token_budget):
        part = batch.rows(micro)
        with autocast(model.device, config.precision):
            logprobs = token_stats(model, part).logprobs
        loss = sft_loss(logprobs, part.mask, num_tokens=num_tokens)
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(
    model: Model, rows: list[Example], tokenizer: Tokenizer, config: SFTConfig, limit: int = 512
) -> float:
    """Mean loss on held-out rows; NaN when there are none."""
    rows = rows[:limit]
    if not rows:
        return float("nan")
    batch = sequences(rows, tokenizer, model.device)
    total = torch.zeros((), device=model.device)
    for micro in token_budget_batches(batch.total_lengths, config.token_budget):
        part = batch.rows(micro)
        with autocast(model.device, config.precision):
            logprobs = token_stats(model, part).logprobs
        total += sft_loss(logprobs, part.mask, num_tokens=sum(batch.lengths))
    check_finite([("the held-out loss", total)])
    return float(total)


def sequences(rows: list[Example], tokenizer: Tokenizer, device: torch.device) -> Sequences:
    return Sequences.from_lists(
        [e.prompt for e in rows], [e.chosen for e in rows], tokenizer.pad_token_id, device
    )
