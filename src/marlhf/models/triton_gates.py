"""Products of many tokens and what a SwiGLU does before or after them, in one kernel each: Triton's
for `gated` and `gated_backward` of `layer_kernels.py`."""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, OUTPUTS, SIZE = 128, 64, 64
"""Tiles of a program, the fastest of many on an H200. Several programs share a multiprocessor, and
one multiplies while another ends."""


@triton.jit
def _gated(
    x,  # [T, in], read by the hardware in tiles, as is the weight; zeros beyond the edges
    weight,
    out,
    rows,
    outputs,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_size: tl.constexpr,
):
    # One program per tile. Those that follow each other have the same rows, which the cache holds.
    columns = tl.cdiv(outputs, block_outputs)
    first_row = tl.program_id(0) // columns * block_rows
    first_column = tl.program_id(0) % columns * block_outputs
    gate_sums = tl.zeros([block_rows, block_outputs], tl.float32)
    up_sums = tl.zeros([block_rows, block_outputs], tl.float32)
    for start in range(0, size, block_size):
        a = x.load([first_row, start])
        gate_sums = tl.dot(a, weight.load([first_column, start]).T, gate_sums)
        up_sums = tl.dot(a, weight.load([outputs + first_column, start]).T, up_sums)
    # Rounded as a product and a kernel of its own would.
    dtype: tl.constexpr = out.dtype.element_ty
    gate = gate_sums.to(dtype).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    row = first_row + tl.arange(0, block_rows)[:, None]
    column = first_column + tl.arange(0, block_outputs)[None, :]
    inside = (row < rows) & (column < outputs)
    product = (silu * up_sums.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + row.to(tl.int64) * outputs + column, product, inside)


@triton.jit
def _gated_backward(
    grad,  # [T, hidden], as x above
    weight,  # [hidden, I]
    gate_up,
    grad_gate_up,
    product,
    rows,
    outputs,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_size: tl.constexpr,
):
    columns = tl.cdiv(outputs, block_outputs)
    first_row = tl.program_id(0) // columns * block_rows
    first_column = tl.program_id(0) % columns * block_outputs
    sums = tl.zeros([block_rows, block_outputs], tl.float32)
    for start in range(0, size, block_size):
        a = grad.load([first_row, start])
        sums = tl.dot(a, weight.load([start, first_column]), sums)
    row = (first_row + tl.arange(0, block_rows)[:, None]).to(tl.int64)
    column = first_column + tl.arange(0, block_outputs)[None, :]
    inside = (row < rows) & (column < outputs)
    place = row * 2 * outputs + column
    gate = tl.load(gate_up + place, inside, other=0.0)
    up = tl.load(gate_up + place + outputs, inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate.dtype
    dy = sums.to(dtype).to(tl.float32)
    x = gate.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-x))
    silu = x * sigmoid
    slope = sigmoid * (1 + x - silu)
    tl.store(grad_gate_up + place, (dy * up * slope).to(dtype), inside)
    tl.store(grad_gate_up + place + outputs, (dy * silu).to(dtype), inside)
    again = (silu.to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(product + row * outputs + column, again, inside)


def can_gate(x: Tensor, weight: Tensor) -> bool:
    """Whether the hardware can read these in tiles, and its products are those measured."""
    nvidia = torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] == 9
    aligned = all(
        t.is_contiguous() and t.data_ptr() % 16 == 0 and t.shape[1] % 8 == 0 for t in (x, weight)
    )
    return nvidia and x.dtype == weight.dtype == torch.bfloat16 and aligned


def gated(x: Tensor, weight: Tensor) -> Tensor:
    (rows, size), outputs = x.shape, len(weight) // 2
    out = x.new_empty(rows, outputs)
    _gated[(triton.cdiv(rows, ROWS) * triton.cdiv(outputs, OUTPUTS),)](
        TensorDescriptor.from_tensor(x, [ROWS, SIZE]),
        TensorDescriptor.from_tensor(weight, [OUTPUTS, SIZE]),
        out,
        rows,
        outputs,
        size,
        ROWS,
        OUTPUTS,
        SIZE,
        num_warps=4,
        num_stages=2,
    )
    return out


def gated_backward(grad: Tensor, weight: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    (rows, size), outputs = grad.shape, weight.shape[1]
    grad_gate_up, product = torch.empty_like(gate_up), grad.new_empty(rows, outputs)
    _gated_backward[(triton.cdiv(rows, ROWS) * triton.cdiv(outputs, OUTPUTS),)](
        TensorDescriptor.from_tensor(grad, [ROWS, SIZE]),
        TensorDescriptor.from_tensor(weight, [SIZE, OUTPUTS]),
        gate_up,
        grad_gate_up,
        product,
        rows,
        outputs,
        size,
        ROWS,
        OUTPUTS,
        SIZE,
        num_warps=8,
        num_stages=4,
    )
    return grad_gate_up, product
