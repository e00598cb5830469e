"""The reward model: from pairs of responses, one number that says which people prefer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from marlhf.core import reward_loss
from marlhf.data.collate import token_budget_batches
from marlhf.models.forward import Sequences, final_scores
from marlhf.models.load import (
    Model,
    Tokenizer,
    autocast,
    check_vocabulary,
    load_scalar,
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
class RewardConfig(StageConfig):
    """Settings of the reward model. The paper, Gemma-2B: batch 64, 1 epoch, 1e-5."""

    max_response_tokens: int = 512
    """Pairs with a longer response are left out."""
    center_coef: float = 0.0
    """Pull scores towards zero, which the loss itself leaves free; 0.01 is usual."""


def train(config: RewardConfig) -> Path:
    """Train, or go on training; returns the folder of the model."""
    run = RunFolder(config.output_dir, "reward", config)
    if run.finished:
        say(f"reward is finished: {run.model}")
        return run.model
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    model = load_scalar(
        config.model,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        checkpointing=config.gradient_checkpointing,
    ).to(device)
    check_vocabulary(model, tokenizer, config.model)
    model.config.pad_token_id = tokenizer.pad_token_id
    examples, held_out = load_examples(
        config,
        "reward",
        tokenizer,
        needs=("prompt", "chosen", "rejected"),
        max_response_tokens=config.max_response_tokens,
    )
    check_positions(model, examples + held_out)
    optimizer = make_optimizer(model, config.learning_rate, config.weight_decay)
    total = count_steps(config, len(examples))
    state = resume(run, models={"model": model}, optimizers={"model": optimizer})
    done = state["step"] if state else 0

    with orderly(run) as interrupts, Steps("reward", total, done) as progress:
        if not done:
            run.log("eval", 0, evaluate(model, held_out, tokenizer, config))
            interrupts.check("before the first step")
        for step in range(done + 1, total + 1):
            rows = [examples[i] for i in batch_rows(step - 1, config, len(examples))]
            rate = learning_rate_at(
                step - 1,
                config.learning_rate,
                total=total,
                warmup=round(config.warmup_ratio * total),
                schedule=config.schedule,
            )
            loss, margins = backward(model, rows, tokenizer, config)
            check_finite([("reward/loss", loss), ("reward/margin", margins)])
            norm = apply_update(model, optimizer, rate, config.max_grad_norm)
            metrics = {
                "reward/loss": float(loss),
                "reward/accuracy": accuracy(margins),
                "reward/margin": float(margins.mean()),
                "reward/grad_norm": float(norm),
                "reward/learning_rate": rate,
            }
            run.log("train", step, metrics)
            shown = {"loss": metrics["reward/loss"], "accuracy": metrics["reward/accuracy"]}
            progress.advance(step, shown)
            if due(step, config.eval_every, total):
                run.log("eval", step, evaluate(model, held_out, tokenizer, config))
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
    next_step = f"marlhf ppo, with reward_model: {run.model}"
    return finish(run, {**final, "steps": total}, next_step)


def backward(
    model: Model, rows: list[Example], tokenizer: Tokenizer, config: RewardConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of the batch's mean loss, micro-batch by micro-batch: the loss, and margins [B]."""
    total, margins = torch.zeros((), device=model.device), []
    for micro in pair_batches(rows, config.token_budget):
        chosen, rejected = score_pairs(model, [rows[i] for i in micro], tokenizer, config)
        loss = reward_loss(chosen, rejected, center_coef=config.center_coef, num_pairs=len(rows))
        loss.backward()
        total += loss.detach()
        margins.append((chosen - rejected).detach())
    return total, torch.cat(margins)


@torch.no_grad()
def evaluate(
    model: Model, rows: list[Example], tokenizer: Tokenizer, config: RewardConfig, limit: int = 1024
) -> dict[str, float]:
    """Accuracy and loss on held-out pairs; NaN when there are none."""
    rows = rows[:limit]
    if not rows:
        return {"eval/accuracy": float("nan"), "eval/loss": float("nan")}
    chosen, rejected = [], []
    for micro in pair_batches(rows, config.token_budget):
        c, r = score_pairs(model, [rows[i] for i in micro], tokenizer, config)
        chosen.append(c)
        rejected.append(r)
    better, worse = torch.cat(chosen), torch.cat(rejected)
    check_finite([("the held-out scores", torch.cat((better, worse)))])
    return {
        "eval/accuracy": accuracy(better - worse),
        "eval/loss": float(reward_loss(better, worse)),
        "eval/margin": float((better - worse).mean()),
    }


def score_pairs(
    model: Model, rows: list[Example], tokenizer: Tokenizer, config: RewardConfig
) -> tuple[Tensor, Tensor]:
    """Scores of chosen and rejected, [B] each, from one pass over both."""
    prompts = [e.prompt for e in rows]
    both = Sequences.from_lists(
        prompts + prompts,
        [e.chosen for e in rows] + [e.rejected for e in rows],
        tokenizer.pad_token_id,
        model.device,
    )
    with autocast(model.device, config.precision):
        chosen, rejected = final_scores(model, both).chunk(2)
    return chosen, rejected


def pair_batches(rows: list[Example], token_budget: int) -> list[list[int]]:
    longest = [len(e.prompt) + max(len(e.chosen), len(e.rejected)) for e in rows]
    return token_budget_batches(longest, max(1, token_budget // 2))


def accuracy(margins: Tensor) -> float:
    """Share of pairs ordered rightly; a tie is half right."""
    return float(((margins > 0).float() + 0.5 * (margins == 0).float()).mean())
