"""What a Llama's layer computes between matrix products, forward and backward: one kernel each.

On a GPU these are Triton kernels, elsewhere plain torch. The plain form is the definition, and the
tests compare the two. Types: x, and gradients of it, in what matrices are multiplied in; norms'
weights and their gradients in whatever they are kept in.

Axes: T tokens, B rows, L tokens of a row, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

triton_layers: Any = None
if importlib.util.find_spec("triton"):  # torch installs it only where there may be a GPU
    from marlhf.models import triton_layers


def fused(x: Tensor) -> bool:
    """Whether there are fused kernels for the device of this tensor."""
    return triton_layers is not None and x.is_cuda


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + delta, and the root-mean-square norm of its rows, in some type: [T, hidden] each."""
    if fused(x):
        return triton_layers.add_norm(x, delta, weight, eps, dtype)
    total = x if delta is None else x + delta
    unit = F.rms_norm(_wide(total), x.shape[-1:], eps=eps).to(x.dtype)
    return total, (unit * weight).to(dtype)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of x, that of the residual added; and the norm again, without its weight."""
    if fused(x):
        return triton_layers.norm_backward(grad, x, weight, eps, residual_grad)
    wide, dy = _wide(x), _wide(grad) * weight
    scale = torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps)
    unit = wide * scale
    grad_x = (dy - unit * (dy * unit).mean(dim=1, keepdim=True)) * scale
    if residual_grad is not None:
        grad_x = grad_x + residual_grad
    return grad_x.to(x.dtype), unit.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, which lie side by side: [T, 2 I] -> [T, I]."""
    if fused(gate_up):
        return triton_layers.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up`, and `swiglu` again. The memory of `grad` may be used for it."""
    if fused(gate_up):
        return triton_layers.swiglu_backward(grad, gate_up)
    gate, up = _wide(gate_up).chunk(2, dim=1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    both = torch.cat((up * sigmoid * (1 + gate - silu), silu), dim=1) * _wide(grad).repeat(1, 2)
    return both.to(gate_up.dtype), swiglu(gate_up)


def rotate(qkv: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor, rotated: int) -> None:
    """Rotate the first heads of each token in place: [T, heads, D].

    `rotary` has cosines and sines of each position, [longest, D], as transformers makes them.
    """
    if fused(qkv):
        triton_layers.rotate(qkv, rotary, positions, rotated)
        return
    heads = qkv[:, :rotated]
    heads.copy_(_turn(_wide(heads), rotary, positions))


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor], rotary: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    """The gradient of queries, keys and values side by side before `rotate`: [T, H + 2 K, D].

    `grads` are of the three after it: [B, H, L, D] and [B, K, L, D] twice, in any layout.
    """
    if fused(grads[0]):
        return triton_layers.rotate_backward(grads, rotary, positions)
    cos, sin = rotary
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in grads)
    turned = (_turn(_wide(x), (cos, -sin), positions).to(x.dtype) for x in (query, key))
    return torch.cat((*turned, value), dim=1)


def pick(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of tokens, float32, in one pass over logits: [N, V], [N] -> [N]."""
    if fused(logits):
        return triton_layers.pick(logits, tokens)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return chosen.float() - logits.float().logsumexp(dim=1)


def _turn(x: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    cos, sin = (table.index_select(0, positions)[:, None] for table in rotary)
    a, b = x.chunk(2, dim=2)
    return x * cos + torch.cat((-b, a), dim=2) * sin


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
