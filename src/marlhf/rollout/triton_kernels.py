"""Triton kernels for `kernels.py` and `continuous.sample`, where each has its plain twin.

They round to the model's type wherever transformers does, so that sampling and training agree.
"""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from marlhf.rollout.state import DecodeState


@triton.jit
def _rotate_and_store(
    qkv,
    cosines,
    sines,
    positions,
    slots,
    keys,
    values,
    query_norm,
    key_norm,
    eps,
    slot_stride,
    head_stride,
    queries: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    normed: tl.constexpr,
):
    # One program per token, over all its heads: queries, then keys, then values. Rotation mixes
    # the two halves of a head, so they are loaded as `a` and `b`; values are only stored.
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    half: tl.constexpr = width // 2
    head = tl.arange(0, block)[:, None]
    column = tl.arange(0, half)[None, :]
    heads: tl.constexpr = queries + 2 * groups
    first = qkv + token * heads * width + head * width + column
    inside = (head < heads) & (column < half)
    stored = tl.load(first, inside, other=0.0)
    a = stored.to(tl.float32)
    b = tl.load(first + half, inside, other=0.0).to(tl.float32)
    rotated = inside & (head < queries + groups)
    x, y = a, b
    if normed:  # Qwen 3 normalises each head of queries and keys
        squares = tl.sum(a * a, axis=1, keep_dims=True) + tl.sum(b * b, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / width + eps)
        is_query = head < queries
        weight_a = tl.where(is_query, tl.load(query_norm + column), tl.load(key_norm + column))
        weight_b = tl.where(
            is_query, tl.load(query_norm + half + column), tl.load(key_norm + half + column)
        )
        x = (a * scale).to(stored.dtype).to(tl.float32) * weight_a.to(tl.float32)
        y = (b * scale).to(stored.dtype).to(tl.float32) * weight_b.to(tl.float32)
    cos = tl.load(cosines + position * width + column).to(tl.float32)
    sin = tl.load(sines + position * width + column).to(tl.float32)
    x, y = x * cos - y * sin, y * cos + x * sin
    x, y = x.to(stored.dtype), y.to(stored.dtype)
    tl.store(first, x, rotated)
    tl.store(first + half, y, rotated)
    offset = slot * slot_stride + position * width + column
    is_key = rotated & (head >= queries)
    key = keys + offset + (head - queries) * head_stride
    tl.store(key, x, is_key)
    tl.store(key + half, y, is_key)
    is_value = inside & (head >= queries + groups)
    value = values + offset + (head - queries - groups) * head_stride
    tl.store(value, a.to(stored.dtype), is_value)
    tl.store(value + half, b.to(stored.dtype), is_value)


def rotate_and_store(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    tokens, heads, width = qkv.shape
    groups = keys.shape[1]
    query_norm, key_norm, eps = norms or (qkv, qkv, 0.0)
    _rotate_and_store[(tokens,)](
        qkv,
        *rotary,
        positions,
        slots,
        keys,
        values,
        query_norm,
        key_norm,
        eps,
        keys.stride(0),
        keys.stride(1),
        heads - 2 * groups,
        groups,
        width,
        triton.next_power_of_2(heads),
        norms is not None,
        num_warps=_warps(triton.next_power_of_2(heads) * width // 2),
    )


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
    step += alive.to(tl.int64)
    end = tl.arange(0, ends_block)
    ending = tl.load(ends + end, end < num_ends, other=-1) == token
    alive = alive & (step < length) & (tl.max(ending.to(tl.int32), axis=0) == 0)
    tl.store(tokens + slot, token)
    tl.store(steps + slot, step)
    tl.store(running + slot, alive)
    position = tl.load(positions + slot)
    tl.store(positions + slot, tl.where(alive, position + 1, 0))


def sample(logits: Tensor, state: DecodeState, ends: Tensor, temperature: float) -> None:
    slots, size = logits.shape
    block = min(4096, triton.next_power_of_2(size))
    _sample[(slots,)](
        logits.contiguous(),
        state.uniform,
        state.tokens,
        state.positions,
        state.steps,
        state.running,
        state.out_tokens,
        state.out_logprobs,
        ends,
        temperature,
        state.length,
        len(ends),
        size,
        block,
        triton.next_power_of_2(triton.cdiv(size, block)),
        triton.next_power_of_2(max(1, len(ends))),
        num_warps=8,
    )


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 8)
