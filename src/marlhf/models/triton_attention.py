"""Causal attention over short rows and its gradient, as Triton kernels for `layer_kernels.py`.

Queries, keys and values lie side by side as one projection gave them, and so do their gradients,
which are turned back on the way. The query heads that share a key head are rows of one tile, token
by token, and for each token head by head: tiles are full whatever the length of a row, and keys are
loaded once for all of them. Every sum has its fixed order.

Axes: B rows, L tokens of a row, H query heads, K key-value heads, D head size.
"""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TO_LOG2 = tl.constexpr(1.4426950408889634)
"""Exponentials are powers of two here, which is what the hardware has."""


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles: the fastest of those measured on an H200, heads of 64."""

    queries: int  # rows, each a token's query of one head
    keys: int
    warps: int
    stages: int


FORWARD = Tiles(64, 32, 4, 3)
TO_QUERIES = Tiles(64, 64, 4, 2)
TO_KEYS = Tiles(32, 64, 4, 3)


@triton.jit
def _rows_of(first, group, length, share: tl.constexpr, rows: tl.constexpr):
    # The token and head of each row of a tile; rows too few for another token are left over.
    row = tl.arange(0, rows)
    token = first + row // share
    inside = (row < rows // share * share) & (token < length)
    return row, token, group * share + row % share, inside


@triton.jit
def _turn(
    x,
    cosines,
    sines,
    tokens,
    inside,
    rows: tl.constexpr,
    width: tl.constexpr,
    back: tl.constexpr,
):
    half: tl.constexpr = width // 2
    at = tokens[:, None] * width + tl.arange(0, half)[None, :]
    cos = tl.load(cosines + at, inside[:, None], other=0.0).to(tl.float32)
    sin = tl.load(sines + at, inside[:, None], other=0.0).to(tl.float32)
    if back:
        sin = -sin
    a, b = tl.split(tl.permute(tl.reshape(x, [rows, 2, half]), (0, 2, 1)))
    a, b = a * cos - b * sin, b * cos + a * sin
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [rows, width])


@triton.jit
def _attend_to(
    q,
    k,
    v,
    scale,
    highest,
    total,
    mean,
    visible,
    masked: tl.constexpr,
    precision: tl.constexpr,
):
    # Queries over one more block of keys, with an online softmax.
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    if masked:
        scores = tl.where(visible, scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * (scale * TO_LOG2))
    weights = tl.exp2(scores * (scale * TO_LOG2) - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    total = total * rescale + tl.sum(weights, axis=1)
    mean *= rescale[:, None]
    mean = tl.dot(weights.to(v.dtype), v, mean, input_precision=precision)
    return new_highest, total, mean


@triton.jit
def _attention(
    qkv,
    out,
    lse,
    cosines,
    sines,
    scale,
    length,
    queries: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    turns: tl.constexpr,  # whether queries are still to be rotated
    keep: tl.constexpr,  # whether they are left so
    precision: tl.constexpr,
):
    # One program per block of tokens, group and row; those with the most keys before them first.
    share: tl.constexpr = queries // groups
    tokens: tl.constexpr = rows // share
    stride: tl.constexpr = (queries + 2 * groups) * width  # of a token
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens
    group = tl.program_id(1)
    text = tl.program_id(2).to(tl.int64)
    row, token, head, inside = _rows_of(first, group, length, share, rows)
    column = tl.arange(0, width)[None, :]
    inner = tl.arange(0, block)
    qkv += text * length * stride
    key_at = qkv + (queries + group) * width
    value_at = key_at + groups * width
    mine = (token * stride + head * width)[:, None] + column
    q = tl.load(qkv + mine, inside[:, None], other=0.0)
    if turns:
        turned = _turn(q.to(tl.float32), cosines, sines, token, inside, rows, width, False)
        q = turned.to(q.dtype)
        if keep:
            tl.store(qkv + mine, q, inside[:, None])
    highest = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mean = tl.zeros([rows, width], tl.float32)
    before = (first + 1) // block * block  # keys that all tokens see
    for start in range(0, before, block):
        other = (start + inner)[:, None] * stride + column
        k, v = tl.load(key_at + other), tl.load(value_at + other)
        highest, total, mean = _attend_to(
            q, k, v, scale, highest, total, mean, inner[None, :] >= 0, False, precision
        )
    for start in range(before, tl.minimum(first + tokens, length), block):
        key = start + inner
        other = key[:, None] * stride + column
        k = tl.load(key_at + other, (key < length)[:, None], other=0.0)
        v = tl.load(value_at + other, (key < length)[:, None], other=0.0)
        visible = key[None, :] <= token[:, None]
        highest, total, mean = _attend_to(
            q, k, v, scale, highest, total, mean, visible, True, precision
        )
    mean /= total[:, None]
    out += text * length * (queries * width)
    target = (token * (queries * width) + head * width)[:, None] + column
    tl.store(out + target, mean.to(q.dtype), inside[:, None])
    lse += (text * groups + group) * length * share + first * share
    tl.store(lse + row, (highest + tl.log2(total)) / TO_LOG2, inside)


def attention(
    qkv: Tensor,
    queries: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    texts, length, heads, width = qkv.shape
    groups = (heads - queries) // 2
    share = queries // groups
    out = qkv.new_empty(texts, length, queries, width)
    lse = qkv.new_empty(texts, groups, length, share, dtype=torch.float32)
    rows, keys, warps, stages = _tiles(FORWARD, share)
    _attention[(triton.cdiv(length, rows // share), groups, texts)](
        qkv,
        out,
        lse,
        *(rotary or (lse, lse)),
        scale,
        length,
        queries,
        groups,
        width,
        rows,
        keys,
        rotary is not None,
        keep,
        _precision(qkv),
        num_warps=warps,
        num_stages=stages,
    )
    return out, lse


@triton.jit
def _to_query(
    k, v, q, g, high, delta, scale, grad_q, visible, masked: tl.constexpr, precision: tl.constexpr
):
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * (scale * TO_LOG2)
    weights = tl.exp2(scores - high[:, None])
    if masked:
        weights = tl.where(visible, weights, 0.0)
    grad_weights = tl.dot(g, tl.trans(v), input_precision=precision)
    grad_scores = weights * (grad_weights - delta[:, None])
    return tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=precision)


@triton.jit
def _to_key(
    k,
    v,
    q,
    g,
    high,
    delta,
    scale,
    grad_k,
    grad_v,
    visible,
    masked: tl.constexpr,
    precision: tl.constexpr,
):
    # What queries q with gradients g add to the gradients of keys and values. A query beyond the
    # last token is 0 with a gradient of 0, and adds nothing.
    scores = tl.dot(k, tl.trans(q), input_precision=precision) * (scale * TO_LOG2)
    weights = tl.exp2(scores - high[None, :])
    if masked:
        weights = tl.where(visible, weights, 0.0)
    grad_v = tl.dot(weights.to(g.dtype), g, grad_v, input_precision=precision)
    grad_weights = tl.dot(v, tl.trans(g), input_precision=precision)
    grad_scores = weights * (grad_weights - delta[None, :])
    grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=precision)
    return grad_k, grad_v


@triton.jit
def _query_grads(
    qkv,
    out,
    grad,
    lse,
    deltas,
    cosines,
    sines,
    grad_qkv,
    scale,
    length,
    queries: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    # As `_attention`. It also leaves the products of outputs and their gradients to `_key_grads`.
    share: tl.constexpr = queries // groups
    tokens: tl.constexpr = rows // share
    stride: tl.constexpr = (queries + 2 * groups) * width
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens
    group = tl.program_id(1)
    text = tl.program_id(2).to(tl.int64)
    row, token, head, inside = _rows_of(first, group, length, share, rows)
    column = tl.arange(0, width)[None, :]
    inner = tl.arange(0, block)
    qkv += text * length * stride
    key_at = qkv + (queries + group) * width
    value_at = key_at + groups * width
    mine = (token * stride + head * width)[:, None] + column
    source = (token * (queries * width) + head * width)[:, None] + column
    source += text * length * (queries * width)
    q = tl.load(qkv + mine, inside[:, None], other=0.0)
    g = tl.load(grad + source, inside[:, None], other=0.0)
    o = tl.load(out + source, inside[:, None], other=0.0)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    sums = (text * groups + group) * length * share + first * share
    tl.store(deltas + sums + row, delta, inside)
    high = tl.load(lse + sums + row, inside, other=0.0) * TO_LOG2
    grad_q = tl.zeros([rows, width], tl.float32)
    before = (first + 1) // block * block
    for start in range(0, before, block):
        other = (start + inner)[:, None] * stride + column
        k, v = tl.load(key_at + other), tl.load(value_at + other)
        grad_q = _to_query(
            k, v, q, g, high, delta, scale, grad_q, inner[None, :] >= 0, False, precision
        )
    for start in range(before, tl.minimum(first + tokens, length), block):
        key = start + inner
        other = key[:, None] * stride + column
        k = tl.load(key_at + other, (key < length)[:, None], other=0.0)
        v = tl.load(value_at + other, (key < length)[:, None], other=0.0)
        visible = key[None, :] <= token[:, None]
        grad_q = _to_query(k, v, q, g, high, delta, scale, grad_q, visible, True, precision)
    grad_q = _turn(grad_q * scale, cosines, sines, token, inside, rows, width, True)
    grad_qkv += text * length * stride
    tl.store(grad_qkv + mine, grad_q.to(q.dtype), inside[:, None])


@triton.jit
def _load_queries(
    queries,
    grad,
    lse,
    deltas,
    row,
    end,
    column,
    share: tl.constexpr,
    width: tl.constexpr,
    stride: tl.constexpr,
    grad_stride: tl.constexpr,
):
    # Rows of queries and their gradients, with what belongs to each.
    inside = row < end
    token, head = row // share, row % share
    q_at = queries + (token * stride + head * width)[:, None] + column
    q = tl.load(q_at, inside[:, None], other=0.0)
    g_at = grad + (token * grad_stride + head * width)[:, None] + column
    g = tl.load(g_at, inside[:, None], other=0.0)
    high = tl.load(lse + row, inside, other=0.0) * TO_LOG2
    delta = tl.load(deltas + row, inside, other=0.0)
    return token, q, g, high, delta


@triton.jit
def _key_grads(
    qkv,
    grad,
    lse,
    deltas,
    cosines,
    sines,
    grad_qkv,
    scale,
    length,
    queries: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    # One program per block of keys, group and row: over the queries that see them, those of all
    # heads in turn, in blocks of rows. The first block of keys has the most.
    share: tl.constexpr = queries // groups
    stride: tl.constexpr = (queries + 2 * groups) * width
    grad_stride: tl.constexpr = queries * width
    first = tl.program_id(0) * block
    group = tl.program_id(1)
    text = tl.program_id(2).to(tl.int64)
    key = first + tl.arange(0, block)
    seen = key < length
    column = tl.arange(0, width)[None, :]
    inner = tl.arange(0, rows)
    qkv += text * length * stride
    grad_qkv += text * length * stride
    grad += text * length * grad_stride + group * share * width
    query_at = qkv + group * share * width
    sums = (text * groups + group) * length * share
    lse += sums
    deltas += sums
    tile = (queries + group) * width + key[:, None] * stride + column
    k = tl.load(qkv + tile, seen[:, None], other=0.0)
    v = tl.load(qkv + groups * width + tile, seen[:, None], other=0.0)
    grad_k = tl.zeros([block, width], tl.float32)
    grad_v = tl.zeros([block, width], tl.float32)
    end = length * share
    after = tl.minimum(first * share + tl.cdiv(block * share, rows) * rows, end)
    for start in range(first * share, after, rows):
        row = start + inner
        token, q, g, high, delta = _load_queries(
            query_at, grad, lse, deltas, row, end, column, share, width, stride, grad_stride
        )
        visible = key[:, None] <= token[None, :]
        grad_k, grad_v = _to_key(
            k, v, q, g, high, delta, scale, grad_k, grad_v, visible, True, precision
        )
    for start in range(after, end, rows):
        row = start + inner
        token, q, g, high, delta = _load_queries(
            query_at, grad, lse, deltas, row, end, column, share, width, stride, grad_stride
        )
        grad_k, grad_v = _to_key(
            k, v, q, g, high, delta, scale, grad_k, grad_v, inner[None, :] >= 0, False, precision
        )
    grad_k = _turn(grad_k * scale, cosines, sines, key, seen, block, width, True)
    tl.store(grad_qkv + tile, grad_k.to(k.dtype), seen[:, None])
    tl.store(grad_qkv + groups * width + tile, grad_v.to(k.dtype), seen[:, None])


def attention_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    rotary: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    texts, length, heads, width = qkv.shape
    queries = out.shape[2]
    groups = (heads - queries) // 2
    share = queries // groups
    grad = grad.contiguous()
    deltas, grad_qkv = torch.empty_like(lse), torch.empty_like(qkv)
    rows, keys, warps, stages = _tiles(TO_QUERIES, share)
    shape = (scale, length, queries, groups, width)
    _query_grads[(triton.cdiv(length, rows // share), groups, texts)](
        qkv,
        out,
        grad,
        lse,
        deltas,
        *rotary,
        grad_qkv,
        *shape,
        rows,
        keys,
        _precision(qkv),
        num_warps=warps,
        num_stages=stages,
    )
    rows, keys, warps, stages = TO_KEYS
    _key_grads[(triton.cdiv(length, keys), groups, texts)](
        qkv,
        grad,
        lse,
        deltas,
        *rotary,
        grad_qkv,
        *shape,
        rows,
        keys,
        _precision(qkv),
        num_warps=warps,
        num_stages=stages,
    )
    return grad_qkv


def _tiles(tiles: Tiles, share: int) -> Tiles:
    """With room for all heads of a token."""
    return tiles._replace(queries=max(tiles.queries, triton.next_power_of_2(share)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
