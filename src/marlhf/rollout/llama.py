"""Sampling from Llama, Mistral, Qwen 2 and Qwen 3 by the pass of `models/llama.py`.

Prefill and decoding are that pass with an `attend` that stores keys and values in a cache. Where
matrices are multiplied in another type than they are kept in, copies in that type are kept, those
with the same input joined: two bytes per weight, instead of casting all of them at every step.
Axes: B rows, P prompt tokens, T = B * P, S slots, K key-value heads, C positions, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from marlhf.kernels.attention import (
    SlotPositions,
    attend,
    attend_to_text,
    has_kernel,
    triton_attention,
)
from marlhf.models.base import Model
from marlhf.models.llama import (
    Layer,
    LowRank,
    Product,
    Rotary,
    Sizes,
    attention_window,
    has_hooks,
    is_plain_llama,
    on_device,
    rotated,
    row_layer,
    run_layers,
    unwrapped,
)
from marlhf.rollout.slots import PREFILL_TOKENS

LAUNCHED_NUMBERS = 1 << 26
"""Numbers of hidden states, tokens times hidden size, in one prefill on a GPU."""


class WeightCopies:
    """Products of linear layers, over the model's own weights or over copies of them."""

    def __init__(self, dtype: torch.dtype, adapter: str | None) -> None:
        self.dtype, self.adapter = dtype, adapter
        self.copies: list[Tensor] = []
        self.originals: list[Tensor] = []
        self.adapted: list[tuple[Sequence[nn.Module], LowRank]] = []

    def product(self, layers: Sequence[nn.Module]) -> Product:
        weights, biases, low_rank = own = Product.of(layers, self.adapter)
        if low_rank is not None:
            low_rank = LowRank(*(x.detach().to(self.dtype, copy=True) for x in low_rank))
            self.adapted.append((layers, low_rank))
        if own.is_joined(self.dtype):
            given = [bias for bias in biases if bias is not None]
            weights, biases = (self._copy(weights),), (self._copy(given) if given else None,)
        return Product(weights, biases, low_rank)

    def _copy(self, parts: Sequence[Tensor]) -> Tensor:
        sizes = [len(part) for part in parts]
        whole = torch.empty(
            sum(sizes), *parts[0].shape[1:], dtype=self.dtype, device=parts[0].device
        )
        self.copies += whole.split(sizes)
        self.originals += [part.detach() for part in parts]
        return whole

    def update(self) -> None:
        """Bring the copies up to date in place, so that recorded graphs stay valid."""
        if self.copies:
            torch._foreach_copy_(self.copies, self.originals)  # pyright: ignore[reportPrivateImportUsage]
        for layers, copies in self.adapted:
            for copy, new in zip(copies, LowRank.of(layers, self.adapter) or ()):
                copy.copy_(new)


class LlamaDecoder:
    """A `slots.Decoder`."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        model, adapter = unwrapped(model)
        trunk, self.sizes = model.model, Sizes.of(model)
        self.embedding: Tensor = trunk.embed_tokens.weight
        self.dtype, device = dtype or self.embedding.dtype, self.embedding.device
        self.weights = WeightCopies(self.dtype, adapter)
        self.layers = [Layer.of(layer, self.weights.product) for layer in trunk.layers]
        self.windows = [attention_window(x.self_attn, model.config) for x in trunk.layers]
        self.norm, self.head = trunk.norm.weight, self.weights.product([model.lm_head])
        groups, width = self.sizes.groups, self.sizes.width
        # Zeros: plain attention multiplies masked values by 0, and 0 times a leftover NaN is NaN.
        shape = (len(self.layers), slots, 2 * groups, capacity, width)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=device)
        self.keys_values = [layer.chunk(2, dim=1) for layer in self.cache]
        # The angles of every position that fits, once: these families' do not change with length.
        self.rotary = Rotary.of(model, capacity)
        self.slots = torch.arange(slots, device=device)
        # The kernel finds keys and values by an index, and rotates by itself.
        self.fused = self.indexed = has_kernel(self.cache[0], *self.keys_values[0])
        self.tables = self.rotary.tables()
        # A GPU is done with few tokens of a small model before the host has launched the next.
        most = LAUNCHED_NUMBERS // self.embedding.shape[1] if device.type == "cuda" else 0
        self.prefill_tokens = min(max(PREFILL_TOKENS, most), 4 * PREFILL_TOKENS)

    @staticmethod
    def fits(model: Model) -> bool:
        """Whether this model is computed here: a known family with no layer replaced or hooked."""
        causal = type(unwrapped(model)[0]).__name__.endswith("ForCausalLM")
        return causal and is_plain_llama(model) and not has_hooks(model)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        self.weights.update()
        off = torch.autocast(self.embedding.device.type, enabled=False)  # types are chosen by hand
        with off, torch.inference_mode():  # saves a tenth of the time of a small model on a CPU
            yield

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        rows, length = ids.shape
        rotary = Rotary(self.rotary.cos[:length], self.rotary.sin[:length])
        one_layer = on_device(row_layer, ids.device)

        def store(number: int, *new: Tensor) -> None:
            for stored, each in zip(self.keys_values[number], new):
                stored[:, :, :length].index_copy_(0, slots, each)

        def whole(x: Tensor, delta: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
            both = (each if each is None else each.reshape(rows, length, -1) for each in (x, delta))
            window = self.windows[number]
            x, added, *new = one_layer(*both, self.layers[number], rotary, self.sizes, window)
            store(number, *new)
            return x.flatten(0, 1), added.flatten(0, 1)

        def store_last(qkv: Tensor, number: int) -> None:
            """A prefill needs the last layer's keys and values, nothing after."""
            by_row, norms = qkv.unflatten(0, (rows, length)), self.layers[number].head_norms
            _, *new = rotated(by_row, norms, rotary, self.sizes)
            store(number, *(each.transpose(1, 2) for each in new))

        self._run(ids.flatten(), store_last, whole)

    def extend(self, ids: Tensor, cache_rows: Tensor, positions: Tensor, reach: int) -> None:
        at, rotary = SlotPositions(positions, cache_rows), self.rotary.at(positions.flatten())

        def attend_to_slots(qkv: Tensor, number: int) -> Tensor | None:
            query, key, value = rotated(qkv, self.layers[number].head_norms, rotary, self.sizes)
            stored = torch.cat((key, value), dim=1).unflatten(0, ids.shape)
            self.cache[number][cache_rows[:, None], :, positions] = stored
            if number == len(self.layers) - 1:
                return None  # as in a prefill, nothing is needed after the last keys and values
            query = query.unflatten(0, ids.shape).transpose(1, 2)
            keys, values = self.cache[number][cache_rows, :, :reach].chunk(2, dim=1)
            window = self.windows[number]
            out = attend_to_text(query, keys, values, at, self.sizes.scale, window)
            return out.transpose(1, 2).flatten(2).flatten(0, 1)

        self._run(ids.flatten(), attend_to_slots)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        reach: int | None,
        cache_rows: Tensor | None = None,
    ) -> Tensor:
        at = SlotPositions(positions, cache_rows)
        rotary = self.rotary.at(positions)
        own = self.slots[: len(tokens)] if cache_rows is None else cache_rows
        scale, epsilon = self.sizes.scale, self.sizes.epsilon

        def attend_to_slots(qkv: Tensor, number: int) -> Tensor:
            (keys, values), window = self.keys_values[number], self.windows[number]
            norms = self.layers[number].head_norms
            if self.fused:
                return triton_attention.attend(
                    *(qkv, keys, values, positions, cache_rows, scale, window),
                    rotary=self.tables,
                    norms=None if norms is None else (*norms, epsilon),
                ).flatten(1)
            query, key, value = rotated(qkv, norms, rotary, self.sizes)
            self.cache[number][own, :, positions] = torch.cat((key, value), dim=1)
            return attend(query, keys, values, at, reach, scale, window).flatten(1)

        hidden = self._run(tokens, attend_to_slots)
        assert hidden is not None
        return self.head(hidden.to(self.dtype))

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        for layer in self.cache:  # one by one: what is copied exists twice for a moment
            layer[target, :, :length] = layer[source, :, :length]

    def _run(self, tokens: Tensor, attend: Any, whole: Any = None) -> Tensor | None:
        x = self.embedding.index_select(0, tokens).to(self.dtype)
        return run_layers(x, self.layers, attend, self.sizes, self.norm, whole=whole)
