"""Llama and its like (Mistral, Qwen 2 and 3) without transformers' modules in between.

The same arithmetic in a third of the operations, over the policy's own weights. Where autocast
computes in bfloat16 the matrices are kept in bfloat16 too, those that share an input as one: two
bytes a weight, in place of casting them all at every step. Norms, embeddings and the residual stay
as they are, so the numbers are autocast's. Axes: B rows, P prompt tokens, T = B * P, S slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from marlhf.models.load import Model
from marlhf.rollout.kernels import add_norm, attend, causal_attention, rotate_and_store, swiglu

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOVING_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on how long the text is."""


class Projection:
    """Linear layers of the same input, side by side: one product where their weights are copied."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        first = layers[0]
        self.weight = self.bias = None
        if first.weight.dtype != dtype:
            outputs = sum(layer.out_features for layer in layers)
            options: Any = {"dtype": dtype, "device": first.weight.device}
            self.weight = torch.empty(outputs, first.in_features, **options)
            self.bias = torch.empty(outputs, **options) if first.bias is not None else None

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each copy, and what it is a copy of."""
        sizes = [layer.out_features for layer in self.layers]
        found: list[tuple[Tensor, Tensor]] = []
        if self.weight is not None:
            found += zip(self.weight.split(sizes), (x.weight for x in self.layers))
        if self.bias is not None:
            found += zip(self.bias.split(sizes), (x.bias for x in self.layers))
        return found

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        parts = [F.linear(x, layer.weight, layer.bias) for layer in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Block:
    """One layer of the model."""

    def __init__(self, layer: Any, config: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj], dtype)
        self.out = Projection([attention.o_proj], dtype)
        self.gate_up = Projection([mlp.gate_proj, mlp.up_proj], dtype)
        self.down = Projection([mlp.down_proj], dtype)
        self.of_heads = (
            (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        )
        # Qwen has windows in some layers and says which; in Mistral all are alike.
        own = hasattr(attention, "sliding_window")
        self.window = attention.sliding_window if own else getattr(config, "sliding_window", None)

    @property
    def head_norms(self) -> tuple[Tensor, Tensor, float] | None:
        if self.of_heads is None:
            return None
        query, key = self.of_heads
        return query.weight, key.weight, query.variance_epsilon

    @property
    def projections(self) -> list[Projection]:
        return [self.qkv, self.out, self.gate_up, self.down]


class LlamaDecoder:
    """A `slots.Decoder`."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        config, trunk = model.config, model.model
        self.embedding: nn.Embedding = trunk.embed_tokens
        self.dtype = dtype or self.embedding.weight.dtype
        self.width = trunk.layers[0].self_attn.head_dim
        self.scale = trunk.layers[0].self_attn.scaling
        self.heads = config.num_attention_heads
        self.blocks = [Block(layer, config, self.dtype) for layer in trunk.layers]
        self.norm, self.head = trunk.norm, Projection([model.lm_head], self.dtype)
        device = self.embedding.weight.device
        shape = (len(self.blocks), slots, config.num_key_value_heads, capacity, self.width)
        # Zeros, for plain attention multiplies what it masks: a leftover NaN would get through.
        self.keys = torch.zeros(shape, dtype=self.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        places = torch.arange(capacity, device=device)
        tables = trunk.rotary_emb(self.embedding.weight[:1], position_ids=places[None])
        self.rotary = cast(tuple[Tensor, Tensor], tuple(table[0].contiguous() for table in tables))
        self.slots = torch.arange(slots, device=device)

    @staticmethod
    def fits(model: Model) -> bool:
        """Whether this is one of the models that are written out here, as it was made."""
        if type(model).__name__ not in FAMILIES:
            return False
        rotary = model.config.rope_parameters.get("rope_type", "default")
        matrices = (m for m in model.modules() if hasattr(m, "weight") and m.weight.ndim == 2)
        return (
            model.config.hidden_act == "silu"
            and rotary not in MOVING_ROTARY
            and all(type(m) in (nn.Linear, nn.Embedding) for m in matrices)
            and not any(isinstance(p, DTensor) for p in model.parameters())
        )

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Bring the copies of weights up to date, where they are: recorded graphs go on."""
        every = [self.head, *(p for block in self.blocks for p in block.projections)]
        pairs = [pair for projection in every for pair in projection.pairs()]
        if pairs:
            copies, originals = zip(*pairs)
            torch._foreach_copy_(copies, originals)  # pyright: ignore[reportPrivateImportUsage]
        yield

    @property
    def cache_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        rows, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(rows)
        slots = slots.repeat_interleave(length, output_size=rows * length)

        def attention(qkv: Tensor, layer: int) -> Tensor | None:
            self._rotate(qkv, layer, positions, slots)
            if layer == len(self.blocks) - 1:
                return None  # its keys and values are all that was wanted
            split = [self.heads] + 2 * [self.keys.shape[2]]
            qkv = qkv.view(rows, length, -1, self.width).transpose(1, 2)
            window = self.blocks[layer].window
            query, key, value = qkv.split(split, dim=1)
            out = causal_attention(query, key, value, self.scale, window)
            return out.transpose(1, 2).reshape(rows * length, -1)

        self._through(ids.flatten(), attention)

    def step(self, tokens: Tensor, positions: Tensor, reach: int | None) -> Tensor:
        def attention(qkv: Tensor, layer: int) -> Tensor:
            self._rotate(qkv, layer, positions, self.slots[: len(tokens)])
            cache, window = (self.keys[layer], self.values[layer]), self.blocks[layer].window
            query = qkv[:, : self.heads]
            return attend(query, *cache, positions, reach, self.scale, window).flatten(1)

        hidden = self._through(tokens, attention)
        assert hidden is not None
        return self.head(hidden)

    def move(self, source: Tensor, target: Tensor) -> None:
        for cache in (self.keys, self.values):
            cache[:, target] = cache[:, source]

    def _through(self, ids: Tensor, attention: Any) -> Tensor | None:
        """Tokens [T] through all layers: hidden states [T, hidden], or None if attention stops."""
        with torch.autocast(ids.device.type, enabled=False):
            residual = self.embedding(ids)
            delta = None
            for layer, block in enumerate(self.blocks):
                x = self._norm(residual, delta, block.norms[0])
                attended = attention(block.qkv(x).view(len(ids), -1, self.width), layer)
                if attended is None:
                    return None
                x = self._norm(residual, block.out(attended), block.norms[1])
                delta = block.down(swiglu(block.gate_up(x)))
            return self._norm(residual, delta, self.norm)

    def _norm(self, residual: Tensor, delta: Tensor | None, norm: Any) -> Tensor:
        return add_norm(residual, delta, norm.weight, norm.variance_epsilon, self.dtype)

    def _rotate(self, qkv: Tensor, layer: int, positions: Tensor, slots: Tensor) -> None:
        cache, norms = (self.keys[layer], self.values[layer]), self.blocks[layer].head_norms
        rotate_and_store(qkv, self.rotary, positions, slots, *cache, norms)
