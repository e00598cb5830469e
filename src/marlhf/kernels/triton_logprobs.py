"""Log-probs of chosen tokens in one pass over logits: the Triton kernel for `logprobs.pick`."""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Logits that a program holds at a time."""


@triton.jit
def _pick(logits, tokens, out, size, block: tl.constexpr):
    # One program per row: its largest logit and the sum of exponentials so far, block by block.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    highest = tl.full([block], -float("inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, size, block):
        inside = start + column < size
        x = tl.load(logits + row * size + start + column, inside, other=-float("inf"))
        x = x.to(tl.float32)
        top = tl.maximum(highest, x)
        # Of a column that has seen only -inf, -inf - -inf would be NaN.
        rescale = tl.where(highest == top, 1.0, tl.exp(highest - top))
        total = total * rescale + tl.where(x == -float("inf"), 0.0, tl.exp(x - top))
        highest = top
    top = tl.max(highest, axis=0)
    total = tl.sum(tl.where(highest == -float("inf"), 0.0, total * tl.exp(highest - top)), axis=0)
    chosen = tl.load(logits + row * size + tl.load(tokens + row)).to(tl.float32)
    tl.store(out + row, chosen - top - tl.log(total))


def pick(logits: Tensor, tokens: Tensor) -> Tensor:
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(TILE, triton.next_power_of_2(size))
    _pick[(rows,)](logits.contiguous(), tokens, out, size, block, num_warps=8)
    return out
