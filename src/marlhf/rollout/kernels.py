"""The arithmetic between matrix products, each as one kernel on a GPU and in plain torch elsewhere.

A decode step of a small model is some thousand tiny operations, and a GPU spends it waiting for
their launches; fused, it is a few hundred. Each function has the plain form as its twin, which is
the definition. Axes: T tokens, S slots, H query heads, K key-value heads, C positions, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

triton_kernels: Any = None
if importlib.util.find_spec("triton"):  # torch brings it where there may be a GPU
    triton_kernels = importlib.import_module("marlhf.rollout.triton_kernels")


def fused(x: Tensor) -> bool:
    """Whether there are kernels for where this tensor is."""
    return triton_kernels is not None and x.is_cuda


def add_norm(
    residual: Tensor,  # [T, hidden], changed in place
    delta: Tensor | None,  # [T, hidden], what the last block adds to it
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Add to the residual, and give its root-mean-square norm: [T, hidden]."""
    if fused(residual):
        return triton_kernels.add_norm(residual, delta, weight, eps, dtype)
    if delta is not None:
        residual += delta
    return F.rms_norm(residual, residual.shape[-1:], weight, eps).to(dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, which lie side by side: [T, 2 I] -> [T, I]."""
    if fused(gate_up):
        return triton_kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_and_store(
    qkv: Tensor,  # [T, H + 2 K, D], queries and keys are rotated in place
    rotary: tuple[Tensor, Tensor],  # cosines and sines, [C, D]
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]
    keys: Tensor,  # [S, K, C, D]
    values: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,  # weights [D] for queries and keys, epsilon
) -> None:
    """Queries and keys to their positions, after their norm if they have one; keys and values
    into the cache."""
    if fused(qkv):
        triton_kernels.rotate_and_store(qkv, rotary, positions, slots, keys, values, norms)
        return
    groups = keys.shape[1]
    turning, value = qkv.split([qkv.shape[1] - groups, groups], dim=1)
    x = turning
    if norms is not None:
        unit = F.rms_norm(x.float(), x.shape[-1:], eps=norms[2]).to(x.dtype)
        queries = x.shape[1] - groups
        x = torch.cat((unit[:, :queries] * norms[0], unit[:, queries:] * norms[1]), dim=1)
    cos, sin = (table[positions][:, None] for table in rotary)  # [T, 1, D]
    a, b = x.chunk(2, dim=-1)
    turning.copy_(x * cos + torch.cat((-b, a), dim=-1) * sin)
    key = turning[:, -groups:]
    keys[slots, :, positions] = key
    values[slots, :, positions] = value


def attend(
    query: Tensor,  # [S, H, D], rows may be far apart
    keys: Tensor,  # [at least S, K, C, D]
    values: Tensor,
    positions: Tensor,  # [S]
    reach: int | None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Each slot's query over its keys up to its position: [S, H, D]."""
    if fused(query) and triton_kernels.can_attend(query, keys, values):
        return triton_kernels.attend(query, keys, values, positions, scale, window, softcap)
    key, value = (x[: len(query), :, :reach] for x in (keys, values))
    place = torch.arange(key.shape[2], device=key.device)
    seen = place <= positions[:, None]
    if window is not None:
        seen &= place > positions[:, None] - window
    seen = seen[:, None, None]
    # The heads that share keys are folded, so none is repeated: [S, K, H / K, D].
    folded = query.reshape(len(query), key.shape[1], -1, query.shape[2])
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=scale)
    else:
        out = _attend(folded, key, value, seen, scale, softcap)
    return out.reshape(query.shape)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention among the tokens of prompts that begin in the first column: [B, H, P, D]."""
    length = query.shape[2]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if softcap is None and (window is None or length <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    place = torch.arange(length, device=query.device)
    seen = place[None, :] <= place[:, None]
    if window is not None:
        seen &= place[None, :] > place[:, None] - window
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, **options)
    shape = (len(query), key.shape[1], -1, length, query.shape[3])
    folded = query.reshape(shape)  # [B, K, H / K, P, D]
    out = _attend(folded, key[:, :, None], value[:, :, None], seen, scale, softcap)
    return out.reshape(query.shape)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """The definition, which fused kernels cannot do with a soft cap."""
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return weights.to(value.dtype) @ value
