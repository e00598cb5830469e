"""Triton kernels for `kernels.py` and `continuous.sample`, where each has its plain twin.

They round to the model's type wherever transformers does, so that sampling and training agree.
"""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf.rollout.state import DecodeState, Prefixes


@triton.jit
def _add_norm(
    residual, delta, weight, out, eps, size: tl.constexpr, block: tl.constexpr, adds: tl.constexpr
):
    # One program per token: it adds `delta` to the residual and normalises the sum.
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, block)
    inside = column < size
    stored = tl.load(residual + row + column, inside, other=0.0)
    if adds:
        stored = (stored + tl.load(delta + row + column, inside, other=0.0)).to(stored.dtype)
        tl.store(residual + row + column, stored, inside)
    x = stored.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    x = x.to(stored.dtype).to(tl.float32)  # as transformers rounds
    x *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, x.to(out.dtype.element_ty), inside)


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    rows, size = residual.shape
    out = torch.empty(rows, size, dtype=dtype, device=residual.device)
    block = triton.next_power_of_2(size)
    other = residual if delta is None else delta
    _add_norm[(rows,)](
        residual, other, weight, out, eps, size, block, delta is not None, num_warps=_warps(block)
    )
    return out


@triton.jit
def _swiglu(gate_up, out, size: tl.constexpr, block: tl.constexpr):
    # One program per token and block of columns; gates lie before the ups in each row.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, inside, other=0.0)
    x = gate.to(tl.float32)
    x = (x / (1 + tl.exp(-x))).to(gate.dtype)
    x = x.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * size + column, x.to(gate.dtype), inside)


def swiglu(gate_up: Tensor) -> Tensor:
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _swiglu[(rows, triton.cdiv(size, block))](gate_up, out, size, block, num_warps=4)
    return out


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
def _attend(
    query,  # with the new keys and values behind them where they are rotated here
    keys,
    values,
    positions,
    prefix_slots,
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
    borrows: tl.constexpr,  # whether slots read their prefix where another holds it
    rotates: tl.constexpr,  # whether queries and new keys are still to be rotated, keys stored
    normed: tl.constexpr,
    precision: tl.constexpr,
    early: tl.constexpr,  # see `early_launch`
):
    # Flash decoding: one program per slot and key head, for all query heads that share it. It goes
    # over the keys in blocks with an online softmax, and reads each key once.
    if early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    last = tl.load(positions + slot)
    begin = 0
    if window > 0:
        begin = tl.maximum(last - window + 1, 0)
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, width)
    mine = query + slot * query_stride + (group * share + row) * width
    own = slot * slot_stride + group * head_stride
    highest = tl.full([rows, 1], -float("inf"), tl.float32)
    total = tl.zeros([rows, 1], tl.float32)
    mean = tl.zeros([rows, width], tl.float32)
    end = last + 1
    if rotates:
        cosines += last * width
        sines += last * width
        q = _rotated(mine, row < share, query_norm, cosines, sines, eps, width, normed)
        one = tl.zeros([1, 1], tl.int32)
        groups = tl.num_programs(1)
        head = query + slot * query_stride + (groups * share + group) * width + one
        new_key = _rotated(head, one == 0, key_norm, cosines, sines, eps, width, normed)
        new_value = tl.load(head + groups * width + column[None, :])
        tl.store(keys + own + last * width + column[None, :], new_key)
        tl.store(values + own + last * width + column[None, :], new_value)
        # The softmax begins with the new key, which is not read back from the cache.
        highest = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), axis=1, keep_dims=True)
        highest = highest * scale * 1.4426950408889634
        total += 1.0
        mean += new_value.to(tl.float32)
        end = last
    else:
        q = tl.load(mine + column[None, :], row < share, other=0.0)
    q = q.to(keys.dtype.element_ty)
    if borrows:
        prefix_end = tl.load(prefix_ends + slot)
        other = tl.load(prefix_slots + slot) * slot_stride + group * head_stride
    for start in range(begin // block * block, end, block):
        position = start + tl.arange(0, block)
        visible = (position < end) & (position >= begin)
        row_start = own + position * width
        if borrows:
            borrowed = (position > 0) & (position < prefix_end)
            row_start = tl.where(borrowed, other, own) + position * width
        at = row_start[:, None] + column[None, :]
        k = tl.load(keys + at, visible[:, None], other=0.0)
        v = tl.load(values + at, visible[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        if capped:
            tanh = 1 - 2 / (tl.exp(2 * scores / softcap) + 1)
            scores = softcap * tanh
        # In units of log2(e), as exp2 is what the hardware has.
        scores = tl.where(visible[None, :], scores * 1.4426950408889634, -float("inf"))
        # Sums so far are relative to the old maximum: rescale them to the new one.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1, keep_dims=True))
        weights = tl.exp2(scores - new_highest)
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, axis=1, keep_dims=True)
        mean = mean * rescale + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        highest = new_highest
    heads = tl.num_programs(1) * share
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
    scale: float,
    window: int | None,
    softcap: float | None,
    prefixes: Prefixes | None,
) -> Tensor:
    return _launch_attend(query, keys, values, positions, scale, window, softcap, prefixes)


def rotate_and_attend(
    qkv: Tensor,  # [S, H + 2 K, D]
    rotary: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    prefixes: Prefixes | None,
) -> Tensor:
    """`rotate_and_store` and `attend` after it, in one kernel."""
    return _launch_attend(
        qkv, keys, values, positions, scale, window, None, prefixes, rotary, norms
    )


def _launch_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    prefixes: Prefixes | None,
    rotary: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
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
        *(prefixes or (positions, positions)),
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
        prefixes is not None,
        rotary is not None,
        norms is not None,
        "ieee" if keys.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **early_launch(query),
    )
    return out


def _attend_tiles(programs: int, keys: Tensor) -> tuple[int, int, int]:
    """Keys per block, warps and pipeline stages: the fastest of those measured on an H200.

    Many small programs share a multiprocessor; few go over long blocks.
    """
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
    return block, warps, max(1, min(3, memory // (block * row)))


EARLY_ROWS = 128
"""With more rows there is nothing to gain from an early launch."""


def early_launch(x: Tensor) -> dict[str, bool]:
    """Options of a kernel over some rows that may be launched before the last has ended.

    It waits for the results of the last, but no longer for its own launch.
    """
    if len(x) <= EARLY_ROWS and _can_launch_early(x.device):
        return {"early": True, "launch_pdl": True}
    return {"early": False}


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    """NVIDIA's from Hopper on, where this version of Triton knows how."""
    nvidia = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return nvidia and hasattr(tl.extra.cuda, "gdc_wait")


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes for the tiles of a program, which leaves some to the compiler."""
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 1 << 16) - 8192


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
