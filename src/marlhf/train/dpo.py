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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from marlhf.core import dpo_loss
from marlhf.models.adapters import AdaptedModel
from marlhf.models.base import Model, Tokenizer
from marlhf.models.facts import model_facts
from marlhf.models.forward import token_stats
from marlhf.models.load import check_vocabulary, load_model, load_policy
from marlhf.models.sequences import Sequences
from marlhf.runs.atomic import explain_disk_errors, replacing
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.checkpoint import list_checkpoints
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.model_loader import load_trained_policy
from marlhf.runtime.optim import check_finite
from marlhf.runtime.progress import say
from marlhf.runtime.sources import check_tokenizer
from marlhf.runtime.stage import Example, GivenObjects, check_positions
from marlhf.train.dpo_config import DPOConfig
from marlhf.train.reward import MAX_HELD_OUT, accuracy
from marlhf.train.supervised import Passes, SupervisedRun

CACHE = "reference.safetensors"
"""The reference's log-probs, in the run folder."""
ROUNDING = 1e-3
"""Nats by which two passes over one response may differ."""


@in_run_folder("dpo")
def train(config: DPOConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the policy."""
    dpo, world = SupervisedRun(config, run, load_trained_policy, config.part), run.world
    held_out = dpo.held_out = dpo.held_out[:MAX_HELD_OUT]
    with world.raise_on_all_ranks():
        reference = load_reference(config, run.objects, dpo.tokenizer, dpo.model)
        check_positions(reference, dpo.examples + held_out, name="reference")
        used = sorted({i for step in range(dpo.num_steps) for i in dpo.row_numbers(step + 1)})
        pairs = [dpo.examples[i] for i in used]
        key = fingerprint(reference, pairs + held_out) if world.main else ""
    # Padded on a CPU as well: policy and reference begin with the same bits in any batch, and no
    # pair near a tie changes sides with the size of passes.
    passes = dpo.place(unpadded=False)
    # Before a checkpoint is loaded: the policy is still its own reference.
    sets = pairs, held_out
    train_ref, held_out_ref = reference_logprobs(passes, reference, sets, key, run.folder)
    del reference
    ref_logprobs = torch.full((2, len(dpo.examples)), torch.nan, device=world.device)
    ref_logprobs[:, torch.tensor(used, device=world.device)] = train_ref
    loss_of = partial(preference_loss, beta=config.beta, label_smoothing=config.label_smoothing)
    measure = partial(evaluate, passes, held_out, held_out_ref, loss_of, config.beta)
    with dpo.begin(measure, metric="accuracy") as loop:
        for step in dpo.steps():
            index = dpo.row_numbers(step)
            rows = [dpo.examples[i] for i in index]
            ref = ref_logprobs[:, torch.tensor(index, device=world.device)]
            (loss, logprobs), numbers = dpo.update(
                step,
                partial(backward, passes, rows, ref, loss_of),
                ["dpo/loss", "the policy's log-probs"],
            )
            numbers = implicit_rewards(logprobs, ref, config.beta) | numbers
            metrics = {f"dpo/{k}": float(x) for k, x in {"loss": loss, **numbers}.items()}
            loop.log(metrics, show=("dpo/loss", "dpo/accuracy"))
        root = run.folder.path.parent
        return dpo.close(f"marlhf report {root} -o {root / 'report.html'}")


def backward(
    passes: Passes,
    rows: list[Example],
    ref_logprobs: Tensor,  # [2, B]
    loss_of: Callable[[Tensor, Tensor, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of the batch's mean loss, by micro-batches: the loss, and log-probs [2, B]."""
    world = passes.world
    total = torch.zeros((), device=world.device)
    batch_logprobs = torch.zeros(2, len(rows), device=world.device)
    for micro, pairs in passes.pairs(rows):
        logprobs = pair_logprobs(passes, pairs)
        loss = loss_of(logprobs, ref_logprobs[:, micro.rows], len(rows)) * micro.weight
        loss.backward()
        total += loss.detach()
        batch_logprobs[:, micro.rows] += logprobs.detach() * micro.weight
    return world.sum(total), world.sum(batch_logprobs)


def evaluate(
    passes: Passes,
    rows: list[Example],
    ref_logprobs: Tensor,  # [2, B]
    loss_of: Callable[[Tensor, Tensor, int], Tensor],
    beta: float,
) -> dict[str, float]:
    """Loss, and how the implicit rewards order held-out pairs; NaN when there are none."""
    if not rows:
        return dict.fromkeys(("eval/loss", "eval/accuracy", "eval/margin"), float("nan"))
    logprobs = all_logprobs(passes, rows)
    check_finite([("the held-out log-probs", logprobs)])
    found = implicit_rewards(logprobs, ref_logprobs, beta)
    loss = float(loss_of(logprobs, ref_logprobs, len(rows)))
    return {"eval/loss": loss} | {f"eval/{k}": float(found[k]) for k in ("accuracy", "margin")}


def preference_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    num_pairs: int,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid",
) -> Tensor:
    """DPO's loss of pairs, or IPO's, [2, B] each: chosen, then rejected."""
    if loss_type == "ipo":
        chosen, rejected = logprobs - ref_logprobs
        return (chosen - rejected - 1 / (2 * beta)).square().sum() / num_pairs
    sides = *logprobs.unbind(), *ref_logprobs.unbind()
    return dpo_loss(*sides, beta=beta, label_smoothing=label_smoothing, num_pairs=num_pairs)


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> dict[str, Tensor]:
    """How the rewards that a policy stands for order pairs, [2, B]: chosen, then rejected.

    A margin within rounding is a tie. Before the first step margins are nothing else, which is no
    accuracy.
    """
    chosen, rejected = beta * (logprobs - ref_logprobs)
    margins = chosen - rejected
    ranked = accuracy(torch.where(margins.abs() < beta * ROUNDING, 0.0, margins))
    return {
        "accuracy": torch.tensor(ranked, device=margins.device),
        "margin": margins.mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }


@torch.no_grad()
def all_logprobs(passes: Passes, rows: list[Example]) -> Tensor:
    """Log-probs of whole responses, by all ranks together: [2, B]."""
    logprobs = torch.zeros(2, len(rows), device=passes.world.device)
    for micro, pairs in passes.pairs(rows):
        logprobs[:, micro.rows] += pair_logprobs(passes, pairs) * micro.weight
    return passes.world.sum(logprobs)


def pair_logprobs(passes: Passes, pairs: Sequences) -> Tensor:
    """Log-probs of chosen and rejected, summed over tokens, from one pass over both: [2, B]."""
    with passes.autocast():
        logprobs = token_stats(passes.model, pairs).logprobs  # [2B, T], 0 at padding
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
        facts = model_facts(config.ref_model, trust_remote_code=remote, setting="ref_model")
        check_tokenizer("reference", facts, config.model, tokenizer)
        reference = load_model("language", facts, seed=config.seed)
    check_vocabulary(reference, tokenizer, "the reference")
    return reference


def reference_logprobs(
    passes: Passes,
    reference: Model,
    sets: tuple[list[Example], list[Example]],
    key: str,
    run: RunFolder,
) -> list[Tensor]:
    """Log-probs of each set's pairs, [2, B]: from the cache in the run folder, or computed."""
    world = passes.world
    cached: list[Tensor] | None = None
    with world.raise_on_all_ranks():
        if world.main:
            cached = _read_cache(run, key)
    logprobs = world.broadcast(cached)
    if logprobs is None:
        say(f"computing the reference's log-probs of {sum(map(len, sets))} pairs, once")
        if reference is not passes.model:
            placed = world.place(reference, passes.precision, unpadded=False)
            passes = replace(passes, model=placed)
        logprobs = [fit_memory(world, partial(all_logprobs, passes, rows)) for rows in sets]
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
    if list_checkpoints(run.checkpoints):
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
