"""Passes over rows packed end to end, without padding, each replayed as one CUDA graph.

A padded micro-batch wastes arithmetic on padding, and launching the kernels of a small model takes
the host longer than the GPU needs to run them. Here rows follow each other in one sequence of a few
fixed sizes, attention stops at the ends of rows, and a forward and a backward pass are one launch
each. `forward.py` has the padded pass, which gives the same numbers and stays for everything that
cannot be packed: CPUs, sharded and adapted models, attention with windows or soft caps.

Axes: B rows, W columns of a padded batch, T packed tokens, N picked tokens, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from marlhf.models.base import Model

ATTENTION = "marlhf_packed"
"""The name under which transformers knows `attend`."""
TOKENS, PICKED, ROWS, LENGTHS = 2048, 1024, 64, 128
"""Sizes are rounded up to multiples of these. Every size is a graph of its own, so there must be
few, and what is added must cost little."""


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a padded batch [B, W] are in a packed sequence [T]."""

    source: Tensor  # [T], flat places in the padded batch; 0 after the last row
    positions: Tensor  # [T], places within a row
    offsets: Tensor  # [rows + 1] int32, where each row starts, and the end of the last
    picked: Tensor  # [N], packed places whose outputs are wanted; 0 after the last
    longest: int
    """At least as long as the longest row: a fixed number for the attention kernel."""

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, picked: Sequence[tuple[int, int]]) -> Packing:
        """Rows of some lengths out of a batch of some width, on the host.

        `picked` has a (first column, count) for each row.

        >>> packing = Packing.of([3, 2], width=4, picked=[(1, 2), (0, 1)])
        >>> packing.offsets[:3].tolist(), packing.source[:5].tolist(), packing.picked[:3].tolist()
        ([0, 3, 5], [0, 1, 2, 4, 5], [1, 2, 3])
        """
        longest = round_up(max(lengths), LENGTHS)
        total = round_up(sum(lengths), TOKENS)
        # Every token must belong to a row: attention leaves the memory of others as it was, and
        # whatever lies there would enter the gradients of the weights. So what is left becomes
        # rows too, whose outputs nobody picks.
        rest = total - sum(lengths)
        spare = [min(longest, rest - start) for start in range(0, rest, longest)]
        # In numpy: torch would wake a pool of threads for a few thousand numbers.
        rows = np.array([*lengths, *spare], dtype=np.int64)
        ends = rows.cumsum()
        starts = ends - rows
        row = np.repeat(np.arange(len(rows)), rows)  # [T]
        positions = np.arange(total) - starts[row]
        source = np.where(row < len(lengths), row * width + positions, 0)
        num_rows = round_up(len(rows), ROWS)
        offsets = np.full(num_rows + 1, total, dtype=np.int32)
        offsets[0] = 0
        offsets[1 : len(rows) + 1] = ends
        places, _ = flat_places(starts, picked)
        arrays = (source, positions, offsets, places)
        source, positions, offsets, places = map(torch.from_numpy, arrays)
        return cls(source, positions, offsets, places, longest)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.source, self.positions, self.offsets, self.picked

    def to(self, move: Callable[[Tensor], Tensor]) -> Packing:
        source, positions, offsets, picked = map(move, self.tensors)
        return Packing(source, positions, offsets, picked, self.longest)


def flat_places(
    starts: NDArray[np.int64], picked: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], int]:
    """Where picked tokens are, row after row, and how many: (first column, count) of each row.

    Rows begin at `starts`; places after the last are 0.
    """
    first, count = np.array(picked, dtype=np.int64).reshape(-1, 2).T
    chosen = np.repeat(np.arange(len(count)), count)
    inner = np.arange(len(chosen)) - (count.cumsum() - count)[chosen]
    places = np.zeros(round_up(len(chosen), PICKED), dtype=np.int64)
    places[: len(chosen)] = starts[chosen] + first[chosen] + inner
    return places, len(chosen)


def can_pack(model: Model) -> bool:
    """Whether `attend` computes this model's attention: every layer causal over the whole row."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    windows = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    capped = getattr(config, "attn_logit_softcapping", None)
    return (
        bool(getattr(type(model), "_supports_attention_backend", False))
        and set(layers) == {"full_attention"}
        and not windows
        and not capped
    )


def packed_hidden(model: Model, ids: Tensor, packing: Packing) -> Tensor:
    """The last hidden states of the picked tokens of packed rows: [N, H]."""
    with _packed_attention(model):
        hidden = model.base_model(
            input_ids=ids[None],
            position_ids=packing.positions[None],
            use_cache=False,
            # transformers hands these on to the attention of every layer.
            cu_seq_lens_q=packing.offsets,
            cu_seq_lens_k=packing.offsets,
            max_length_q=packing.longest,
            max_length_k=packing.longest,
        ).last_hidden_state
    return hidden[0].index_select(0, packing.picked)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, KV heads, T, D]
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed sequence, in the form transformers calls it."""
    if not query.is_cuda:
        return _attend_by_mask(query, key, value, cu_seq_lens_q, scaling), None
    # Rotary embeddings leave queries and keys in float32, and autocast does not know this kernel.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # [T, heads, D]
    longest, dropout, causal, debug = max_length_q, 0.0, True, False
    out = torch.ops.aten._flash_attention_forward(
        *(q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest, dropout, causal, debug),
        scale=scaling,
    )[0]
    return out[None], None


def _attend_by_mask(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scaling: float | None
) -> Tensor:
    """What the kernel computes, with a mask as large as the square of the tokens."""
    place = torch.arange(query.shape[2], device=query.device)
    row = torch.searchsorted(offsets, place.int(), right=True)
    mask = (row[:, None] == row) & (place[:, None] >= place)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


@contextlib.contextmanager
def _packed_attention(model: Model) -> Iterator[None]:
    """Let a model use `attend`, and not look for row ends by itself."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        with one_text_per_row():
            yield
    finally:
        config._attn_implementation = before


@contextlib.contextmanager
def one_text_per_row() -> Iterator[None]:
    """Skip transformers' search for rows that hold several texts: we know which do.

    The search copies a result to the host in every pass. Until that arrives nothing further is
    launched, and the device runs out of work.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def round_up(number: int, multiple: int) -> int:
    return max(1, -(-number // multiple)) * multiple
