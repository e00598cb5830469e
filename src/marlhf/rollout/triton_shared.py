"""Attention of a decode step whose slots share prefixes: the Triton kernel for `triton_attend`.

Neighbouring slots mostly hold samples of one prompt. One program attends for some of them at once,
so that it reads the keys and values of their prompt once, and its matrix products, of which a
single slot fills a fifth, are fuller.
"""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005 (Triton does not unpack tuples)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf.rollout.state import TOGETHER, Prefixes
from marlhf.rollout.triton_begin import ATTEND_ROWS, begin, early_launch, shared_memory


@triton.jit
def _choose(number, options, count: tl.constexpr):
    # options[number], for numbers below the count.
    chosen = options[0] + 0 * number
    for i in tl.static_range(1, count):
        chosen = tl.where(number == i, options[i], chosen)
    return chosen


@triton.jit
def _attend_shared(
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
    eps,
    query_stride,
    slot_stride,
    head_stride,
    samples: tl.constexpr,  # slots of one program
    share: tl.constexpr,  # query heads per key head
    rows: tl.constexpr,  # both multiplied, rounded up to what a matrix product needs
    width: tl.constexpr,
    block: tl.constexpr,
    indexed: tl.constexpr,
    rotates: tl.constexpr,
    normed: tl.constexpr,
    precision: tl.constexpr,
    triggers: tl.constexpr,
    early: tl.constexpr,
):
    # As `_attend`, over a list of keys that all of its slots look through, each for its own: first
    # the prefixes, every one once, then what is their own, the keys of all slots in turns.
    if not rotates:
        if early:
            tl.extra.cuda.gdc_wait()
        if triggers:
            tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64) * samples
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    # Of each slot. No vectors: those that are chosen from numbers, by indices, can be computed
    # where they are needed, while loaded ones would be exchanged between threads in each round.
    lasts = ()
    owns = ()
    reads = ()
    ends = ()
    for i in tl.static_range(samples):
        last = tl.load(positions + first + i).to(tl.int32)
        own = first + i
        if indexed:
            own = tl.load(cache_rows + first + i)
        end = tl.load(prefix_ends + first + i).to(tl.int32)
        lasts = lasts + (last,)
        owns = owns + (own.to(tl.int32),)
        reads = reads + (tl.load(prefix_rows + first + i).to(tl.int32),)
        ends = ends + (tl.where(last > 0, end, 0),)  # slots at rest read nothing
    # Of each prefix: where it begins in the list, and ends. Of equal ones only the first has any.
    starts = ()
    reaches = ()
    total = 0
    most = 1  # keys that are a slot's own
    for i in tl.static_range(samples):
        reach = ends[i]
        for j in tl.static_range(i + 1, samples):
            reach = tl.where(reads[j] == reads[i], tl.maximum(reach, ends[j]), reach)
        for j in tl.static_range(i):
            reach = tl.where(reads[j] == reads[i], 0, reach)
        starts = starts + (total,)
        reaches = reaches + (reach,)
        total += tl.cdiv(tl.maximum(reach - 1, 0), block) * block
        most = tl.maximum(most, lasts[i] - tl.maximum(ends[i], 1) + 2)
    row = tl.arange(0, rows)[:, None]
    row_sample = tl.minimum(row // share, samples - 1)
    slot = first + row_sample
    head = group * share + row % share
    inside_tile = row < samples * share
    key = tl.arange(0, block)
    sample = key % samples
    column = tl.arange(0, width)[None, :]
    mine = query + slot * query_stride + head * width
    highest = tl.full([rows, 1], -1e30, tl.float32)
    sums = tl.zeros([rows, block], tl.float32)  # added up at the end, when all threads meet
    mean = tl.zeros([rows, width], tl.float32)
    if rotates:
        q = tl.zeros([rows, width], keys.dtype.element_ty)
    else:
        q = tl.load(mine + column, inside_tile, other=0.0).to(keys.dtype.element_ty)
    # Never without a round, in which queries are rotated.
    for start in range(0, total + most * samples, block):
        begins, reach, read = starts[0], reaches[0], reads[0]
        for i in tl.static_range(1, samples):
            here = (start >= starts[i]) & (reaches[i] > 0)
            begins = tl.where(here, starts[i], begins)
            reach = tl.where(here, reaches[i], reach)
            read = tl.where(here, reads[i], read)
        in_prefix = start < total
        # Keys of their own: position 0, and what follows the prefix.
        skipped = tl.maximum(_choose(sample, ends, samples), 1) - 1
        number = (start - total + key) // samples
        position = tl.where(number > 0, skipped + number, 0)
        position = tl.where(in_prefix, start - begins + 1 + key, position)
        key_end = _choose(sample, lasts, samples)
        if not rotates:
            key_end += 1  # the new key is read from the cache
        inside = position < tl.where(in_prefix, reach, key_end)
        place = tl.where(in_prefix, read, _choose(sample, owns, samples))
        place = place.to(tl.int64) * slot_stride + group * head_stride
        at = (place + position * width)[:, None] + column
        k = tl.load(keys + at, inside[:, None], other=0.0)
        v = tl.load(values + at, inside[:, None], other=0.0)
        # As in `_attend`, only here does anything depend on the kernel before.
        if rotates:  # noqa: SIM102
            if start == 0:
                if early:
                    tl.extra.cuda.gdc_wait()
                if triggers:
                    tl.extra.cuda.gdc_launch_dependents()
                row_last = _choose(row_sample, lasts, samples)
                stored = _choose(row_sample, owns, samples).to(tl.int64) * slot_stride
                stored += group * head_stride + row_last * width
                q, highest, new_sum, mean = begin(
                    mine,
                    query + slot * query_stride + (groups * share + group) * width,
                    inside_tile,
                    inside_tile & (row % share == 0),
                    keys + stored,
                    values + stored,
                    cosines + row_last * width,
                    sines + row_last * width,
                    query_norm,
                    key_norm,
                    eps,
                    scale,
                    groups * width,
                    width,
                    normed,
                )
                sums = tl.where(key[None, :] == 0, new_sum, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        prefix = _choose(row_sample, reads, samples)
        prefix_end = _choose(row_sample, ends, samples)
        seen_prefix = (prefix == read) & (position[None, :] < prefix_end)
        seen_own = row_sample == sample[None, :]
        seen = inside[None, :] & tl.where(in_prefix, seen_prefix, seen_own)
        scores = tl.where(seen, scores * (scale * 1.4426950408889634), -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1, keep_dims=True))
        weights = tl.exp2(scores - new_highest)
        rescale = tl.exp2(highest - new_highest)
        sums = sums * rescale + weights
        mean = mean * rescale + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        highest = new_highest
    sums = tl.sum(sums, axis=1, keep_dims=True)
    target = out + (slot * (groups * share) + head) * width + column
    tl.store(target, (mean / sums).to(out.dtype.element_ty), inside_tile)


MIN_PROGRAMS = 96
"""With fewer, each of which does more, multiprocessors would have nothing to do."""
BLOCK, WARPS, STAGES = 64, 4, 3


def can_share(
    query: Tensor, keys: Tensor, prefixes: Prefixes, window: int | None, softcap: float | None
) -> bool:
    """Whether slots are to be read together, and can be: with all keys, and scores as they are."""
    slots, groups = len(query), keys.shape[1]
    plain = window is None and softcap is None and slots % TOGETHER == 0
    return prefixes.together and plain and slots // TOGETHER * groups >= MIN_PROGRAMS


def attend_shared(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    cache_rows: Tensor | None,
    prefixes: Prefixes,
    out: Tensor,  # [S, H, D]
    scale: float,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    """`triton_attend.attend` into `out`, some slots together."""
    slots, heads, width = out.shape
    groups = keys.shape[1]
    share = heads // groups
    query_norm, key_norm, eps = norms or (query, query, 0.0)
    row = 2 * width * keys.element_size()  # a key and its value
    memory = shared_memory(keys.device)
    _attend_shared[(slots // TOGETHER, groups)](
        query,
        keys,
        values,
        positions,
        positions if cache_rows is None else cache_rows,
        prefixes.rows,
        prefixes.ends,
        *(rotary or (query, query)),
        query_norm,
        key_norm,
        out,
        scale,
        eps,
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        TOGETHER,
        share,
        max(16, triton.next_power_of_2(TOGETHER * share)),
        width,
        BLOCK,
        cache_rows is not None,
        rotary is not None,
        norms is not None,
        "ieee" if keys.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        num_stages=max(1, min(STAGES, memory // (BLOCK * row))),
        **early_launch(query, ATTEND_ROWS),
    )
