"""Direct preference optimisation: a policy from pairs of responses, without a reward model.

The loss compares the policy's log-probs of a pair with those of a reference. The latter never
change: they are computed once, before the first step, and cached in the run folder, so the
reference takes no memory while training. Unless `ref_model` names one, it is the starting policy.

Pairs come from the part of the data that a reward model learns from, unless `part` says otherwise:
DPO and PPO then see the same preferences, and a difference between them is one of method.
"""

from __future__ import annotations

import hashlib
import zlib
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from marlhf.core import dpo_loss
from marlhf.models.adapters import AdaptedModel
from marlhf.models.base import Model, Tokenizer, autocast
from marlhf.models.forward import token_stats
from marlhf.models.load import check_vocabulary, load_policy
from marlhf.models.sequences import Sequences
from marlhf.runs.atomic import explain_disk_errors, replacing
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.checkpoint import list_checkpoints
from marlhf.runtime.distributed import World, start
from marlhf.runtime.loop import Loop, open_run
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.model_loader import check_tokenizer, load_trained_policy
from marlhf.runtime.objects import NO_OBJECTS, GivenObjects
from marlhf.runtime.optim import Update, apply_updates, check_finite, make_optimizer
from marlhf.runtime.progress import say
from marlhf.runtime.stage import (
    Example,
    batch_rows,
    check_positions,
    count_steps,
    load_supervised,
    seed_run,
)
from marlhf.train.dpo_config import DPOConfig
from marlhf.train.reward import MAX_HELD_OUT, accuracy, pair_batches

CACHE = "reference.safetensors"
"""The reference's log-probs, in the run folder."""
ROUNDING = 1e-3
"""Nats by which two passes over one response may differ."""


def train(config: DPOConfig, objects: GivenObjects = NO_OBJECTS) -> Path:
    """Train, or resume training; returns the folder of the policy."""
    world = start(config.device, config.parallel)
    run = open_run(config, "dpo", world)
    if run.finished:
        return run.model
    seed_run(config)
    tokenizer, model, examples, held_out = load_supervised(
        config, config.part, objects, world, load_trained_policy
    )
    held_out = held_out[:MAX_HELD_OUT]
    with world.raise_on_all_ranks():
        reference = load_reference(config, objects, tokenizer, model)
        check_positions(reference, examples + held_out, name="reference")
        total = count_steps(config, len(examples))
        used = sorted({i for s in range(total) for i in batch_rows(s, config, len(examples))})
        pairs = [examples[i] for i in used]
        key = fingerprint(reference, pairs + held_out) if world.main else ""
    # Padded on a CPU as well: policy and reference begin with the same bits in any batch, and no
    # pair near a tie changes sides with the size of passes.
    model = world.place(model, config.precision, compiled=config.compile, unpadded=False)
    optimizer = make_optimizer(model, config.learning_rate, config.weight_decay)
    pad = tokenizer.pad_token_id
    # Before a checkpoint is loaded: the policy is still its own reference.
    train_ref, held_out_ref = reference_logprobs(
        reference, model, (pairs, held_out), key, run, pad, config, world
    )
    del reference
    ref_logprobs = torch.full((2, len(examples)), torch.nan, device=world.device)
    ref_logprobs[:, torch.tensor(used, device=world.device)] = train_ref
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
    measure = partial(evaluate, model, held_out, held_out_ref, pad, config, world)
    loop.resume()
    with loop:
        if not loop.done:
            loop.evaluated(measure())
        for step in loop:
            index = batch_rows(step - 1, config, len(examples))
            rows = [examples[i] for i in index]
            ref = ref_logprobs[:, torch.tensor(index, device=world.device)]
            rate = config.rate(step, total)
            loss, logprobs = fit_memory(
                world, partial(backward, model, rows, ref, pad, config, world), model
            )
            finite = [("dpo/loss", loss), ("the policy's log-probs", logprobs)]
            [norm] = apply_updates(
                [Update(model, optimizer, rate)], config.max_grad_norm, world, finite
            )
            chosen, rejected = config.beta * (logprobs - ref)  # implicit rewards, [B] each
            metrics = {
                "dpo/loss": float(loss),
                "dpo/accuracy": ranking_accuracy(chosen - rejected, config),
                "dpo/margin": float((chosen - rejected).mean()),
                "dpo/chosen_reward": float(chosen.mean()),
                "dpo/rejected_reward": float(rejected.mean()),
                "dpo/grad_norm": float(norm),
                "dpo/learning_rate": rate,
            }
            loop.log(metrics, show=("dpo/loss", "dpo/accuracy"))
            if loop.must_evaluate:
                loop.evaluated(measure())
            if loop.must_save:
                loop.save()
        final = loop.final_metrics(measure)
        next_step = f"marlhf report {run.path.parent} -o {run.path.parent / 'report.html'}"
        return loop.close(model, {**final, "steps": loop.step}, next_step)


def backward(
    model: Model,
    rows: list[Example],
    ref_logprobs: Tensor,  # [2, B]
    pad_id: int,
    config: DPOConfig,
    world: World,
) -> tuple[Tensor, Tensor]:
    """Gradients of the batch's mean loss, by micro-batches: the loss, and log-probs [2, B]."""
    total = torch.zeros((), device=world.device)
    batch_logprobs = torch.zeros(2, len(rows), device=world.device)
    for micro in pair_batches(rows, config.pass_tokens, world):
        pairs = [rows[i] for i in micro.rows]
        logprobs = pair_logprobs(model, pairs, pad_id, config, world.device)
        ref = ref_logprobs[:, micro.rows]
        loss = preference_loss(logprobs, ref, config, len(rows)) * micro.weight
        loss.backward()
        total += loss.detach()
        batch_logprobs[:, micro.rows] += logprobs.detach() * micro.weight
    return world.sum(total), world.sum(batch_logprobs)


def evaluate(
    model: Model,
    rows: list[Example],
    ref_logprobs: Tensor,  # [2, B]
    pad_id: int,
    config: DPOConfig,
    world: World,
) -> dict[str, float]:
    """Loss, and how the implicit rewards order held-out pairs; NaN when there are none."""
    if not rows:
        return dict.fromkeys(("eval/loss", "eval/accuracy", "eval/margin"), float("nan"))
    compute = partial(all_logprobs, model, rows, pad_id, config, world)
    logprobs = fit_memory(world, compute)
    check_finite([("the held-out log-probs", logprobs)])
    chosen, rejected = config.beta * (logprobs - ref_logprobs)
    return {
        "eval/loss": float(preference_loss(logprobs, ref_logprobs, config, len(rows))),
        "eval/accuracy": ranking_accuracy(chosen - rejected, config),
        "eval/margin": float((chosen - rejected).mean()),
    }


def preference_loss(
    logprobs: Tensor, ref_logprobs: Tensor, config: DPOConfig, num_pairs: int
) -> Tensor:
    """DPO's loss of pairs, [2, B] each: chosen, then rejected."""
    return dpo_loss(
        *logprobs.unbind(),
        *ref_logprobs.unbind(),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        num_pairs=num_pairs,
    )


def ranking_accuracy(margins: Tensor, config: DPOConfig) -> float:
    """Share of pairs whose chosen response has the higher reward; within rounding is a tie.

    Before the first step margins are rounding and nothing else, which is no accuracy.
    """
    return accuracy(torch.where(margins.abs() < config.beta * ROUNDING, 0.0, margins))


@torch.no_grad()
def all_logprobs(
    model: Model, rows: list[Example], pad_id: int, config: DPOConfig, world: World
) -> Tensor:
    """Log-probs of whole responses, by all ranks together: [2, B]."""
    logprobs = torch.zeros(2, len(rows), device=world.device)
    for micro in pair_batches(rows, config.pass_tokens, world) if rows else ():
        pairs = [rows[i] for i in micro.rows]
        part = pair_logprobs(model, pairs, pad_id, config, world.device)
        logprobs[:, micro.rows] += part * micro.weight
    return world.sum(logprobs)


def pair_logprobs(
    model: Model, rows: list[Example], pad_id: int, config: DPOConfig, device: torch.device
) -> Tensor:
    """Log-probs of chosen and rejected, summed over tokens, from one pass over both: [2, B]."""
    prompts = [e.prompt for e in rows]
    responses = [e.chosen for e in rows] + [e.rejected for e in rows]
    both = Sequences.from_lists(prompts + prompts, responses, pad_id, device)
    with autocast(device, config.precision):
        logprobs = token_stats(model, both).logprobs  # [2B, T], 0 at padding
    return logprobs.sum(dim=1).view(2, -1)


def load_reference(
    config: DPOConfig, objects: GivenObjects, tokenizer: Tokenizer, model: Model
) -> Model:
    """The policy itself, which has not moved yet, unless another model is named."""
    if objects.ref_model is not None:
        reference = load_policy(objects.ref_model)
    elif config.ref_model is None:
        return model
    else:
        remote = config.trust_remote_code
        check_tokenizer(
            "reference",
            config.ref_model,
            config.model,
            tokenizer,
            trust_remote_code=remote,
            setting="ref_model",
        )
        reference = load_policy(config.ref_model, seed=config.seed, trust_remote_code=remote)
    check_vocabulary(reference, tokenizer, "the reference")
    return reference


def reference_logprobs(
    reference: Model,
    model: Model,
    sets: tuple[list[Example], list[Example]],
    key: str,
    run: RunFolder,
    pad_id: int,
    config: DPOConfig,
    world: World,
) -> list[Tensor]:
    """Log-probs of each set's pairs, [2, B]: from the cache in the run folder, or computed."""
    cached: list[Tensor] | None = None
    with world.raise_on_all_ranks():
        if world.main:
            cached = _read_cache(run, key)
    logprobs = world.broadcast(cached)
    if logprobs is None:
        say(f"computing the reference's log-probs of {sum(map(len, sets))} pairs, once")
        placed = (
            model
            if reference is model
            else world.place(reference, config.precision, unpadded=False)
        )
        logprobs = [
            fit_memory(world, partial(all_logprobs, placed, rows, pad_id, config, world))
            for rows in sets
        ]
        if not all(torch.isfinite(x).all() for x in logprobs):
            raise RunError(
                "The reference's log-probs are not all finite, so no pair can be compared with "
                "them. Look at the weights of that model."
            )
        if world.main:
            _write_cache(run, key, logprobs)
    return [x.to(world.device) for x in logprobs]


def fingerprint(reference: Model, rows: list[Example]) -> str:
    """What the log-probs depend on: the reference's weights and the tokens of the pairs."""
    digest = hashlib.sha256()
    base = reference.base.digest if isinstance(reference, AdaptedModel) else ""
    digest.update(f"base {base}".encode())
    for name, p in reference.named_parameters():
        weights = p.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        digest.update(f"{name} {tuple(p.shape)} {zlib.crc32(weights)}".encode())
    for e in rows:
        digest.update(repr((e.prompt, e.chosen, e.rejected)).encode())
    return digest.hexdigest()


def _read_cache(run: RunFolder, key: str) -> list[Tensor] | None:
    """What an earlier process computed; None where there is nothing, or nothing usable."""
    path = run.path / CACHE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            cached_key = file.metadata()["key"]
            logprobs = [file.get_tensor(name) for name in ("train", "held_out")]
    except (SafetensorError, OSError):
        return None  # a kill while writing: computed again
    if cached_key == key:
        return logprobs
    if list_checkpoints(run):
        raise RunError(
            f"{path} holds log-probs of another reference, or of other pairs, than this run "
            "has now, so resuming would train towards something else. Put the model and the data "
            "back as they were, or choose another output_dir."
        )
    return None


def _write_cache(run: RunFolder, key: str, logprobs: list[Tensor]) -> None:
    tensors = {name: x.cpu() for name, x in zip(("train", "held_out"), logprobs)}
    with explain_disk_errors(run.path), replacing(run.path / CACHE) as temporary:
        save_file(tensors, temporary, metadata={"key": key})
