"""Causal attention over short rows and its gradient, as Triton kernels for `layer_kernels.py`.

Queries, keys and values lie side by side as one projection gave them, and so do their gradients,
which are turned back on the way. For rows of a few hundred tokens and heads of 64 numbers this
takes two thirds of the time of cuDNN's kernels and a rotation. Every sum has its fixed order.

Axes: B rows, L tokens of a row, H query heads, K key-value heads, D head size.
"""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Tokens in a block of queries, and of keys."""
TO_LOG2 = tl.constexpr(1.4426950408889634)
"""Exponentials are powers of two here, which is what the hardware has."""


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
    scale,
    length,
    queries: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    # One program per block of queries, head and row; those with the most keys before them first.
    at = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    stride: tl.constexpr = (queries + 2 * groups) * width  # of a token
    share: tl.constexpr = queries // groups
    column = tl.arange(0, width)[None, :]
    inner = tl.arange(0, block)
    mine = at * block + inner
    inside = (mine < length)[:, None]
    on_diagonal = inner[:, None] >= inner[None, :]
    qkv += row * length * stride
    key_at = qkv + (queries + head // share) * width
    value_at = key_at + groups * width
    tile = mine[:, None] * stride + column
    q = tl.load(qkv + head * width + tile, inside, other=0.0)
    highest = tl.full([block], -float("inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    mean = tl.zeros([block, width], tl.float32)
    for start in range(0, at * block, block):
        other = (start + inner)[:, None] * stride + column
        k, v = tl.load(key_at + other), tl.load(value_at + other)
        highest, total, mean = _attend_to(
            q, k, v, scale, highest, total, mean, on_diagonal, False, precision
        )
    k = tl.load(key_at + tile, inside, other=0.0)
    v = tl.load(value_at + tile, inside, other=0.0)
    highest, total, mean = _attend_to(
        q, k, v, scale, highest, total, mean, on_diagonal, True, precision
    )
    out += row * length * queries * width + head * width
    mean /= total[:, None]
    tl.store(out + mine[:, None] * (queries * width) + column, mean.to(q.dtype), inside)
    lse += (row * queries + head) * length
    tl.store(lse + mine, (highest + tl.log2(total)) / TO_LOG2, mine < length)


def attention(qkv: Tensor, queries: int, scale: float) -> tuple[Tensor, Tensor]:
    rows, length, heads, width = qkv.shape
    out = qkv.new_empty(rows, length, queries, width)
    lse = qkv.new_empty(rows, queries, length, dtype=torch.float32)
    _attention[(triton.cdiv(length, BLOCK), queries, rows)](
        qkv,
        out,
        lse,
        scale,
        length,
        queries,
        (heads - queries) // 2,
        width,
        BLOCK,
        _precision(qkv),
        num_warps=4,
        num_stages=2,
    )
    return out, lse


@triton.jit
def _deltas(
    out, grad, deltas, length, heads: tl.constexpr, block: tl.constexpr, width: tl.constexpr
):
    # One program per token: the product of each head's output and its gradient.
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block)
    at = token * heads * width + head[:, None] * width + tl.arange(0, width)[None, :]
    inside = (head < heads)[:, None]
    x = tl.load(out + at, inside, other=0.0).to(tl.float32)
    x *= tl.load(grad + at, inside, other=0.0).to(tl.float32)
    target = deltas + (token // length * heads + head) * length + token % length
    tl.store(target, tl.sum(x, axis=1), head < heads)


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
    weights = tl.exp2(scores - high[None, :] * TO_LOG2)
    if masked:
        weights = tl.where(visible, weights, 0.0)
    grad_v = tl.dot(weights.to(g.dtype), g, grad_v, input_precision=precision)
    grad_weights = tl.dot(v, tl.trans(g), input_precision=precision)
    grad_scores = weights * (grad_weights - delta[None, :])
    grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=precision)
    return grad_k, grad_v


@triton.jit
def _to_query(
    k, v, q, g, high, delta, scale, grad_q, visible, masked: tl.constexpr, precision: tl.constexpr
):
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * (scale * TO_LOG2)
    weights = tl.exp2(scores - high[:, None] * TO_LOG2)
    if masked:
        weights = tl.where(visible, weights, 0.0)
    grad_weights = tl.dot(g, tl.trans(v), input_precision=precision)
    grad_scores = weights * (grad_weights - delta[:, None])
    return tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=precision)


@triton.jit
def _turn_back(x, cosines, sines, tokens, inside, block: tl.constexpr, width: tl.constexpr):
    half: tl.constexpr = width // 2
    at = tokens[:, None] * width + tl.arange(0, half)[None, :]
    cos = tl.load(cosines + at, inside, other=0.0).to(tl.float32)
    sin = tl.load(sines + at, inside, other=0.0).to(tl.float32)
    a, b = tl.split(tl.permute(tl.reshape(x, [block, 2, half]), (0, 2, 1)))
    a, b = a * cos + b * sin, b * cos - a * sin
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [block, width])


@triton.jit
def _attention_backward(
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
    block: tl.constexpr,
    precision: tl.constexpr,
):
    # One program per block of tokens, group and row: the gradients of its keys and values from the
    # queries after them, then those of its queries from the keys before them. That is as much work
    # for the first block as for the last.
    at = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    stride: tl.constexpr = (queries + 2 * groups) * width
    grad_stride: tl.constexpr = queries * width
    share: tl.constexpr = queries // groups
    column = tl.arange(0, width)[None, :]
    inner = tl.arange(0, block)
    mine = at * block + inner
    inside = (mine < length)[:, None]
    on_diagonal = inner[:, None] >= inner[None, :]
    tile = mine[:, None] * stride + column
    grad_tile = mine[:, None] * grad_stride + column
    qkv += row * length * stride
    grad_qkv += row * length * stride
    grad += row * length * grad_stride
    key_at = qkv + (queries + group) * width
    value_at = key_at + groups * width
    k = tl.load(key_at + tile, inside, other=0.0)
    v = tl.load(value_at + tile, inside, other=0.0)
    grad_k = tl.zeros([block, width], tl.float32)
    grad_v = tl.zeros([block, width], tl.float32)
    for i in range(share):
        head = group * share + i
        sums = (row * queries + head) * length
        q = tl.load(qkv + head * width + tile, inside, other=0.0)
        g = tl.load(grad + head * width + grad_tile, inside, other=0.0)
        high = tl.load(lse + sums + mine, mine < length, other=0.0)
        delta = tl.load(deltas + sums + mine, mine < length, other=0.0)
        visible = tl.trans(on_diagonal)
        grad_k, grad_v = _to_key(
            k, v, q, g, high, delta, scale, grad_k, grad_v, visible, True, precision
        )
        for start in range((at + 1) * block, length, block):
            other = start + inner
            seen = other < length
            q = tl.load(
                qkv + head * width + other[:, None] * stride + column, seen[:, None], other=0.0
            )
            g = tl.load(
                grad + head * width + other[:, None] * grad_stride + column,
                seen[:, None],
                other=0.0,
            )
            high = tl.load(lse + sums + other, seen, other=0.0)
            delta = tl.load(deltas + sums + other, seen, other=0.0)
            grad_k, grad_v = _to_key(
                k, v, q, g, high, delta, scale, grad_k, grad_v, visible, False, precision
            )
    grad_k = _turn_back(grad_k * scale, cosines, sines, mine, inside, block, width)
    grad_key_at = grad_qkv + (queries + group) * width
    tl.store(grad_key_at + tile, grad_k.to(k.dtype), inside)
    tl.store(grad_key_at + groups * width + tile, grad_v.to(k.dtype), inside)

    for i in range(share):
        head = group * share + i
        sums = (row * queries + head) * length
        q = tl.load(qkv + head * width + tile, inside, other=0.0)
        g = tl.load(grad + head * width + grad_tile, inside, other=0.0)
        high = tl.load(lse + sums + mine, mine < length, other=0.0)
        delta = tl.load(deltas + sums + mine, mine < length, other=0.0)
        grad_q = tl.zeros([block, width], tl.float32)
        grad_q = _to_query(k, v, q, g, high, delta, scale, grad_q, on_diagonal, True, precision)
        for start in range(0, at * block, block):
            other = (start + inner)[:, None] * stride + column
            before_k = tl.load(key_at + other)
            before_v = tl.load(value_at + other)
            grad_q = _to_query(
                before_k, before_v, q, g, high, delta, scale, grad_q, on_diagonal, False, precision
            )
        grad_q = _turn_back(grad_q * scale, cosines, sines, mine, inside, block, width)
        tl.store(grad_qkv + head * width + tile, grad_q.to(k.dtype), inside)


def attention_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    rotary: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    rows, length, heads, width = qkv.shape
    queries = out.shape[2]
    grad = grad.contiguous()
    deltas = torch.empty_like(lse)
    block = triton.next_power_of_2(queries)
    _deltas[(rows * length,)](out, grad, deltas, length, queries, block, width, num_warps=1)
    grad_qkv = torch.empty_like(qkv)
    groups = (heads - queries) // 2
    _attention_backward[(triton.cdiv(length, BLOCK), groups, rows)](
        qkv,
        grad,
        lse,
        deltas,
        *rotary,
        grad_qkv,
        scale,
        length,
        queries,
        groups,
        width,
        BLOCK,
        _precision(qkv),
        num_warps=4,
        num_stages=2,
    )
    return grad_qkv


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
