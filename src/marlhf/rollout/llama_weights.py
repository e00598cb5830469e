"""What a Llama's decoder computes with: weights, key-value cache and rotary tables.

Where autocast computes in bfloat16, copies of the matrices are kept in bfloat16, those with the
same input joined into one: two bytes per weight, instead of casting them all at every step. Norms
and embeddings keep their type, and so does the residual stream of decode steps, as under autocast;
that of a prefill may be bfloat16, as in training passes by our own kernels.
Axes: T tokens, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marlhf.models.base import Model
from marlhf.models.layer_kernels import gated, swiglu
from marlhf.models.unpadded import attention_window
from marlhf.rollout.weight_copies import split_pairs

SMALL_MATRIX = 1 << 20
"""Up to so many weights, matrices with the same input are joined in a copy where nothing else needs
one. The call of a product is then as expensive as its arithmetic, and the copy costs little."""


class Projection:
    """Linear layers with the same input: one matrix product where their weights are copied."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.outputs = sum(self.sizes)
        first = layers[0]
        small = len(layers) > 1 and self.outputs * first.in_features <= SMALL_MATRIX
        self.copied = first.weight.dtype != dtype or small
        self.weight, self.bias = first.weight, first.bias
        if self.copied:
            self.weight = first.weight.new_empty(self.outputs, first.in_features, dtype=dtype)
            if self.bias is not None:
                self.bias = first.weight.new_empty(self.outputs, dtype=dtype)
        # Where nothing is copied, each layer writes into its columns of one output.
        parts = [(self.weight, self.bias)] if self.copied else [(x.weight, x.bias) for x in layers]
        self.transposed = [(weight.detach().T, bias) for weight, bias in parts]

    @property
    def is_one(self) -> bool:
        """Whether `weight` and `bias` are those of all the layers."""
        return len(self.transposed) == 1

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each copy with its original."""
        return split_pairs(self, self.layers) if self.copied else []

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self.copied or len(self.layers) == 1:
            return F.linear(x, self.weight, self.bias)
        out = x.new_empty(x.shape[0], self.outputs)
        self.into(self.columns(out), x)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor | None:
        """Add the product to a residual where a GPU can in one call, or give it to be added."""
        plain = self.is_one and self.bias is None
        if not (plain and residual.is_cuda and residual.dtype == x.dtype):
            return self(x)
        residual.addmm_(x, self.transposed[0][0])
        return None

    def columns(self, out: Tensor) -> list[Tensor]:
        """The parts of an output [T, out] that one product each fills."""
        return [out] if self.is_one else list(out.split(self.sizes, dim=1))

    def into(self, columns: list[Tensor], x: Tensor) -> None:
        """The same, written to the `columns` of an output that is there already."""
        for (weight, bias), out in zip(self.transposed, columns):
            if bias is None:
                torch.mm(x, weight, out=out)
            else:
                torch.addmm(bias, x, weight, out=out)


class Block:
    """One layer of the model."""

    def __init__(self, layer: Any, config: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = [norm_of(n) for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        self.qkv, self.out, self.gate_up, self.down = (
            Projection(layers, dtype)
            for layers in (
                [attention.q_proj, attention.k_proj, attention.v_proj],
                [attention.o_proj],
                [mlp.gate_proj, mlp.up_proj],
                [mlp.down_proj],
            )
        )
        self.head_norms: tuple[Tensor, Tensor, float] | None = None
        if hasattr(attention, "q_norm"):
            query, epsilon = norm_of(attention.q_norm)
            self.head_norms = query, attention.k_norm.weight, epsilon
        self.window = attention_window(attention, config)

    def gated(self, x: Tensor) -> Tensor:
        """The product of the SwiGLU, before its last projection: [T, hidden] -> [T, width]."""
        if self.gate_up.is_one and self.gate_up.bias is None:
            return gated(x, self.gate_up.weight)
        return swiglu(self.gate_up(x))

    @property
    def projections(self) -> list[Projection]:
        return [self.qkv, self.out, self.gate_up, self.down]


class LlamaWeights:
    """The weights of a whole model, and a cache for some slots of some capacity."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        config, trunk = model.config, model.model
        self.embedding: Tensor = trunk.embed_tokens.weight
        self.dtype = dtype or self.embedding.dtype
        self.width = trunk.layers[0].self_attn.head_dim
        self.scale = trunk.layers[0].self_attn.scaling
        self.heads = config.num_attention_heads
        self.blocks = [Block(layer, config, self.dtype) for layer in trunk.layers]
        self.norm, self.head = norm_of(trunk.norm), Projection([model.lm_head], self.dtype)
        device = self.embedding.device
        self.groups = config.num_key_value_heads
        shape = (len(self.blocks), slots, 2 * self.groups, capacity, self.width)
        # Zeros: plain attention multiplies masked values by 0, and 0 times a leftover NaN is NaN.
        self.cache = torch.zeros(shape, dtype=self.dtype, device=device)
        self.layers = [(layer, *layer.chunk(2, dim=1)) for layer in self.cache]  # keys, values
        # The angles of every position that fits, once: these families' do not change with length.
        positions = torch.arange(capacity, device=device)
        tables = trunk.rotary_emb(self.embedding[:1], position_ids=positions[None])
        self.rotary = cast(tuple[Tensor, Tensor], tuple(table[0].contiguous() for table in tables))
        self.slots, self.capacity = torch.arange(slots, device=device), capacity
        projections = [self.head, *(p for block in self.blocks for p in block.projections)]
        # Once: finding hundreds of views takes the host longer than the GPU takes to copy them.
        self.copies = [pair for projection in projections for pair in projection.pairs()]

    def update_copies(self) -> None:
        """Bring the copies of weights up to date in place, so that recorded graphs stay valid."""
        if self.copies:
            copies, originals = zip(*self.copies)
            torch._foreach_copy_(copies, originals)  # pyright: ignore[reportPrivateImportUsage]


def norm_of(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon
