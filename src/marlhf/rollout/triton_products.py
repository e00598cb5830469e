"""Matrix products of a decode step with what is before and after them: Triton kernels for
`fused_step.py`."""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf.rollout.triton_begin import early_launch, shared_memory

PREFETCHES = tl.constexpr(4)
"""Pieces of the weights of a later product that a program prefetches."""


@triton.jit
def _prefetch(start, size):
    # Each program brings its share of some bytes into the L2 cache, and does not wait for it.
    lane = tl.arange(0, 128)  # one per thread
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    pieces = tl.num_programs(0) * tl.num_programs(1) * PREFETCHES
    piece = (size // pieces // 128 + 1) * 128
    begin = (program * PREFETCHES + lane) * piece
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [
            start.to(tl.int64) + begin,
            tl.where(lane < PREFETCHES, tl.minimum(piece, size - begin), 0),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _product(
    x,
    squares,
    weight,
    bias,
    out,
    norm,
    next_x,
    next_squares,
    later_weight,
    eps,
    rows,
    outputs,
    parts,
    later_bytes,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_size: tl.constexpr,
    block_parts: tl.constexpr,
    scaled: tl.constexpr,  # x is still to be divided by its root mean square
    gated: tl.constexpr,  # silu of the first `outputs` times the second
    biased: tl.constexpr,
    added: tl.constexpr,  # to the residual, of which the next norm is prepared
    precision: tl.constexpr,
    triggers: tl.constexpr,  # see `early_launch`
    early: tl.constexpr,
):
    # One program per block of rows and outputs.
    if early:
        if later_bytes > 0:
            _prefetch(later_weight, later_bytes)
        tl.extra.cuda.gdc_wait()
    if triggers:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    inner = tl.arange(0, block_size)
    # Beyond the last row and column others are computed again, and not stored.
    x_at = x + (row % rows)[:, None] * size + inner[None, :]
    weight_at = weight + (column % outputs)[:, None] * size + inner[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    at = row[:, None] * outputs + column[None, :]
    # What the end needs is on its way while the product is computed.
    if scaled:
        part = tl.arange(0, block_parts)[None, :]
        sums_at = squares + (row % rows)[:, None] * parts + part
        square_parts = tl.load(sums_at, part < parts, other=0.0)
    if added:
        stored = tl.load(out + at, inside, other=0.0)
        norm_weight = tl.load(norm + column % outputs)[None, :].to(tl.float32)
    sums = tl.zeros([block_rows, block_outputs], tl.float32)
    up_sums = tl.zeros([block_rows, block_outputs], tl.float32)
    for start in range(0, size, block_size):
        a = tl.load(x_at + start)
        b = tl.trans(tl.load(weight_at + start))
        sums = tl.dot(a, b, sums, input_precision=precision)
        if gated:
            b = tl.trans(tl.load(weight_at + outputs * size + start))
            up_sums = tl.dot(a, b, up_sums, input_precision=precision)
    if scaled:
        square = tl.sum(square_parts, axis=1, keep_dims=True)
        scale = tl.rsqrt(square / size + eps)
        sums *= scale
        up_sums *= scale
    if biased:
        sums += tl.load(bias + column % outputs)[None, :].to(tl.float32)
    # Rounded as a product of its own would be, to the type of the weights.
    result = sums.to(weight.dtype.element_ty)
    if gated:
        gate = result.to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(weight.dtype.element_ty)
        up = up_sums.to(weight.dtype.element_ty)
        result = (gate.to(tl.float32) * up.to(tl.float32)).to(weight.dtype.element_ty)
    if added:
        result = tl.where(inside, (stored + result).to(stored.dtype), 0.0)
        # The scale of a norm needs the whole row: whoever reads it adds up these sums.
        exact = result.to(tl.float32)
        square = tl.sum(exact * exact, axis=1)
        tl.store(next_squares + row * tl.num_programs(0) + tl.program_id(0), square, row < rows)
        exact *= norm_weight
        tl.store(next_x + at, exact.to(weight.dtype.element_ty), inside)
    tl.store(out + at, result.to(out.dtype.element_ty), inside)


SIZE_MULTIPLE = 64
"""Inputs of a product come in multiples of this."""


class Unscaled(NamedTuple):
    """A root-mean-square norm without its scale, which can as well be multiplied into a product."""

    x: Tensor  # [S, hidden], times the norm's weight
    squares: Tensor  # [S, parts], sums of the squares without it
    eps: float


class Tiles(NamedTuple):
    """What one program of `_product` computes, and how."""

    rows: int
    outputs: int
    size: int
    stages: int


def product(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None,
    later: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """x @ weight.T + bias, or with `gated` its `swiglu`: [S, in] -> [S, out].

    `later` are the weights of a product to come, which are prefetched into the L2 cache.
    """
    if isinstance(x, Unscaled):
        x, squares, eps = x
    else:
        squares, eps = None, 0.0
    out = weight.new_empty(len(x), len(weight) // (2 if gated else 1))
    _launch(x, weight, bias, out, later, squares=squares, eps=eps, gated=gated)
    return out


def add_product(
    residual: Tensor,  # [S, hidden], changed in place
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float],
    later: Tensor | None = None,
) -> Unscaled:
    """Add x @ weight.T + bias to the residual, and prepare the norm that follows."""
    norm_weight, eps = norm
    parts = triton.cdiv(len(weight), pick_tiles(x, weight, False, True).outputs)
    sums = torch.empty(len(x), parts, dtype=torch.float32, device=x.device)
    prepared = Unscaled(weight.new_empty(residual.shape), sums, eps)
    _launch(x, weight, bias, residual, later, norm=norm_weight, prepared=prepared)
    return prepared


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    later: Tensor | None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    norm: Tensor | None = None,
    prepared: Unscaled | None = None,
) -> None:
    rows, outputs = out.shape
    tiles = pick_tiles(x, weight, gated, norm is not None)
    grid = triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows)
    parts = 1 if squares is None else squares.shape[1]
    if later is None or rows > PREFETCH_ROWS or later.data_ptr() % 16:  # only what is aligned
        later = weight[:0]
    _product[grid](
        x,
        x if squares is None else squares,
        weight,
        weight if bias is None else bias,
        out,
        weight if norm is None else norm,
        *((out, out) if prepared is None else prepared[:2]),
        later,
        eps,
        rows,
        outputs,
        parts,
        later.nbytes,
        x.shape[1],
        tiles.rows,
        tiles.outputs,
        tiles.size,
        triton.next_power_of_2(parts),
        squares is not None,
        gated,
        bias is not None,
        norm is not None,
        "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=tiles.stages,
        **early_launch(x, _early_rows(gated, norm is not None)),
    )


PREFETCH_ROWS = 128
"""With more rows, weights are read in time without being prefetched."""


def _early_rows(gated: bool, added: bool) -> int:
    """Up to how many rows a product is launched early (`early_launch`), as measured on an H200.

    That before attention is with few only: it would take the place of attention's programs, which
    can read keys while they wait.
    """
    return 384 if gated else 256 if added else 96


def pick_tiles(x: Tensor, weight: Tensor, gated: bool, added: bool) -> Tiles:
    """The fastest of those measured on an H200, within a few percent."""
    count = len(x)
    rows, outputs, stages = (64 if count > 64 else 16), 32, 6
    if gated:
        outputs = 64 if 128 < count <= 256 else 32
        stages = 6 if count <= 256 else 3  # then two programs fit into a multiprocessor
    elif added:
        outputs = 16 if count <= 128 else 32 if count <= 384 else 64
    elif count > 256:
        outputs = 64
    size = 128 if x.shape[1] % 128 == 0 and x.shape[1] >= 1024 else 64
    stage = size * (rows + outputs * (2 if gated else 1)) * x.element_size()
    return Tiles(rows, outputs, size, max(1, min(stages, shared_memory(x.device) // stage)))
