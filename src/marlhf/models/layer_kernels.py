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

triton_attention: Any = None
triton_gates: Any = None
triton_layers: Any = None
triton_norms: Any = None
if importlib.util.find_spec("triton"):  # torch installs it only where there may be a GPU
    from marlhf.models import triton_attention, triton_layers, triton_norms

    if importlib.util.find_spec("triton.tools.tensor_descriptor"):  # older versions have none
        from marlhf.models import triton_gates

SHORT_ROWS = 1024
"""Up to so many tokens `attention` and its gradient are faster than cuDNN's, whose time hardly
falls for fewer."""
GATED_TOKENS, GATED_INPUTS = 4096, 1024
"""From so many tokens on, and up to so many inputs, `gated` and its gradient are one kernel: cuBLAS
is better at products, the more so the more there is to sum, and what is saved is memory."""


def fused(x: Tensor) -> bool:
    """Whether there are fused kernels for the device of this tensor."""
    return triton_layers is not None and x.is_cuda


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + delta, and the root-mean-square norm of its rows, in some type: [T, hidden] each."""
    if fused(x):
        return triton_norms.add_norm(x, delta, weight, eps, dtype)
    total = x if delta is None else x + delta
    unit = F.rms_norm(_wide(total), x.shape[-1:], eps=eps).to(x.dtype)
    return total, (unit * weight).to(dtype)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of x, that of the residual added; and the norm again, without its weight."""
    if fused(x):
        return triton_norms.norm_backward(grad, x, weight, eps, residual_grad)
    wide, dy = _wide(x), _wide(grad) * weight
    scale = torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps)
    unit = wide * scale
    grad_x = (dy - unit * (dy * unit).mean(dim=1, keepdim=True)) * scale
    if residual_grad is not None:
        grad_x = grad_x + residual_grad
    return grad_x.to(x.dtype), unit.to(x.dtype)


def normed_weight_grads(
    outer: Tensor, weight: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a norm's weight and of the matrix that follows it, in the memory of `outer`.

    For y = W (n * u) both come from the sum over tokens of the gradient of y outer u, which is as
    small as W: a sum of its own over tokens would read them all again.
    """
    if fused(outer):
        return triton_norms.normed_weight_grads(outer, weight, norm_weight)
    grad_norm = (outer * weight).sum(dim=0)
    return grad_norm.to(norm_weight.dtype), outer.mul_(norm_weight)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, which lie side by side: [T, 2 I] -> [T, I]."""
    if fused(gate_up):
        return triton_layers.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """`swiglu` of a product, of which nothing else is needed: [T, in], [2 I, in] -> [T, I]."""
    if _is_gated(x, weight):
        return triton_gates.gated(x, weight)
    return swiglu(F.linear(x, weight))


def gated_backward(grad: Tensor, weight: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_backward` of grad @ weight: [T, hidden], [hidden, I], [T, 2 I]."""
    if _is_gated(grad, weight):
        return triton_gates.gated_backward(grad, weight, gate_up)
    return swiglu_backward(grad @ weight, gate_up)


def _is_gated(x: Tensor, weight: Tensor) -> bool:
    large = len(x) >= GATED_TOKENS and x.shape[1] <= GATED_INPUTS
    return large and fused(x) and triton_gates is not None and triton_gates.can_gate(x, weight)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up`, and `swiglu` again. The memory of `grad` may be used for it."""
    if fused(gate_up):
        return triton_layers.swiglu_backward(grad, gate_up)
    gate, up = _wide(gate_up).chunk(2, dim=1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    both = torch.cat((up * sigmoid * (1 + gate - silu), silu), dim=1) * _wide(grad).repeat(1, 2)
    return both.to(gate_up.dtype), swiglu(gate_up)


def rotate(qkv: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor, which: range) -> None:
    """Rotate some heads of each token in place: [T, heads, D].

    `rotary` has cosines and sines of each position, [longest, D], as transformers makes them.
    """
    if fused(qkv):
        triton_layers.rotate(qkv, rotary, positions, which)
        return
    heads = qkv[:, which.start : which.stop]
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


def has_attention(x: Tensor, width: int, length: int) -> bool:
    """Whether `attention` is the fastest for heads and rows of these sizes, computed from x."""
    halves = x.dtype in (torch.bfloat16, torch.float16)
    return fused(x) and halves and width in (16, 32, 64) and length <= SHORT_ROWS


def attention(
    qkv: Tensor,
    queries: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Causal attention within rows, and the logarithms of the sums of its exponentials.

    [B, L, H + 2 K, D], of which the first are queries -> [B, L, H, D] and [B, K, L, H / K].
    With `rotary` queries are still to be rotated, where a token's position is its place in the row.
    `keep` leaves them rotated in `qkv`, as `attention_backward` needs them.
    """
    if fused(qkv):
        return triton_attention.attention(qkv, queries, scale, rotary, keep=keep)
    if rotary is not None:
        rotate(qkv.flatten(0, 1), rotary, _places(qkv), range(queries))
    query, key, value = _heads(qkv, queries)
    scores = _scores(query, key, scale)
    lse = scores.logsumexp(dim=3)
    out = (scores - lse[..., None]).exp() @ value
    groups = (qkv.shape[2] - queries) // 2
    by_group = lse.unflatten(1, (groups, -1)).transpose(2, 3).contiguous()
    return out.transpose(1, 2).contiguous().to(qkv.dtype), by_group


def attention_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    rotary: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """The gradient of `qkv` before `rotate`, where a token's position is its place in the row."""
    if fused(qkv):
        return triton_attention.attention_backward(grad, qkv, out, lse, rotary, scale)
    heads = qkv.shape[2]
    query, key, value = _heads(qkv, out.shape[2])
    of_heads = lse.transpose(2, 3).flatten(1, 2)
    weights = (_scores(query, key, scale) - of_heads[..., None]).exp()
    grad_out = _wide(grad).transpose(1, 2)
    delta = (grad_out * _wide(out).transpose(1, 2)).sum(dim=3, keepdim=True)
    grad_scores = weights * (grad_out @ value.mT - delta) * scale
    parts = grad_scores @ key, grad_scores.mT @ query, weights.mT @ grad_out
    groups = (heads - query.shape[1]) // 2
    query, key, value = (
        x.unflatten(1, (n, -1)).sum(dim=2).to(qkv.dtype)  # over the heads that share it
        for x, n in zip(parts, (query.shape[1], groups, groups))
    )
    return rotate_backward((query, key, value), rotary, _places(qkv)).view(qkv.shape)


def pick(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of tokens, float32, in one pass over logits: [N, V], [N] -> [N]."""
    if fused(logits):
        return triton_layers.pick(logits, tokens)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return chosen.float() - logits.float().logsumexp(dim=1)


def _heads(qkv: Tensor, queries: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, those repeated for each query head: [B, H, L, D] each."""
    groups = (qkv.shape[2] - queries) // 2
    query, *others = _wide(qkv).transpose(1, 2).split((queries, groups, groups), dim=1)
    return query, *(x.repeat_interleave(queries // groups, dim=1) for x in others)


def _places(qkv: Tensor) -> Tensor:
    """Where each token is in its row, [T]."""
    rows, length = qkv.shape[:2]
    return torch.arange(length, device=qkv.device).repeat(rows)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    visible = torch.ones(2 * query.shape[2:3], dtype=torch.bool, device=query.device).tril()
    return (query @ key.mT * scale).masked_fill(~visible, -torch.inf)


def _turn(x: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    cos, sin = (table.index_select(0, positions)[:, None] for table in rotary)
    a, b = x.chunk(2, dim=2)
    return x * cos + torch.cat((-b, a), dim=2) * sin


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
