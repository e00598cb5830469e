"""Attention of a decode step over slots of a cache: the Triton kernel for `kernels.attend`."""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf.rollout.state import Prefixes
from marlhf.rollout.triton_begin import ATTEND_ROWS, begin, early_launch, shared_memory
from marlhf.rollout.triton_shared import attend_shared, can_share


@triton.jit
def _attend(
    query,  # with the new keys and values behind them where they are rotated here
    keys,
    values,
    positions,
    cache_rows,
    prefix_rows,
    prefix_ends,
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
    borrows: tl.constexpr,  # whether slots read their prefix where another holds it
    rotates: tl.constexpr,  # whether queries and new keys are still to be rotated, keys stored
    normed: tl.constexpr,
    precision: tl.constexpr,
    triggers: tl.constexpr,  # see `early_launch`
    early: tl.constexpr,
):
    # Flash decoding: one program per slot and key head, for all query heads that share it. It goes
    # over the keys in blocks with an online softmax, and reads each key once.
    if not rotates:
        if early:
            tl.extra.cuda.gdc_wait()
        if triggers:
            tl.extra.cuda.gdc_launch_dependents()
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
    highest = tl.full([rows, 1], -float("inf"), tl.float32)
    total = tl.zeros([rows, 1], tl.float32)
    mean = tl.zeros([rows, width], tl.float32)
    if rotates:
        end = last  # the new key is not read from the cache
        q = tl.zeros([rows, width], keys.dtype.element_ty)
    else:
        end = last + 1
        q = tl.load(mine + column[None, :], row < share, other=0.0).to(keys.dtype.element_ty)
    if borrows:
        prefix_end = tl.load(prefix_ends + slot).to(tl.int32)
        other = tl.load(prefix_rows + slot) * slot_stride + group * head_stride
    first_block = first // block * block
    # Never without a round, in which queries are rotated.
    for start in range(first_block, tl.maximum(end, first_block + 1), block):
        position = start + tl.arange(0, block)
        inside = (position < end) & (position >= first)
        place = own
        if borrows:
            # Positions of a borrowed prefix are another slot's, but for 0.
            is_other = (position > 0) & (position < prefix_end)
            place = tl.where(is_other, other, own)[:, None]
        at = place + position[:, None] * width + column[None, :]
        k = tl.load(keys + at, inside[:, None], other=0.0)
        v = tl.load(values + at, inside[:, None], other=0.0)
        # Only here does anything depend on the kernel before: the first keys, which do not, are
        # on their way. (One condition for both would not be known when this is compiled.)
        if rotates:  # noqa: SIM102
            if start == first_block:
                if early:
                    tl.extra.cuda.gdc_wait()
                if triggers:
                    tl.extra.cuda.gdc_launch_dependents()
                q, highest, total, mean = begin(
                    mine,
                    query + slot * query_stride + (groups * share + group) * width + one,
                    row < share,
                    one == 0,
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
    prefixes: Prefixes | None,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """`kernels.attend`. With `rotary`, `kernels.rotate_and_store` before it in the same kernel:
    `query` then has the new keys and values behind it, [S, H + 2 K, D]."""
    slots, heads, width = query.shape
    groups = keys.shape[1]
    heads -= 0 if rotary is None else 2 * groups
    share = heads // groups
    out = torch.empty(slots, heads, width, dtype=keys.dtype, device=query.device)
    if prefixes is not None and can_share(query, keys, prefixes, window, softcap):
        attend_shared(
            query, keys, values, positions, cache_rows, prefixes, out, scale, rotary, norms
        )
        return out
    query_norm, key_norm, eps = norms or (query, query, 0.0)
    deep = rotary is not None and prefixes is None
    block, warps, stages = _attend_tiles(slots * groups, keys, deep=deep)
    _attend[(slots, groups)](
        query,
        keys,
        values,
        positions,
        positions if cache_rows is None else cache_rows,
        *((positions, positions) if prefixes is None else prefixes[:2]),
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
        prefixes is not None,
        rotary is not None,
        norms is not None,
        "ieee" if keys.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **early_launch(query, ATTEND_ROWS),
    )
    return out


def _attend_tiles(programs: int, keys: Tensor, *, deep: bool) -> tuple[int, int, int]:
    """Keys per block, warps and pipeline stages: the fastest of those measured on an H200.

    Many small programs share a multiprocessor; few go over long blocks. With `deep` they read more
    at once where more are launched early than fit: their keys come from memory. Those of a prefix
    that several slots read come from the L2 cache.
    """
    most = 5 if deep and programs >= 1536 else 3
    if programs >= 256:
        block, warps = 32, 1
    elif programs >= 96:
        block, warps = 64, 4
    else:
        block, warps = 128, 4
    row = 2 * keys.shape[-1] * keys.element_size()  # a key and its value
    memory = shared_memory(keys.device)
    while block > 16 and 2 * block * row > memory:
        block //= 2
    return block, warps, max(1, min(most, memory // (block * row)))
