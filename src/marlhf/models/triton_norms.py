"""Triton kernels of norms and their gradients, for `layer_kernels.py`.

As in `triton_layers.py`, which has the others: bound by memory, in float32, and repeatable.
"""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf.models.triton_layers import FEW_ROWS

TILE, WARPS = 1024, 1
"""Numbers that a program holds of each tensor at a time, in whole rows, and its warps at least."""


# Rows are seldom a power of two wide, as a tile must be. So the tile of a norm has two parts, `a`
# and `b`: the largest power of two that fits into a row, and the rest. 576 are 512 and 64.


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    total,
    out,
    eps,
    rows,
    size: tl.constexpr,
    main: tl.constexpr,
    rest: tl.constexpr,
    tall: tl.constexpr,
    adds: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)[:, None]
    column = tl.arange(0, main)[None, :]
    at = row * size + column
    inside = row < rows
    a = tl.load(x + at, inside, other=0.0)
    if adds:
        d = tl.load(delta + at, inside, other=0.0)
        a = (a.to(tl.float32) + d.to(tl.float32)).to(a.dtype)
        tl.store(total + at, a, inside)
    unit = a.to(tl.float32)
    squares = tl.sum(unit * unit, axis=1, keep_dims=True)
    if rest > 0:
        more = main + tl.arange(0, rest)[None, :]
        also = row * size + more
        inside_b = inside & (more < size)
        b = tl.load(x + also, inside_b, other=0.0)
        if adds:
            e = tl.load(delta + also, inside_b, other=0.0)
            b = (b.to(tl.float32) + e.to(tl.float32)).to(b.dtype)
            tl.store(total + also, b, inside_b)
        unit_b = b.to(tl.float32)
        squares += tl.sum(unit_b * unit_b, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / size + eps)
    # Rounded before the weight, as transformers does.
    unit = (unit * scale).to(a.dtype).to(tl.float32)
    unit *= tl.load(weight + column).to(tl.float32)
    tl.store(out + at, unit.to(out.dtype.element_ty), inside)
    if rest > 0:
        unit_b = (unit_b * scale).to(b.dtype).to(tl.float32)
        unit_b *= tl.load(weight + more, more < size, other=0.0).to(tl.float32)
        tl.store(out + also, unit_b.to(out.dtype.element_ty), inside_b)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    main, rest, tall, warps = _tile(size, rows)
    _add_norm[(triton.cdiv(rows, tall),)](
        x,
        x if delta is None else delta,
        weight,
        total,
        out,
        eps,
        rows,
        size,
        main,
        rest,
        tall,
        delta is not None,
        num_warps=warps,
    )
    return total, out


@triton.jit
def _norm_backward(
    grad,
    x,
    weight,
    residual_grad,
    grad_x,
    out,
    eps,
    rows,
    size: tl.constexpr,
    main: tl.constexpr,
    rest: tl.constexpr,
    tall: tl.constexpr,
    adds: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)[:, None]
    column = tl.arange(0, main)[None, :]
    at = row * size + column
    inside = row < rows
    a = tl.load(x + at, inside, other=0.0)
    dy = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    dy *= tl.load(weight + column).to(tl.float32)
    unit = a.to(tl.float32)
    squares = tl.sum(unit * unit, axis=1, keep_dims=True)
    along = tl.sum(dy * unit, axis=1, keep_dims=True)
    if rest > 0:
        more = main + tl.arange(0, rest)[None, :]
        also = row * size + more
        inside_b = inside & (more < size)
        b = tl.load(x + also, inside_b, other=0.0)
        dy_b = tl.load(grad + also, inside_b, other=0.0).to(tl.float32)
        dy_b *= tl.load(weight + more, more < size, other=0.0).to(tl.float32)
        unit_b = b.to(tl.float32)
        squares += tl.sum(unit_b * unit_b, axis=1, keep_dims=True)
        along += tl.sum(dy_b * unit_b, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / size + eps)
    along *= scale / size
    unit *= scale
    dx = (dy - unit * along) * scale
    if adds:
        dx += tl.load(residual_grad + at, inside, other=0.0).to(tl.float32)
    tl.store(grad_x + at, dx.to(a.dtype), inside)
    tl.store(out + at, unit.to(a.dtype), inside)
    if rest > 0:
        unit_b *= scale
        dx_b = (dy_b - unit_b * along) * scale
        if adds:
            dx_b += tl.load(residual_grad + also, inside_b, other=0.0).to(tl.float32)
        tl.store(grad_x + also, dx_b.to(b.dtype), inside_b)
        tl.store(out + also, unit_b.to(b.dtype), inside_b)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    main, rest, tall, warps = _tile(size, rows)
    grad_x, unit = torch.empty_like(x), torch.empty_like(x)
    _norm_backward[(triton.cdiv(rows, tall),)](
        grad,
        x,
        weight,
        x if residual_grad is None else residual_grad,
        grad_x,
        unit,
        eps,
        rows,
        size,
        main,
        rest,
        tall,
        residual_grad is not None,
        num_warps=warps,
    )
    return grad_x, unit


@triton.jit
def _normed_weight_grads(
    outer,
    weight,
    norm_weight,
    sums,
    rows,
    size,
    tall: tl.constexpr,
    block: tl.constexpr,
):
    # A program per tile: it scales the columns in place, and leaves its part of their sums.
    row = tl.program_id(0) * tall + tl.arange(0, tall)[:, None]
    column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < size)
    at = row.to(tl.int64) * size + column
    x = tl.load(outer + at, inside, other=0.0)
    part = tl.sum(x * tl.load(weight + at, inside, other=0.0).to(tl.float32), axis=0)
    column_sum = sums + tl.program_id(0) * size + column
    tl.store(column_sum, part[None, :], column < size)
    scale = tl.load(norm_weight + column, column < size, other=0.0).to(tl.float32)
    tl.store(outer + at, x * scale, inside)


def normed_weight_grads(
    outer: Tensor, weight: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    rows, size = outer.shape
    tall, block = 32, 64
    parts = triton.cdiv(rows, tall)
    sums = torch.empty(parts, size, dtype=outer.dtype, device=outer.device)
    _normed_weight_grads[(parts, triton.cdiv(size, block))](
        outer, weight, norm_weight, sums, rows, size, tall, block, num_warps=4
    )
    return sums.sum(dim=0).to(norm_weight.dtype), outer


def _tile(size: int, rows: int) -> tuple[int, int, int, int]:
    """Columns of both parts of a norm's tile, its rows, and warps."""
    main = 1 << (size.bit_length() - 1)
    rest = triton.next_power_of_2(size - main) if size > main else 0
    if rows <= FEW_ROWS:
        return main, rest, 1, min(8, max(1, triton.next_power_of_2(size) // 256))
    return main, rest, max(1, TILE // main), min(16, max(WARPS, main // 512))
