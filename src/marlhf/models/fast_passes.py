"""Fast passes of models on a GPU: by our own kernels, over packed rows, replayed as CUDA graphs.

Launching the kernels of a small model takes the host longer than the GPU needs to run them, so a
pass of a shape that comes again is recorded and replayed. For that its sizes are rounded up, to few
different ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marlhf.models import llama_layers
from marlhf.models.compile import uncompiled
from marlhf.models.graphs import GraphedPasses
from marlhf.models.packed import (
    Packing,
    attend,
    can_pack,
    flat_places,
    one_text_per_row,
    packed_hidden,
    round_up,
)
from marlhf.models.sequences import Sequences, send
from marlhf.models.unpadded import StillPlain, is_plain_llama

PACKED_BELOW = 0.85
"""Rows are packed where they fill less than this share of a padded batch. Otherwise the padded pass
is faster: its attention kernel is."""
PACKING_TOLERANCE = 0.1
"""Share of the spread of hidden states that rounding to bfloat16 explains."""
WIDTH, HEIGHT = 32, 8
"""Padded batches are rounded up to a multiple of so many columns. On a GPU batches that others
follow have a multiple of so many rows: every shape is a graph of its own, so there must be few."""
RECORDED_SHARE = 1 / 8
"""Share of a GPU's memory that a recorded padded pass may keep for its gradients: it is kept for
good. A larger pass keeps the GPU busy for longer than launching takes, and gains nothing."""


@dataclass(frozen=True)
class FastPass:
    """A pass up to the last hidden states of some tokens, which can be recorded."""

    name: Hashable
    hidden: Callable[..., Tensor]
    """From `inputs` to hidden states, [N', H]."""
    inputs: tuple[Tensor, ...]
    count: int
    """N, the tokens that were asked for; those after them are padding."""
    size: int  # N'
    graphs: GraphedPasses
    recorded: bool  # whether it may be

    def __call__(self, name: Hashable, read: Callable[..., Tensor], *more: Tensor) -> Tensor:
        """`read(hidden, *more)`, [N]; `more` has N' rows each.

        `name` must say everything that `read` depends on besides its arguments and the weights.
        """
        own = len(self.inputs)

        def run(*inputs: Tensor) -> Tensor:
            return read(self.hidden(*inputs[:own]), *inputs[own:])

        inputs = (*self.inputs, *more)
        if not self.recorded:
            return run(*inputs)[: self.count]
        return self.graphs((self.name, name), run, inputs)[: self.count]

    def plain_hidden(self) -> Tensor:
        """The hidden states, [N, H], of a pass that is not recorded: for those who watch it."""
        return self.hidden(*self.inputs)[: self.count]


def fast_pass(
    model: nn.Module, sequences: Sequences, picked: Sequence[tuple[int, int]], dtype: torch.dtype
) -> FastPass | None:
    """A fast pass to some tokens of each row, (first column, count), if this model has one.

    Matrices are multiplied in `dtype`.
    """
    return _packed_pass(model, sequences, picked, dtype) or _padded_pass(
        model, sequences, picked, dtype
    )


_KERNELS: WeakKeyDictionary[nn.Module, tuple[StillPlain, GraphedPasses]] = WeakKeyDictionary()
"""Models whose passes run by the kernels of `llama_layers.py`, where they fit."""


def use_kernels(model: nn.Module) -> None:
    """Let passes of this model run by our own kernels, where they can.

    Layers must not be replaced after this.
    """
    plain = is_plain_llama(cast(Any, model))
    if plain and llama_layers.has_our_layers(cast(Any, model)):
        _KERNELS[model] = StillPlain(cast(Any, model)), GraphedPasses(model)


def has_kernels(model: nn.Module, longest: int) -> bool:
    """Whether passes of this model over rows of some length run by our own kernels."""
    return model in _KERNELS and _KERNELS[model][0](cast(Any, model), longest)


def _padded_pass(
    model: nn.Module, sequences: Sequences, picked: Sequence[tuple[int, int]], dtype: torch.dtype
) -> FastPass | None:
    height, width = sequences.ids.shape
    device = sequences.ids.device
    if not has_kernels(model, width) or (device.type == "cuda" and dtype == torch.float64):
        return None  # the kernels compute in float32
    width = round_up(width, WIDTH)
    ids = F.pad(sequences.ids, (0, width - sequences.ids.shape[1]))
    starts = np.arange(height) * width
    places, count = flat_places(starts, picked)

    def hidden(ids: Tensor, places: Tensor) -> Tensor:
        where = llama_layers.padded(height, width, device)
        return llama_layers.kernel_hidden(cast(Any, model), ids.flatten(), where, places, dtype)

    inputs = (ids, send(torch.from_numpy(places), device))
    room = device.type != "cuda" or _keeps_little(model, ids.numel(), dtype)
    return FastPass("padded", hidden, inputs, count, len(places), _KERNELS[model][1], room)


def _keeps_little(model: nn.Module, tokens: int, dtype: torch.dtype) -> bool:
    """Whether a recorded pass over so many tokens would keep little of the GPU's memory."""
    if not (torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())):
        return True
    whole = torch.cuda.get_device_properties(next(model.parameters()).device).total_memory
    return llama_layers.kept_bytes(cast(Any, model), tokens, dtype) <= RECORDED_SHARE * whole


_PACKED: WeakKeyDictionary[nn.Module, GraphedPasses | None] = WeakKeyDictionary()
"""Models whose passes run over packed rows; None where that was tried and is not the same."""


def pack_rows(model: nn.Module) -> None:
    """Let passes of this model run over packed rows, where it can.

    It does where the lengths of rows differ enough for that to be faster.
    """
    if can_pack(model):
        _PACKED[model] = GraphedPasses(model)


def packed_graphs(model: nn.Module, sequences: Sequences) -> GraphedPasses | None:
    """What runs a model's packed passes, once a first small pass has shown that they are right."""
    passes = _PACKED.get(model)
    if passes is None or sum(sequences.total_lengths) > PACKED_BELOW * sequences.ids.numel():
        return None
    kind = next(model.parameters()).device.type
    if kind == "cuda" and not torch.is_autocast_enabled(kind):
        return None  # the attention kernel knows no float32
    if not passes.checked:
        passes.checked = True
        if (off := _packing_error(model)) > PACKING_TOLERANCE:
            warnings.warn(
                f"{type(model).__name__} gives other numbers over packed rows (off by {off:.2g} of "
                "their spread), so its passes are padded and slower.",
                stacklevel=2,
            )
            _PACKED[model] = None
    return _PACKED[model]


def _packed_pass(
    model: nn.Module, sequences: Sequences, picked: Sequence[tuple[int, int]], dtype: torch.dtype
) -> FastPass | None:
    graphs = packed_graphs(model, sequences)
    if graphs is None:
        return None
    packing = Packing.of(sequences.total_lengths, sequences.ids.shape[1], picked)
    packing = packing.to(lambda x: send(x, sequences.ids.device))
    by_kernels = has_kernels(model, packing.longest)  # in bfloat16, see `packed_graphs`

    def hidden(ids: Tensor, positions: Tensor, offsets: Tensor, picked: Tensor) -> Tensor:
        rows = Packing(ids, positions, offsets, picked, packing.longest)
        return _packed_hidden(model, ids, rows, dtype if by_kernels else None)

    name = ("packed", packing.longest, by_kernels)
    inputs = (sequences.ids.flatten()[packing.source], *packing.tensors[1:])
    count = sum(count for _, count in picked)
    return FastPass(name, hidden, inputs, count, len(packing.picked), graphs, True)


def _packed_hidden(
    model: nn.Module, ids: Tensor, packing: Packing, dtype: torch.dtype | None
) -> Tensor:
    """The last hidden states of the picked tokens of packed rows; by kernels in `dtype`, if any."""
    if dtype is None:
        return packed_hidden(model, ids, packing)

    def within_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        offsets, longest = packing.offsets, packing.longest
        options: dict[str, Any] = {"cu_seq_lens_q": offsets, "max_length_q": longest}
        return attend(model, query, key, value, None, scaling=scale, **options)[0]

    shape, longest = (1, len(ids)), packing.longest
    places = llama_layers.Places(shape, packing.positions, longest, within_rows)
    return llama_layers.kernel_hidden(cast(Any, model), ids, places, packing.picked, dtype)


@torch.no_grad()
def _packing_error(model: nn.Module) -> float:
    """How far hidden states of packed rows are from those of a padded batch, by their spread."""
    size = cast(Any, model).config.get_text_config().vocab_size
    device = next(model.parameters()).device
    # From all over the vocabulary: its first tokens are often special and untrained.
    ids = (size // 3 + torch.arange(57, device=device).view(3, 19) * 7919) % size
    lengths = [19, 11, 16]
    packing = Packing.of(lengths, 19, [(0, n) for n in lengths]).to(lambda x: x.to(device))
    with uncompiled(), one_text_per_row():
        ours = packed_hidden(model, ids.flatten()[packing.source], packing)[: sum(lengths)].float()
        whole = cast(Any, model).base_model(input_ids=ids, use_cache=False).last_hidden_state
    whole = torch.cat([row[:n] for row, n in zip(whole.float(), lengths)])
    return float((ours - whole).norm() / (whole - whole.mean(0)).norm())
