"""Attention over the slots of a key-value cache, and within right-padded prompts.

On a GPU attention of a decode step is a Triton kernel, elsewhere plain torch. The plain form is the
definition, and the tests compare the two.
Axes: B rows, P prompt tokens, S slots, N new tokens of a text, H query heads, K key-value heads,
C positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from marlhf.kernels import fused, has_triton

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN, which plans for every shape anew."""
triton_attention: Any = None
if has_triton():
    from marlhf.kernels import triton_attention


class SlotPositions:
    """Where the new tokens of slots are: position in the text, and row of the cache.

    One token per slot in a decode step, several where texts are extended.

    Every layer needs the same masks. The kernel computes them on the fly; the plain form computes
    them once and keeps them here for the layers that follow.
    """

    def __init__(self, positions: Tensor, cache_rows: Tensor | None = None) -> None:
        self.positions = positions  # [S] or [S, N]
        self.cache_rows = cache_rows  # [S]; None for the first rows
        self._masks: dict[tuple[int | None, int, int], tuple[Tensor, Tensor]] = {}

    def masks(
        self, window: int | None, length: int, dtype: torch.dtype, share: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Which keys each token may attend to, as bool and as 0 or -inf: [S, 1, N, length].

        With `share` the tokens come so many times in a row: [S, 1, share * N, length].
        """
        if (window, length, share) not in self._masks:
            key = torch.arange(length, device=self.positions.device)
            position = self.positions.view(len(self.positions), -1, 1)
            visible = key <= position
            if window is not None:
                visible &= key > position - window
            visible = visible.repeat(1, share, 1)[:, None] if share > 1 else visible[:, None]
            bias = torch.where(visible, 0.0, -torch.inf).to(dtype)
            self._masks[window, length, share] = visible, bias
        return self._masks[window, length, share]


def has_kernel(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the Triton kernel computes attention of these tensors."""
    return fused(query) and triton_attention.can_attend(query, keys, values)


def attend(
    query: Tensor,  # [S, H, D], rows may be strided
    keys: Tensor,  # [at least S, K, C, D], the last two dimensions contiguous
    values: Tensor,
    at: SlotPositions,
    reach: int | None,  # keys from here on are not looked at; None for all
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Each slot's query over its keys up to its position: [S, H, D]."""
    if has_kernel(query, keys, values):
        return triton_attention.attend(
            query, keys, values, at.positions, at.cache_rows, scale, window, softcap
        )
    rows = query.shape[0]
    own = slice(rows) if at.cache_rows is None else at.cache_rows
    key, value = keys[own, :, :reach], values[own, :, :reach]
    visible, bias = at.masks(window, key.shape[2], query.dtype)
    # Grouped queries: the heads that share keys become rows of one product, [S, K, H / K, D], so
    # that keys need not be repeated for each head.
    folded = query.reshape(rows, key.shape[1], -1, query.shape[2])
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
    else:
        out = _softcap_attention(folded, key, value, visible, scale, softcap)
    return out.reshape(query.shape)


def attend_to_text(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, C, D], those of the new tokens among them
    value: Tensor,
    at: SlotPositions,  # [B, N]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Several new tokens of each text, over its keys up to the position of each: [B, H, N, D]."""
    share = query.shape[1] // key.shape[1]
    visible, bias = at.masks(window, key.shape[2], query.dtype, share)
    # Grouped queries are folded as in `attend`: [B, K, H / K * N, D].
    folded = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    if softcap is not None:
        out = _softcap_attention(folded, key, value, visible, scale, softcap)
    else:
        with sdpa_kernel(WITHOUT_PLANS):  # every extension has other sizes
            out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
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
        query.contiguous(), keys, values, SlotPositions(positions), None, scale, window, softcap
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
