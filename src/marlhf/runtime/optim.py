"""The optimisers, and an update that refuses gradients which are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.optimization import Adafactor

from marlhf.config.stage import OptimizerName
from marlhf.errors import MarlhfError, SettingError
from marlhf.models.heads import members_of
from marlhf.runtime.distributed import World


class Diverged(MarlhfError, ArithmeticError):
    """A loss, score or gradient became NaN or infinite; says which."""


def make_optimizer(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    name: OptimizerName = "adamw",
    betas: tuple[float, float] = (0.9, 0.95),
) -> torch.optim.Optimizer:
    """An optimiser over what trains; decay spares biases and norms, as is usual."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if name == "adafactor":
        # Torch's own scales the rate by the size of the weights, so that one for AdamW is no guide.
        fixed = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
        return Adafactor(groups, lr=learning_rate, **fixed)
    options: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": 1e-8}
    if name == "adamw_8bit":
        return import_adamw_8bit()(groups, **options)
    fused = trainable[0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, fused=fused, **options)


@cache
def import_adamw_8bit() -> Any:
    """torchao's AdamW with moments of 8 bits, which rounds bfloat16 weights at random."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise SettingError(
            "optimizer: adamw_8bit needs torchao, which is not installed. Run `pip install "
            "'marlhf[memory]'`, or leave out optimizer."
        ) from error

    class SeededAdamW8bit(AdamW8bit):
        """Rounds by the number of the step alone: alike on all ranks, and after a resume."""

        def __init__(self, groups: Any, **options: Any) -> None:
            super().__init__(groups, bf16_stochastic_round=True, **options)

        def step(self, closure: Any = None) -> Any:
            steps = (state["step"] for state in self.state.values() if "step" in state)
            device = self.param_groups[0]["params"][0].device
            gpu = device.type == "cuda"
            # On a CPU compiling takes longer than it saves.
            eager = contextlib.nullcontext() if gpu else torch.compiler.set_stance("force_eager")
            with torch.random.fork_rng([device] if gpu else []), eager:
                torch.manual_seed(int(next(steps, 0)))
                return super().step(closure)

    return SeededAdamW8bit


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, compiled once for all rates
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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

    Each member of an ensemble is clipped as if it trained alone; the norm is the largest of theirs.
    No model moves where a gradient, or one of the tensors that must be `finite`, is not.
    """
    norms: list[Tensor] = []
    for model, _, _ in updates:
        world.sum_gradients(model)
        norms.append(torch.stack([_clip(part, max_norm) for part in members_of(model)]).amax())
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
            set_learning_rate(optimizer, learning_rate)
            optimizer.step()
    finally:
        for _, optimizer, _ in updates:
            optimizer.zero_grad(set_to_none=True)
    return norms


def _clip(model: nn.Module, max_norm: float) -> Tensor:
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _first_bad(model: nn.Module) -> str:
    """The first parameter whose gradient is not finite."""
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if grad is not None and not torch.isfinite(grad).all():
            return name
    return "?"
