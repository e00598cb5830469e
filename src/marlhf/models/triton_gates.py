"""Gate, up and SwiGLU of many tokens in one kernel: Triton's for `layer_kernels.gated`."""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, OUTPUTS, SIZE, STAGES = 128, 64, 64, 2
"""Tiles of a program, and loads ahead of products: the fastest of a hundred on an H200. Three such
programs share a multiprocessor, and one multiplies while another ends."""


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


def can_gate(x: Tensor, weight: Tensor) -> bool:
    """Whether the hardware can read these in tiles, and its products are those measured."""
    nvidia = torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] == 9
    aligned = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight))
    return nvidia and x.dtype == torch.bfloat16 and aligned and x.shape[1] % 8 == 0


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
        num_stages=STAGES,
    )
    return out
