"""Attention of a decode step over slots of a cache: the Triton kernel for `attention.attend`."""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotated(head, inside, norm, cosines, sines, eps, width: tl.constexpr, normed: tl.constexpr):
    # Heads [rows, width] at the pointers `head`, [rows, 1], normalised where the model does, and
    # rotated. Each column is mixed with that of the other half, which is loaded along.
    column = tl.arange(0, width)[None, :]
    half: tl.constexpr = width // 2
    other = (column + half) % width
    stored = tl.load(head + column, inside, other=0.0)
    x = stored.to(tl.float32)
    y = tl.load(head + other, inside, other=0.0).to(tl.float32)
    if normed:
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
        x = (x * scale).to(stored.dtype).to(tl.float32) * tl.load(norm + column).to(tl.float32)
        y = (y * scale).to(stored.dtype).to(tl.float32) * tl.load(norm + other).to(tl.float32)
    sin = tl.load(sines + column).to(tl.float32)
    sin = tl.where(column < half, -sin, sin)
    return (x * tl.load(cosines + column).to(tl.float32) + y * sin).to(stored.dtype)


@triton.jit
def _begin(
    queries,  # pointers [rows, 1]
    new_keys,  # a pointer [1, 1], as are those to where it is stored
    inside,
    stored_keys,
    stored_values,
    cosines,
    sines,
    query_norm,
    key_norm,
    eps,
    scale,
    to_value,
    width: tl.constexpr,
    normed: tl.constexpr,
):
    # Queries and new keys, rotated. A key is stored with its value, which lies `to_value` behind
    # it, and the softmax begins with both.
    column = tl.arange(0, width)[None, :]
    q = _rotated(queries, inside, query_norm, cosines, sines, eps, width, normed)
    whole = tl.zeros([1, 1], tl.int32) == 0
    key = _rotated(new_keys, whole, key_norm, cosines, sines, eps, width, normed)
    value = tl.load(new_keys + to_value + column)
    tl.store(stored_keys + column, key)
    tl.store(stored_values + column, value)
    highest = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1, keep_dims=True)
    highest = highest * scale * 1.4426950408889634
    total = tl.full(highest.shape, 1.0, tl.float32)
    mean = tl.zeros(q.shape, tl.float32) + value.to(tl.float32)
    return q.to(stored_keys.dtype.element_ty), highest, total, mean


@triton.jit
def _attend(
    query,  # with the new keys and values behind them where they are rotated here
    keys,
    values,
    positions,
    cache_rows,
    cosines,
    sines,
    query_norm,
    key_norm,
    out,
    scale,
    softcap,
    eps,
    query_stride,
    slot_stride,
    head_stride,
    share: tl.constexpr,  # query heads per key head
    rows: tl.constexpr,  # `share`, rounded up to what a matrix product needs
    width: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,  # 0 for none
    capped: tl.constexpr,
    indexed: tl.constexpr,  # whether keys and values are in `cache_rows`, not the first rows
    rotates: tl.constexpr,  # whether queries and new keys are still to be rotated, keys stored
    normed: tl.constexpr,
    precision: tl.constexpr,
):
    # Flash decoding: one program per slot and key head, for all query heads that share it. It goes
    # over the keys in blocks with an online softmax, and reads each key once.
    slot = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    last = tl.load(positions + slot).to(tl.int32)
    first = 0
    if window > 0:
        first = tl.maximum(last - window + 1, 0)
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, width)
    one = tl.zeros([1, 1], tl.int32)
    mine = query + slot * query_stride + (group * share + row) * width
    own = slot
    if indexed:
        own = tl.load(cache_rows + slot)
    own = own * slot_stride + group * head_stride
    if rotates:
        end = last  # the softmax begins with the new key, which is not read from the cache
        q, highest, total, mean = _begin(
            mine,
            query + slot * query_stride + (groups * share + group) * width + one,
            row < share,
            keys + own + last * width,
            values + own + last * width,
            cosines + last * width,
            sines + last * width,
            query_norm,
            key_norm,
            eps,
            scale,
            groups * width,
            width,
            normed,
        )
    else:
        end = last + 1
        q = tl.load(mine + column[None, :], row < share, other=0.0).to(keys.dtype.element_ty)
        highest = tl.full([rows, 1], -float("inf"), tl.float32)
        total = tl.zeros([rows, 1], tl.float32)
        mean = tl.zeros([rows, width], tl.float32)
    for start in range(first // block * block, end, block):
        position = start + tl.arange(0, block)
        inside = (position < end) & (position >= first)
        at = own + position[:, None] * width + column[None, :]
        k = tl.load(keys + at, inside[:, None], other=0.0)
        v = tl.load(values + at, inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        if capped:
            tanh = 1 - 2 / (tl.exp(2 * scores / softcap) + 1)
            scores = softcap * tanh
        # In units of log2(e), as exp2 is what the hardware has.
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, -float("inf"))
        # Sums so far are relative to the old maximum: rescale them to the new one.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1, keep_dims=True))
        weights = tl.exp2(scores - new_highest)
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, axis=1, keep_dims=True)
        mean = mean * rescale + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        highest = new_highest
    heads = groups * share
    target = out + (slot * heads + group * share + row) * width + column[None, :]
    tl.store(target, (mean / total).to(out.dtype.element_ty), row < share)


def can_attend(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `_attend` can index these tensors: heads of 16 to 256, a power of two."""
    width = query.shape[-1]
    alike = keys.shape[-1] == values.shape[-1] == width and keys.stride() == values.stride()
    return 16 <= width <= 256 and width & (width - 1) == 0 and alike


def attend(
    query: Tensor,  # [S, H, D]
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    cache_rows: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """`attention.attend`. With `rotary`, queries and new keys are normalised (with `norms`) and
    rotated first, and new keys and values stored: `query` then has them behind it,
    [S, H + 2 K, D]. `LlamaDecoder` has the plain form of that."""
    slots, heads, width = query.shape
    groups = keys.shape[1]
    heads -= 0 if rotary is None else 2 * groups
    share = heads // groups
    out = torch.empty(slots, heads, width, dtype=keys.dtype, device=query.device)
    query_norm, key_norm, eps = norms or (query, query, 0.0)
    block, warps, stages = _attend_tiles(slots * groups, keys)
    _attend[(slots, groups)](
        query,
        keys,
        values,
        positions,
        positions if cache_rows is None else cache_rows,
        *(rotary or (query, query)),
        query_norm,
        key_norm,
        out,
        scale,
        softcap or 1.0,
        eps,
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        share,
        max(16, triton.next_power_of_2(share)),
        width,
        block,
        window or 0,
        softcap is not None,
        cache_rows is not None,
        rotary is not None,
        norms is not None,
        "ieee" if keys.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _attend_tiles(programs: int, keys: Tensor) -> tuple[int, int, int]:
    """Keys per block, warps and pipeline stages: the fastest of those measured on an H200.

    Many small programs share a multiprocessor; few go over long blocks. Where there are more than
    fit, each reads more at once.
    """
    most = 5 if programs >= 1536 else 3
    if programs >= 256:
        block, warps = 32, 1
    elif programs >= 96:
        block, warps = 64, 4
    else:
        block, warps = 128, 4
    row = 2 * keys.shape[-1] * keys.element_size()  # a key and its value
    memory = _shared_memory(keys.device)
    while block > 16 and 2 * block * row > memory:
        block //= 2
    return block, warps, max(1, min(most, memory // (block * row)))


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes for the tiles of a program, which leaves some to the compiler."""
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 1 << 16) - 8192
