"""The arithmetic between matrix products: one fused kernel each on a GPU, plain torch elsewhere.

A decode step of a small model is about a thousand tiny operations, and a GPU spends most of it
waiting for their launches; fused, it is a few hundred. The plain form of each function is its
definition, and the tests compare the two.
Axes: T tokens, S slots, H query heads, K key-value heads, C positions, D head size.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from marlhf.models import layer_kernels
from marlhf.rollout.state import Prefixes

triton_attend: Any = None
triton_kernels: Any = None
if importlib.util.find_spec("triton"):  # torch installs it only where there may be a GPU
    from marlhf.rollout import triton_attend, triton_kernels


def fused(x: Tensor) -> bool:
    """Whether there are fused kernels for the device of this tensor."""
    return triton_kernels is not None and x.is_cuda


class Positions:
    """Where the tokens of one forward pass are: position in the text, and slot of the cache.

    Every layer needs the same rotary angles and masks. The fused kernels compute them on the fly;
    the plain forms compute them once and keep them here for the layers that follow.
    """

    def __init__(
        self,
        positions: Tensor,
        slots: Tensor | None = None,
        prefixes: Prefixes | None = None,
        cache_rows: Tensor | None = None,
    ) -> None:
        self.positions = positions  # [T]
        # [T], rows of the cache where keys and values are stored.
        self.slots = slots if cache_rows is None else cache_rows
        # Of a decode step; attention reads the first rows unless some are given.
        self.prefixes, self.cache_rows = prefixes, cache_rows
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._masks: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = {}

    def rotary(self, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines at these positions, [T, 1, D], the first half of the sines negated.

        Rotation is x * cos + rotate_half(x) * sin, where rotate_half negates its first half.
        Negating the sines instead leaves a plain `roll` in place of rotate_half.
        """
        if self._rotary is None:
            cos, sin = (table.index_select(0, self.positions)[:, None] for table in tables)
            sin[..., : sin.shape[-1] // 2].neg_()
            self._rotary = cos, sin
        return self._rotary

    def masks(self, window: int | None, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Which keys each token may attend to, as bool and as 0 or -inf: [T, 1, 1, length]."""
        if (window, length) not in self._masks:
            key = torch.arange(length, device=self.positions.device)
            visible = key <= self.positions[:, None]
            if window is not None:
                visible &= key > self.positions[:, None] - window
            visible = visible[:, None, None]
            bias = torch.where(visible, 0.0, -torch.inf).to(dtype)
            self._masks[window, length] = visible, bias
        return self._masks[window, length]


def add_norm(
    residual: Tensor,  # [T, hidden], whose memory may be used for the sum
    delta: Tensor | None,  # [T, hidden], output of the block before
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The residual with `delta` added, and its root-mean-square norm: [T, hidden] each."""
    if fused(residual):
        return layer_kernels.add_norm(residual, delta, weight, eps, dtype)
    if delta is not None:
        residual += delta
    if not (residual.is_cpu and residual.dtype == dtype == torch.float32):
        return residual, F.rms_norm(residual, residual.shape[-1:], weight, eps).to(dtype)
    # The same in half as many operations as F.rms_norm is on a CPU.
    size = torch.linalg.vector_norm(residual, dim=1, keepdim=True)
    scale = size.square_().mul_(1 / residual.shape[1]).add_(eps).rsqrt_()
    return residual, (residual * scale).mul_(weight)


def rotate_and_store(
    qkv: Tensor,  # [T, H + 2 K, D], queries and keys are rotated in place
    rotary: tuple[Tensor, Tensor],  # cosines and sines, [C, D]
    at: Positions,
    cache: Tensor,  # [S, 2 K, C, D], keys before values
    norms: tuple[Tensor, Tensor, float] | None,  # weights [D] for queries and keys, epsilon
) -> None:
    """Normalise queries and keys (where the model does), rotate them, and write keys and values
    into the cache."""
    if fused(qkv):
        keys, values = cache.chunk(2, dim=1)
        triton_kernels.rotate_and_store(qkv, rotary, at.positions, at.slots, keys, values, norms)
        return
    groups = cache.shape[1] // 2
    # Heads lie as queries, keys, values; values are stored as they are.
    x = queries_and_keys = qkv[:, :-groups]
    if norms is not None:
        query_weight, key_weight, eps = norms
        unit = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
        queries = x.shape[1] - groups
        x = torch.cat((unit[:, :queries] * query_weight, unit[:, queries:] * key_weight), dim=1)
    cos, sin = at.rotary(rotary)
    torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin, out=queries_and_keys)
    cache[at.slots, :, at.positions] = qkv[:, -2 * groups :]


def attend(
    query: Tensor,  # [S, H, D], rows may be strided
    keys: Tensor,  # [at least S, K, C, D], the last two dimensions contiguous
    values: Tensor,
    at: Positions,
    reach: int | None,  # keys from here on are not looked at; None for all
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Each slot's query over its keys up to its position: [S, H, D]."""
    if fused(query) and triton_attend.can_attend(query, keys, values):
        return triton_attend.attend(
            query, keys, values, at.positions, at.cache_rows, at.prefixes, scale, window, softcap
        )
    rows = query.shape[0]
    own = slice(rows) if at.cache_rows is None else at.cache_rows
    key, value = keys[own, :, :reach], values[own, :, :reach]
    if at.prefixes is not None:
        position = torch.arange(key.shape[2], device=key.device)
        borrowed = (position > 0) & (position < at.prefixes.ends[:, None])
        key, value = (
            torch.where(borrowed[:, None, :, None], x[at.prefixes.rows, :, :reach], mine)
            for x, mine in ((keys, key), (values, value))
        )
    visible, bias = at.masks(window, key.shape[2], query.dtype)
    # Grouped queries: the heads that share keys become rows of one product, [S, K, H / K, D], so
    # that keys need not be repeated for each head.
    folded = query.reshape(rows, key.shape[1], -1, query.shape[2])
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
    else:
        out = _softcap_attention(folded, key, value, visible, scale, softcap)
    return out.reshape(query.shape)


@torch.library.custom_op(
    "marlhf::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, Tensor positions, float scale, int? window,"
    " float? softcap) -> Tensor",
)
def attend_opaque(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`attend` as one operation, which torch.compile does not look into."""
    return attend(
        query.contiguous(), keys, values, Positions(positions), None, scale, window, softcap
    )


@attend_opaque.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention within right-padded prompts: [B, H, P, D].

    Padding comes last, so causality alone keeps every token from seeing it.
    """
    length = query.shape[2]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if softcap is None and (window is None or length <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    position = torch.arange(length, device=query.device)
    visible = position[None, :] <= position[:, None]
    if window is not None:
        visible &= position[None, :] > position[:, None] - window
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, **options)
    shape = (len(query), key.shape[1], -1, length, query.shape[3])
    folded = query.reshape(shape)  # [B, K, H / K, P, D]
    out = _softcap_attention(folded, key[:, :, None], value[:, :, None], visible, scale, softcap)
    return out.reshape(query.shape)


def _softcap_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention with capped scores, written out: PyTorch's fused attention has no soft cap."""
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = (scores / softcap).tanh() * softcap
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weights.to(value.dtype) @ value
