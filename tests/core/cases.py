"""Random batches for property tests: rows of different length, empty rows, junk at padding."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from marlhf.core import Segments

JUNK = float("nan")


@st.composite
def batches(draw, max_rows: int = 4, max_tokens: int = 12) -> Segments:
    """Any segmentation of any rows, right-padded, some empty, some with padding on the left."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_tokens))
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in mask:
        begin, end = sorted((draw(st.integers(0, width)), draw(st.integers(0, width))))
        row[begin if draw(st.booleans()) else 0 : end] = True
    bits = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    return Segments.from_starts(torch.tensor(bits).reshape(rows, width), mask)


def numbers(like: Segments, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64 on the mask, NaN elsewhere: padding must never be looked at."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(like.mask.shape, generator=generator, dtype=torch.float64) * scale
    return torch.where(like.mask, x, JUNK)


@st.composite
def batches_with_holes(draw, max_rows: int = 4, max_tokens: int = 12) -> Segments:
    """Any segmentation of rows whose mask is anything."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_tokens))
    bits = st.lists(st.booleans(), min_size=rows * width, max_size=rows * width)
    mask, starts = (torch.tensor(draw(bits)).reshape(rows, width) for _ in range(2))
    return Segments.from_starts(starts, mask)


seeds = st.integers(0, 2**31)
