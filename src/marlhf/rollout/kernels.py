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


class Places:
    """Where the tokens of a pass are, and what follows from that for all layers alike.

    Kernels look up by themselves what they need; the plain forms keep it here for the next layer.
    """

    def __init__(self, positions: Tensor, slots: Tensor | None = None) -> None:
        self.positions = positions  # [T]
        self.slots = slots  # [T], where keys and values are stored
        self._turns: tuple[Tensor, Tensor] | None = None
        self._masks: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = {}

    def turns(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [T, 1, D], the first half of the sines negative."""
        if self._turns is None:
            cos, sin = (table[self.positions][:, None] for table in rotary)
            sin[..., : sin.shape[-1] // 2].neg_()
            self._turns = cos, sin
        return self._turns

    def seen(self, window: int | None, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Which of the keys each token sees, and the same as numbers to add: [T, 1, 1, length]."""
        if (window, length) not in self._masks:
            place = torch.arange(length, device=self.positions.device)
            seen = place <= self.positions[:, None]
            if window is not None:
                seen &= place > self.positions[:, None] - window
            seen = seen[:, None, None]
            added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._masks[window, length] = seen, added.masked_fill_(~seen, -torch.inf)
        return self._masks[window, length]


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
    places: Places,
    cache: Tensor,  # [S, 2 K, C, D], keys before values
    norms: tuple[Tensor, Tensor, float] | None,  # weights [D] for queries and keys, epsilon
) -> None:
    """Queries and keys to their positions, after their norm if they have one; keys and values
    into the cache."""
    if fused(qkv):
        where = places.positions, places.slots, *cache.chunk(2, dim=1)
        triton_kernels.rotate_and_store(qkv, rotary, *where, norms)
        return
    groups = cache.shape[1] // 2
    x = turning = qkv[:, :-groups]
    if norms is not None:
        unit = F.rms_norm(x.float(), x.shape[-1:], eps=norms[2]).to(x.dtype)
        queries = x.shape[1] - groups
        x = torch.cat((unit[:, :queries] * norms[0], unit[:, queries:] * norms[1]), dim=1)
    cos, sin = places.turns(rotary)
    torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin, out=turning)
    cache[places.slots, :, places.positions] = qkv[:, -2 * groups :]


def attend(
    query: Tensor,  # [S, H, D], rows may be far apart
    keys: Tensor,  # [at least S, K, C, D], the last two dimensions without gaps
    values: Tensor,
    places: Places,
    reach: int | None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Each slot's query over its keys up to its position: [S, H, D]."""
    if fused(query) and triton_kernels.can_attend(query, keys, values):
        return triton_kernels.attend(query, keys, values, places.positions, scale, window, softcap)
    rows = query.shape[0]
    key, value = keys[:rows, :, :reach], values[:rows, :, :reach]
    seen, added = places.seen(window, key.shape[2], query.dtype)
    # The heads that share keys are folded, so none is repeated: [S, K, H / K, D].
    folded = query.reshape(rows, key.shape[1], -1, query.shape[2])
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=added, scale=scale)
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
