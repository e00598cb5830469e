"""Triton kernels for `layer_kernels.py`, where each has its plain twin; norms are apart.

Everything here is bound by memory: a kernel reads what it needs once, in tiles of several rows, and
computes in float32. Results round to the tensors' own type wherever transformers does. No program
adds to what another has written, so results repeat.
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
"""Numbers that a program holds of each tensor at a time."""
FEW_ROWS = 1024
"""Up to so many, as in decode steps, programs are small and have more warps: a kernel takes as long
as one of them does."""


@triton.jit
def _swiglu(gate_up, out, rows, size: tl.constexpr, block: tl.constexpr, tall: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)[:, None]
    column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < size)
    at = gate_up + row * 2 * size + column
    gate = tl.load(at, inside, other=0.0)
    up = tl.load(at + size, inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    silu = (x / (1 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, (silu * up).to(gate.dtype), inside)


def swiglu(gate_up: Tensor) -> Tensor:
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block, tall = _patch(size, rows)
    _swiglu[(triton.cdiv(rows, tall), triton.cdiv(size, block))](
        gate_up, out, rows, size, block, tall, num_warps=4
    )
    return out


@triton.jit
def _swiglu_backward(
    grad, gate_up, grad_gate_up, rows, size: tl.constexpr, block: tl.constexpr, tall: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)[:, None]
    column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < size)
    at, place = row * size + column, row * 2 * size + column
    gate = tl.load(gate_up + place, inside, other=0.0)
    up = tl.load(gate_up + place + size, inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-x))
    silu = x * sigmoid
    slope = sigmoid * (1 + x - silu)
    tl.store(grad_gate_up + place, (dy * up * slope).to(gate.dtype), inside)
    tl.store(grad_gate_up + place + size, (dy * silu).to(gate.dtype), inside)
    product = silu.to(gate.dtype).to(tl.float32) * up
    tl.store(grad + at, product.to(gate.dtype), inside)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = grad.shape
    out = torch.empty_like(gate_up)
    block, tall = _patch(size, rows)
    _swiglu_backward[(triton.cdiv(rows, tall), triton.cdiv(size, block))](
        grad, gate_up, out, rows, size, block, tall, num_warps=4
    )
    return out, grad


@triton.jit
def _rotate(
    qkv,
    cosines,
    sines,
    positions,
    rows,
    first_head: tl.constexpr,
    rotated: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    tall: tl.constexpr,
):
    # A row is a rotated head of a token; rotation mixes the two halves of a head.
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)[:, None]
    column = tl.arange(0, half)[None, :]
    inside = (row < rows) & (column < width // 2)
    token, head = row // rotated, first_head + row % rotated
    first = qkv + (token * heads + head) * width + column
    stored = tl.load(first, inside, other=0.0)
    a = stored.to(tl.float32)
    b = tl.load(first + width // 2, inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + token, row < rows, other=0) * width + column
    cos = tl.load(cosines + angle, inside, other=0.0).to(tl.float32)
    sin = tl.load(sines + angle, inside, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(stored.dtype), inside)
    tl.store(first + width // 2, (b * cos + a * sin).to(stored.dtype), inside)


def rotate(qkv: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor, which: range) -> None:
    tokens, heads, width = qkv.shape
    rows, half = tokens * len(which), triton.next_power_of_2(width // 2)
    tall = max(1, TILE // 2 // half)
    _rotate[(triton.cdiv(rows, tall),)](
        qkv,
        *rotary,
        positions,
        rows,
        which.start,
        len(which),
        heads,
        width,
        half,
        tall,
        num_warps=4,
    )


@triton.jit
def _rotate_backward(
    query,
    key,
    value,
    out,
    cosines,
    sines,
    positions,
    rows,
    length,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    queries: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    tall: tl.constexpr,
):
    # A row is a head of a token: the gradients of queries, keys and values come each in its own
    # layout, and are turned back and laid side by side.
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)[:, None]
    column = tl.arange(0, half)[None, :]
    inside = (row < rows) & (column < width // 2)
    heads: tl.constexpr = queries + 2 * groups
    token, head = row // heads, row % heads
    text, place = token // length, token % length
    is_query = inside & (head < queries)
    is_key = inside & (head >= queries) & (head < queries + groups)
    is_value = inside & (head >= queries + groups)
    at = query + text * query_row + head * query_head + place * query_token + column
    a = tl.load(at, is_query, other=0.0).to(tl.float32)
    b = tl.load(at + width // 2, is_query, other=0.0).to(tl.float32)
    at = key + text * key_row + (head - queries) * key_head + place * key_token + column
    a += tl.load(at, is_key, other=0.0).to(tl.float32)
    b += tl.load(at + width // 2, is_key, other=0.0).to(tl.float32)
    angle = tl.load(positions + token, row < rows, other=0) * width + column
    cos = tl.load(cosines + angle, is_query | is_key, other=0.0).to(tl.float32)
    sin = tl.load(sines + angle, is_query | is_key, other=0.0).to(tl.float32)
    x, y = a * cos + b * sin, b * cos - a * sin
    group = head - queries - groups
    at = value + text * value_row + group * value_head + place * value_token + column
    x += tl.load(at, is_value, other=0.0).to(tl.float32)
    y += tl.load(at + width // 2, is_value, other=0.0).to(tl.float32)
    target = out + row * width + column
    tl.store(target, x.to(out.dtype.element_ty), inside)
    tl.store(target + width // 2, y.to(out.dtype.element_ty), inside)


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor], rotary: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in grads)
    texts, queries, length, width = query.shape
    groups, tokens = key.shape[1], texts * length
    heads = queries + 2 * groups
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    half = triton.next_power_of_2(width // 2)
    tall = max(1, TILE // 2 // half)
    _rotate_backward[(triton.cdiv(tokens * heads, tall),)](
        query,
        key,
        value,
        out,
        *rotary,
        positions,
        tokens * heads,
        length,
        *(stride for x in (query, key, value) for stride in x.stride()[:3]),
        queries,
        groups,
        width,
        half,
        tall,
        num_warps=4,
    )
    return out


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


def _patch(size: int, rows: int) -> tuple[int, int]:
    """Columns and rows of a tile that need not hold whole rows: few columns beyond the last."""
    block = next((n for n in (1024, 512, 256) if size % n == 0), 256)
    block = min(block, triton.next_power_of_2(size))
    return block, 1 if rows <= FEW_ROWS else TILE // 2 // block
