"""Llama, Mistral, Qwen 2 and Qwen 3, computed without transformers' modules.

The same arithmetic in a third of the operations, over the policy's own weights. Steps on a CPU, and
those of small models on a GPU, have a faster form each (`cpu_step.py`, `fused_step.py`).
Axes: B rows, P prompt tokens, T = B * P, S slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from marlhf.models.base import Model
from marlhf.models.layer_kernels import attention, has_attention
from marlhf.models.llama_layers import has_our_layers
from marlhf.models.unpadded import is_plain_llama
from marlhf.rollout.cpu_step import CPUStep
from marlhf.rollout.fused_step import MAX_ROWS, can_fuse, fused_hidden
from marlhf.rollout.kernels import (
    Positions,
    add_norm,
    attend,
    causal_attention,
    fused,
    rotate_and_store,
)
from marlhf.rollout.llama_weights import LlamaWeights
from marlhf.rollout.prefills import RecordedPrefills
from marlhf.rollout.slots import PREFILL_TOKENS
from marlhf.rollout.state import Prefixes

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LAUNCHED_NUMBERS = 1 << 26
"""Numbers of hidden states, tokens times hidden size, in one prefill on a GPU, which would be done
with less of a small model before the host has launched the next."""


class LlamaDecoder(LlamaWeights):
    """A `slots.Decoder`."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        super().__init__(model, slots, capacity, dtype)
        device = self.embedding.device
        # As in training passes, where bfloat16 goes from layer to layer: a third less to move.
        self.prefill_dtype = self.embedding.dtype
        if fused(self.embedding) and has_our_layers(model):
            self.prefill_dtype = self.dtype
        weights = sum(p.weight.numel() for block in self.blocks for p in block.projections)
        self.recorded = RecordedPrefills(model, weights, capacity)
        self.first_tokens = self.recorded.first_tokens
        self.prefill_tokens = PREFILL_TOKENS
        if device.type == "cuda":
            most = LAUNCHED_NUMBERS // self.embedding.shape[1]
            if self.recorded.most_tokens >= PREFILL_TOKENS:
                most = min(most, self.recorded.most_tokens)
            self.prefill_tokens = min(max(PREFILL_TOKENS, most), 4 * PREFILL_TOKENS)
        # A borrowed prefix is read from memory once, and from the GPU's L2 cache after that.
        self.indexed = fused(self.embedding)
        self.uses_cpu_steps = CPUStep.fits(self)
        self.cpu_steps: dict[int, CPUStep] = {}  # by the number of slots
        self.fused_rows = MAX_ROWS if can_fuse(self) else 0

    @staticmethod
    def fits(model: Model) -> bool:
        """Whether this model is computed here: a known family with no layer replaced."""
        return type(model).__name__ in FAMILIES and is_plain_llama(model)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        self.update_copies()
        off = torch.autocast(self.embedding.device.type, enabled=False)  # types are chosen by hand
        with off, torch.inference_mode():  # saves a tenth of the time of a small model on a CPU
            yield

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        self.recorded(self._prefill, ids, slots)

    def _prefill(self, ids: Tensor, slots: Tensor) -> Tensor:
        rows, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(rows)
        at = Positions(positions, slots.repeat_interleave(length, output_size=rows * length))

        def attend_to_prompts(qkv: Tensor, layer: int) -> Tensor | None:
            self._rotate(qkv, layer, at)
            if layer == len(self.blocks) - 1:
                return None  # a prefill needs the last layer's keys and values, nothing after
            qkv = qkv.view(rows, length, -1, self.width)
            window = self.blocks[layer].window
            if has_attention(qkv, self.width, length) and (window is None or length <= window):
                out, _ = attention(qkv, self.heads, self.scale)
            else:
                split = [self.heads, self.groups, self.groups]
                query, key, value = qkv.transpose(1, 2).split(split, dim=1)
                out = causal_attention(query, key, value, self.scale, window).transpose(1, 2)
            return out.reshape(rows * length, -1)

        residual = self.embedding.index_select(0, ids.flatten()).to(self.prefill_dtype)
        self._forward(residual, attend_to_prompts)
        return slots

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        reach: int | None,
        prefixes: Prefixes | None = None,
        cache_rows: Tensor | None = None,
    ) -> Tensor:
        if len(tokens) <= self.fused_rows:
            at = Positions(positions, prefixes=prefixes, cache_rows=cache_rows)
            return self.head(fused_hidden(self, tokens, at))
        if not self.uses_cpu_steps or cache_rows is not None:
            return self.plain_step(tokens, positions, reach, prefixes, cache_rows)
        rows = len(tokens)
        if rows not in self.cpu_steps:
            self.cpu_steps[rows] = CPUStep(self, rows)
        return self.cpu_steps[rows](tokens, positions, reach or self.capacity)

    def plain_step(
        self,
        tokens: Tensor,
        positions: Tensor,
        reach: int | None,
        prefixes: Prefixes | None = None,
        cache_rows: Tensor | None = None,
    ) -> Tensor:
        at = Positions(positions, self.slots[: len(tokens)], prefixes, cache_rows)

        def attend_to_slots(qkv: Tensor, layer: int) -> Tensor:
            self._rotate(qkv, layer, at)
            (_, keys, values), window = self.layers[layer], self.blocks[layer].window
            query = qkv[:, : self.heads]
            return attend(query, keys, values, at, reach, self.scale, window).flatten(1)

        hidden = self._forward(self.embedding.index_select(0, tokens), attend_to_slots)
        assert hidden is not None
        return self.head(hidden)

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        for layer in self.cache:  # one by one: what is copied exists twice for a moment
            layer[target, :, :length] = layer[source, :, :length]

    def _forward(self, residual: Tensor, attention: Any) -> Tensor | None:
        """Embeddings through all layers, to hidden states, [T, hidden]; None if attention stops.

        What a product does not add to the residual itself, the norm that follows adds.
        """
        delta, shape = None, (len(residual), -1, self.width)
        for layer, block in enumerate(self.blocks):
            residual, x = add_norm(residual, delta, *block.norms[0], self.dtype)
            attended = attention(block.qkv(x).view(shape), layer)
            if attended is None:
                return None
            delta = block.out.add_to(residual, attended)
            residual, x = add_norm(residual, delta, *block.norms[1], self.dtype)
            delta = block.down.add_to(residual, block.gated(x))
        return add_norm(residual, delta, *self.norm, self.dtype)[1]

    def _rotate(self, qkv: Tensor, layer: int, at: Positions) -> None:
        cache, norms = self.layers[layer][0], self.blocks[layer].head_norms
        rotate_and_store(qkv, self.rotary, at, cache, norms)
