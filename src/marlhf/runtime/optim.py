"""The optimiser, and an update that refuses gradients which are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from marlhf.errors import MarlhfError
from marlhf.runtime.distributed import World


class Diverged(MarlhfError, ArithmeticError):
    """A loss, score or gradient became NaN or infinite; says which."""


def make_optimizer(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """AdamW over what trains; decay spares biases and norms, as is usual."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = trainable[0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


Named = Sequence[tuple[str, Tensor]]
"""Tensors and what they are called."""


def check_finite(tensors: Named) -> None:
    """Name the first tensor that holds NaN or infinity. One wait for the device, not one each."""
    wrong = torch.stack([(~torch.isfinite(x)).any() for _, x in tensors])
    if wrong.any():
        name, tensor = tensors[int(wrong.int().argmax())]
        count = int((~torch.isfinite(tensor)).sum())
        raise Diverged(f"{count} of {tensor.numel()} values of {name} are NaN or infinite")


class Update(NamedTuple):
    """A model whose gradients are there, and how it moves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: float


def apply_updates(
    updates: Sequence[Update], max_norm: float, world: World, finite: Named
) -> list[Tensor]:
    """Sum gradients over processes, clip, step, clear. Returns the norms before clipping.

    No model moves where a gradient, or one of the tensors that must be `finite`, is not.
    """
    norms: list[Tensor] = []
    for model, _, _ in updates:
        world.sum_gradients(model)
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    try:
        # One wait for the device, not one per tensor.
        tensors = [*(x for _, x in finite), *norms]
        if not torch.stack([torch.isfinite(x).all() for x in tensors]).all():
            if finite:
                check_finite(finite)
            bad = next(i for i, norm in enumerate(norms) if not torch.isfinite(norm))
            name = _first_bad(updates[bad].model)
            raise Diverged(f"the gradient of {name} is {float(norms[bad])}")
        for _, optimizer, learning_rate in updates:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
    finally:
        for _, optimizer, _ in updates:
            optimizer.zero_grad(set_to_none=True)
    return norms


def _first_bad(model: nn.Module) -> str:
    """The first parameter whose gradient is not finite."""
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if grad is not None and not torch.isfinite(grad).all():
            return name
    return "?"
