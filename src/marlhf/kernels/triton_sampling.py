"""Triton kernels over logits: the next token of each slot, and log-probs of chosen tokens.

The plain forms are `continuous.sample`, which is all that follows from a token in one kernel, and
`kernels.pick`.
"""

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
def _sample(
    logits,
    uniform,
    tokens,
    positions,
    steps,
    running,
    out_tokens,
    out_logprobs,
    ends,
    temperature,
    length,
    num_ends,
    size: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    ends_block: tl.constexpr,
    holds: tl.constexpr,  # whether idle slots stay where they are, with what they hold
):
    # One program per slot, three passes over its logits in blocks: their maximum, the weight of
    # each block, and the token within the block that the random number falls into.
    slot = tl.program_id(0).to(tl.int64)
    row = logits + slot * size
    column = tl.arange(0, block)
    highest = tl.full([block], -float("inf"), tl.float32)
    for start in range(0, size, block):
        x = tl.load(row + start + column, start + column < size, other=-float("inf"))
        highest = tl.maximum(highest, x.to(tl.float32))
    top = tl.max(highest, axis=0) / temperature
    which = tl.arange(0, blocks)
    sums = tl.zeros([blocks], tl.float64)
    for start in range(0, size, block):
        x = tl.load(row + start + column, start + column < size, other=-float("inf"))
        weights = tl.exp(x.to(tl.float32) / temperature - top)
        sums = tl.where(which == start // block, tl.sum(weights, axis=0).to(tl.float64), sums)
    edges = tl.cumsum(sums, axis=0)
    total = tl.max(edges, axis=0)
    step = tl.load(steps + slot)
    target = tl.load(uniform + slot * (length + 1) + step) * total
    # The first block whose cumulative weight exceeds the target. Rounding may leave none: then the
    # last one with any weight. The same within the block.
    beyond = (edges > target) & (sums > 0)
    last = tl.max(tl.where(sums > 0, which, 0), axis=0)
    chosen = tl.minimum(tl.min(tl.where(beyond, which, blocks), axis=0), last)
    before = tl.sum(tl.where(which == chosen, edges - sums, 0.0), axis=0)
    here = chosen * block + column
    x = tl.load(row + here, here < size, other=-float("inf")).to(tl.float32) / temperature
    weights = tl.exp(x - top)
    beyond = (tl.cumsum(weights.to(tl.float64), axis=0) > target - before) & (weights > 0)
    last = tl.max(tl.where(weights > 0, column, 0), axis=0)
    inner = tl.minimum(tl.min(tl.where(beyond, column, block), axis=0), last)
    token = (chosen * block + inner).to(tl.int64)
    logit = tl.max(tl.where(column == inner, x, -float("inf")), axis=0)
    logprob = (logit - top).to(tl.float64) - tl.log(total)

    # The bookkeeping of `continuous.sample`: slots at rest write to the dummy column.
    alive = tl.load(running + slot) != 0
    offset = slot * (length + 1) + tl.where(alive, step, length)
    tl.store(out_tokens + offset, token)
    tl.store(out_logprobs + offset, logprob.to(tl.float32))
    drawn = alive.to(tl.int64)
    step += drawn
    end = tl.arange(0, ends_block)
    ending = tl.load(ends + end, end < num_ends, other=-1) == token
    alive = alive & (step < length) & (tl.max(ending.to(tl.int32), axis=0) == 0)
    tl.store(tokens + slot, token)
    tl.store(steps + slot, step)
    tl.store(running + slot, alive)
    position = tl.load(positions + slot)
    if holds:
        tl.store(positions + slot, position + drawn)
    else:
        tl.store(positions + slot, tl.where(alive, position + 1, 0))


def sample(
    logits: Tensor,  # [S, V]
    uniform: Tensor,  # [S, R + 1], as are the outputs
    tokens: Tensor,  # [S], as are positions, steps and running
    positions: Tensor,
    steps: Tensor,
    running: Tensor,
    out_tokens: Tensor,
    out_logprobs: Tensor,
    ends: Tensor,
    temperature: float,
    holds: bool,
) -> None:
    slots, size = logits.shape
    block = min(TILE, triton.next_power_of_2(size))
    _sample[(slots,)](
        logits.contiguous(),
        uniform,
        tokens,
        positions,
        steps,
        running,
        out_tokens,
        out_logprobs,
        ends,
        temperature,
        uniform.shape[1] - 1,
        len(ends),
        size,
        block,
        triton.next_power_of_2(triton.cdiv(size, block)),
        triton.next_power_of_2(max(1, len(ends))),
        holds,
        num_warps=8,
    )


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
