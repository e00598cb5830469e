"""Any transformers decoder over a preallocated key-value cache whose rows differ in length.

A row of the cache is a slot: it holds one response in progress, and the next one when that has
ended. The masks that transformers builds know nothing of slots. So `slot_attention` is registered
as an attention implementation, as flash attention is: transformers then builds no mask and passes
sliding windows and soft caps as arguments.
Axes: S slots, B rows of a prefill, H query heads, K key-value heads, C positions, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, Cache
from transformers.pytorch_utils import Conv1D

from marlhf.models.base import Model
from marlhf.rollout.kernels import Positions, attend, causal_attention

ATTENTION = "marlhf_slots"
_active: ContextVar[SlotCache] = ContextVar("the cache of the current forward pass")


class Decoder(Protocol):
    """A model with a cache, as the engine drives it."""

    def ready(self) -> contextlib.AbstractContextManager[None]:
        """Everything else happens within this context, with the weights as of its beginning."""
        ...

    @property
    def cache_bytes(self) -> int: ...

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        """Write the keys and values of prompts, [B, P] and padded on the right, to slots [B]."""
        ...

    def step(self, tokens: Tensor, positions: Tensor, reach: int | None) -> Tensor:
        """Logits [S, V] after one more token in each of the first S slots, at positions [S].

        All positions are below `reach`, so attention may stop there; None where shapes are fixed.
        """
        ...

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        """Copy some slots onto others, only their first `length` positions where given."""
        ...


class SlotCache(Cache):
    """Keys and values of all layers, [S, K, C, D] each, allocated when a layer is first used.

    Layers with a sliding window keep everything too; attention applies the window.
    """

    def __init__(self, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity, self.dtype = slots, capacity, dtype
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        # The pass in progress is a prefill where `prefill_slots` is set, else a decode step.
        self.prefill_slots: Tensor | None = None  # [B]
        self.at: Positions | None = None  # of a decode step
        self.reach: int | None = None
        self.use_softcap = True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.keys:
            self.keys[layer_idx] = self._empty(key_states)
            self.values[layer_idx] = self._empty(value_states)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.prefill_slots is not None:
            length = key_states.shape[2]
            keys[self.prefill_slots, :, :length] = key_states.to(keys.dtype)
            values[self.prefill_slots, :, :length] = value_states.to(values.dtype)
            return key_states, value_states  # prompts attend to themselves alone
        assert self.at is not None
        rows, positions = self.at.slots, self.at.positions
        assert rows is not None
        keys[rows, :, positions] = key_states[:, :, 0].to(keys.dtype)
        values[rows, :, positions] = value_states[:, :, 0].to(values.dtype)
        reach = slice(self.reach)
        return keys[: len(rows), :, reach], values[: len(rows), :, reach]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # transformers derives positions from this, but they are always passed

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self.slots, like.shape[1], self.capacity, like.shape[3])
        # Zeros: attention multiplies masked values by 0, and 0 times a leftover NaN is NaN.
        return torch.zeros(shape, dtype=self.dtype or like.dtype, device=like.device)


class ModuleDecoder:
    """Through the model's own modules, whatever its family."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        self.model = model
        self.cache = SlotCache(slots, capacity, dtype)
        self.copies: WeightCopies | None = None
        if dtype is not None and model.device.type == "cuda" and not sharded(model):
            self.copies = WeightCopies(model, dtype)
        # Logits of the last position only. A wrapper passes on any keyword.
        takes = forward_parameters(model) & {"logits_to_keep", "kwargs"}
        self.last_only = {"logits_to_keep": 1} if takes else {}

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        if self.copies is None:
            yield
        else:
            with self.copies.applied():
                yield

    @property
    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.cache.keys.values(), *self.cache.values.values()))

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        self.cache.prefill_slots = slots
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        self._logits(ids, positions)
        self.cache.prefill_slots = None

    def step(self, tokens: Tensor, positions: Tensor, reach: int | None) -> Tensor:
        slots = torch.arange(len(positions), device=positions.device)
        self.cache.at, self.cache.reach = Positions(positions, slots), reach
        return self._logits(tokens[:, None], positions[:, None])

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        for layer in (*self.cache.keys.values(), *self.cache.values.values()):
            layer[target, :, :length] = layer[source, :, :length]

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        with _slot_attention(self.model, self.cache):
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **self.last_only,
            )
        return out.logits[:, -1]


class WeightCopies:
    """Copies of the matrices of a model in the precision of autocast.

    Autocast would cast them again at every step, and decoding is bound by memory traffic. The
    copies cost two bytes per weight. Embeddings and norms stay as they are, as they do under
    autocast, so the numbers are the same.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
        self.owners = [
            (layer, name)
            for layer in layers
            for name, parameter in layer._parameters.items()
            if parameter is not None
        ]
        self.copies = [
            torch.empty_like(layer.get_parameter(name), dtype=dtype) for layer, name in self.owners
        ]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Bring the copies up to date, and let the layers compute with them for a while."""
        originals = [layer._parameters[name] for layer, name in self.owners]
        for copy, original in zip(self.copies, originals):
            assert original is not None
            copy.copy_(original)
        try:
            # Straight into `_parameters`: assignment would refuse what is no nn.Parameter.
            for (layer, name), copy in zip(self.owners, self.copies):
                layer._parameters[name] = cast(nn.Parameter, copy)
            yield
        finally:
            for (layer, name), original in zip(self.owners, originals):
                layer._parameters[name] = original


def sharded(model: nn.Module) -> bool:
    """Whether FSDP gathers and frees the weights, so that their addresses change."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def slot_attention(
    module: nn.Module,
    query: Tensor,  # [B or S, H, P or 1, D]
    key: Tensor,  # [B or S, K, P or C, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over slots, called by transformers like flash attention; returns [B, P, H, D]."""
    cache = _active.get()
    softcap = softcap if cache.use_softcap else None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if cache.prefill_slots is not None:
        out = causal_attention(query, key, value, scale, sliding_window, softcap)
        return out.transpose(1, 2).contiguous(), None
    assert cache.at is not None
    query = query[:, :, 0].to(key.dtype)
    out = attend(query, key, value, cache.at, None, scale, sliding_window, softcap)
    return out[:, None], None


AttentionInterface.register(ATTENTION, slot_attention)


@contextlib.contextmanager
def _slot_attention(model: Model, cache: SlotCache) -> Iterator[None]:
    """Let the model attend by `slot_attention`, over this cache, for a while."""
    config = model.config.get_text_config()
    before, token = config._attn_implementation, _active.set(cache)
    # Some versions of transformers ignore soft caps under SDPA. Training then does without them,
    # and sampling has to match it.
    cache.use_softcap = before != "sdpa"
    config._attn_implementation = ATTENTION  # has no mask function, so no masks are built
    try:
        yield
    finally:
        config._attn_implementation = before
        _active.reset(token)


def forward_parameters(model: Model) -> set[str]:
    """The names of the parameters of a model's forward; "kwargs" where it takes any keyword."""
    return set(inspect.signature(type(model).forward).parameters)
