"""A decode step of a small Llama on a GPU in five kernels per layer, of which four are products.

Such a step is bound by how long a kernel takes to begin and end, so each does as much as it can:
attention rotates and stores what it needs, and a product takes along what is before and after it.
A norm is no kernel of its own: whoever writes the residual also writes it times the norm's weight,
with the squares of what it has of each row, and whoever reads it multiplies by the scale at the
end. `LlamaDecoder.plain_step` is the same in more kernels.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from marlhf.rollout.kernels import Positions, add_norm, fused, triton_attend
from marlhf.rollout.llama_weights import LlamaWeights, Projection

triton_products: Any = None
if importlib.util.find_spec("triton"):
    from marlhf.rollout import triton_products

MAX_ROWS = 768
"""With more rows cuBLAS is faster, and what is saved matters less."""
MAX_HIDDEN = 1024
"""The largest hidden size. Larger matrices take long to read, and cuBLAS is better at that."""
MAX_ADDED = 2048
"""The most inputs of a product that is added to the residual here. It has few outputs, so its
programs are few, and each goes over all inputs."""
LATER = 2
"""A product prefetches the weights of that which is so many after it into the L2 cache."""
TYPES = (torch.bfloat16,)
"""The types of matrices. Before they are scaled, hidden states may be too large for float16."""


def can_fuse(decoder: LlamaWeights) -> bool:
    """Whether a decoder's steps of up to `MAX_ROWS` can be computed here, and are faster."""
    if not fused(decoder.embedding) or decoder.dtype not in TYPES:
        return False
    projections = [p for block in decoder.blocks for p in block.projections]
    return (
        decoder.embedding.shape[1] <= MAX_HIDDEN
        and all(p.is_one for p in projections)
        and not any(p.weight.shape[1] % triton_products.SIZE_MULTIPLE for p in projections)
        and all(block.gate_up.bias is None for block in decoder.blocks)
        and triton_attend.can_attend(*decoder.layers[0])
    )


def fused_hidden(decoder: LlamaWeights, tokens: Tensor, at: Positions) -> Tensor:
    """The last hidden states after one more token in each slot: [S, hidden]."""

    def norm(delta: Tensor | None, weight: tuple[Tensor, float]) -> Tensor:
        nonlocal residual
        residual, normed = add_norm(residual, delta, *weight, decoder.dtype)
        return normed

    def add(
        x: Tensor, projection: Projection, after: tuple[Tensor, float], later: Tensor | None
    ) -> Any:
        """Add a product to the residual; the norm that follows, scaled or not."""
        if x.shape[1] > MAX_ADDED:
            return norm(projection(x), after)
        weight, bias = projection.weight, projection.bias
        return triton_products.add_product(residual, x, weight, bias, after, later)

    blocks = decoder.blocks
    weights = [projection.weight for block in blocks for projection in block.projections]
    coming = [*weights[LATER:], *(None,) * LATER]  # four for each block
    residual = decoder.embedding.index_select(0, tokens)
    x = norm(None, blocks[0].norms[0])
    next_norms = [*(block.norms[0] for block in blocks[1:]), decoder.norm]
    for i, (block, (_, keys, values)) in enumerate(zip(blocks, decoder.layers)):
        later = coming[4 * i : 4 * i + 4]
        qkv = triton_products.product(x, block.qkv.weight, block.qkv.bias, later[0])
        attended = triton_attend.attend(
            qkv.view(len(tokens), -1, decoder.width),
            keys,
            values,
            at.positions,
            at.cache_rows,
            at.prefixes,
            decoder.scale,
            block.window,
            rotary=decoder.rotary,
            norms=block.head_norms,
        )
        x = add(attended.flatten(1), block.out, block.norms[1], later[1])
        gated = triton_products.product(x, block.gate_up.weight, None, later[2], gated=True)
        x = add(gated, block.down, next_norms[i], later[3])
    return norm(None, decoder.norm)
