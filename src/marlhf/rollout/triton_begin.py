"""How kernels of a decode step begin: before the last has ended, and attention by rotating queries
and new keys."""

# Triton reads these functions itself: annotations mark constants, and names are pointers.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportMissingImports=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


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
def begin(
    queries,  # pointers [rows, 1], as are the others, or [1, 1] for one key of all rows
    new_keys,
    inside,
    stores,  # which of the rows store their new key
    stored_keys,
    stored_values,
    cosines,
    sines,
    query_norm,
    key_norm,
    eps,
    scale,
    to_value,
    width: tl.constexpr,
    normed: tl.constexpr,
):
    # Queries and new keys, rotated. A key is stored with its value, which lies `to_value` behind
    # it, and the softmax begins with both.
    column = tl.arange(0, width)[None, :]
    q = _rotated(queries, inside, query_norm, cosines, sines, eps, width, normed)
    whole = tl.zeros([1, 1], tl.int32) == 0
    key = _rotated(new_keys, whole, key_norm, cosines, sines, eps, width, normed)
    value = tl.load(new_keys + to_value + column)
    tl.store(stored_keys + column, key, stores)
    tl.store(stored_values + column, value, stores)
    highest = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1, keep_dims=True)
    highest = highest * scale * 1.4426950408889634
    total = tl.full(highest.shape, 1.0, tl.float32)
    mean = tl.zeros(q.shape, tl.float32) + value.to(tl.float32)
    return q.to(stored_keys.dtype.element_ty), highest, total, mean


ATTEND_ROWS = 768
"""The most rows with which attention is launched early."""


def early_launch(x: Tensor, most: int) -> dict[str, bool]:
    """Options of a kernel over some rows that may be launched before the last has ended.

    It is where there are at most so many, and then waits for the results of the last, but no longer
    for its own launch. Every such kernel lets the next be launched as soon as all its programs have
    begun.
    """
    can = _can_launch_early(x.device)
    if can and len(x) <= most:
        return {"triggers": True, "early": True, "launch_pdl": True}
    return {"triggers": can, "early": False}


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
