"""The optimiser, and an update that refuses gradients which are not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from marlhf.errors import MarlhfError
from marlhf.train.distributed import World


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


def apply_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    max_norm: float,
    world: World,
) -> Tensor:
    """Sum over processes, clip, check, step, clear. Returns the norm before clipping."""
    world.sum_gradients(model)
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not torch.isfinite(norm):
        bad = next(
            (n for n, p in model.named_parameters() if p.grad is not None and _bad(p.grad)), "?"
        )
        optimizer.zero_grad(set_to_none=True)
        raise Diverged(f"the gradient of {bad} is {float(norm)}")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Name the first tensor that holds NaN or infinity. One wait for the device, not one each."""
    named = list(tensors)
    wrong = torch.stack([(~torch.isfinite(x)).any() for _, x in named])
    if wrong.any():
        name, tensor = named[int(wrong.int().argmax())]
        count = int((~torch.isfinite(tensor)).sum())
        raise Diverged(f"{count} of {tensor.numel()} values of {name} are NaN or infinite")


def _bad(x: Tensor) -> bool:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return not bool(torch.isfinite(x).all())
