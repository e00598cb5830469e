"""Prefills of small models as CUDA graphs: a host launches them at once, not kernel by kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from marlhf.models.base import Model
from marlhf.models.graphs import GraphedPasses, Run

PREFILL_MULTIPLE = 32
"""Prompts are padded to a multiple of this on a GPU, so that prefills have few shapes."""
RECORDED_WORK = 1 << 43
"""Weights times tokens of the largest prefill that is recorded, where its shape comes again. It
then works in the memory of training passes, and up to half as much is done by a GPU before a host
has launched it."""
FIRST_TOKENS = 1 << 13
"""In the first prefill of a call: some milliseconds of work for a GPU, launched at once."""


class RecordedPrefills:
    """The prefills of a decoder, recorded where that is worth it."""

    def __init__(
        self,
        model: Model,
        weights: int,  # by which each token is multiplied
        capacity: int,  # positions of a slot
    ) -> None:
        gpu = model.device.type == "cuda"
        self.most_tokens = RECORDED_WORK // max(weights, 1) if gpu else 0
        self.first_tokens = FIRST_TOKENS if self.most_tokens >= FIRST_TOKENS else 0
        self._capacity = capacity
        self._passes = GraphedPasses(model)

    def __call__(self, run: Run, ids: Tensor, slots: Tensor) -> None:
        """`run(ids, slots)`: tokens [B, P] into slots [B]. A recorded pass needs a result, of which
        nothing is made. (`run` is no attribute: a decoder frees its memory when nobody has it.)"""
        if ids.numel() <= self.most_tokens:
            self._passes("prefill", run, _round_up(ids, slots, self._capacity))
        else:
            run(ids, slots)


def _round_up(ids: Tensor, slots: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """A prefill of one of few shapes, which does the same.

    Positions after a prompt are written anew before they are read, and a row that comes again is
    written over by its like.
    """
    rows, length = ids.shape
    ids = F.pad(ids, (0, min(length + -length % PREFILL_MULTIPLE, capacity) - length))
    more = -rows % 8 if rows > 8 else (1 << (rows - 1).bit_length()) - rows
    if more:
        ids, slots = (torch.cat((x, x[-1:].expand(more, *x.shape[1:]))) for x in (ids, slots))
    return ids, slots
