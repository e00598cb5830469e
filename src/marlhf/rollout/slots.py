"""Any transformers decoder over a preallocated key-value cache whose rows are at different places.

A cache row is a slot: it holds one response under way, and another when that has ended. No mask
that transformers builds knows of slots, so the model is told to attend by `slot_attention`, through
the same door that flash attention uses, and sliding windows and soft caps come in by that door.
Axes: S slots, B rows of a prefill, H query heads, K key-value heads, C positions, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, Cache
from transformers.pytorch_utils import Conv1D

from marlhf.models.base import Model
from marlhf.rollout.kernels import Places, attend, causal_attention

ATTENTION = "marlhf_slots"
_active: ContextVar[SlotCache] = ContextVar("the cache of the forward pass under way")


class Decoder(Protocol):
    """A model with a cache, as the engine drives it."""

    def ready(self) -> contextlib.AbstractContextManager[None]:
        """Everything else happens within this. Weights are as they were when it was entered."""
        ...

    @property
    def cache_bytes(self) -> int: ...

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        """Put the keys and values of prompts, [B, P] and padded on the right, into slots [B]."""
        ...

    def step(self, tokens: Tensor, positions: Tensor, reach: int | None) -> Tensor:
        """Logits [S, V] after one more token in each of the first S slots, at positions [S].

        Where shapes may vary, arithmetic can stop at `reach`, which all positions are below.
        """
        ...

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy some slots onto others."""
        ...


class SlotCache(Cache):
    """Keys and values of all layers, [S, K, C, D] each, made when a layer first shows its sizes.

    Layers with a sliding window keep everything too: the window is left to attention.
    """

    def __init__(self, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity, self.dtype = slots, capacity, dtype
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.where: Tensor | None = None  # [B], the slots of a prefill; None for a decode step
        self.places: Places | None = None  # of a decode step
        self.reach: int | None = None
        self.capped = True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.keys:
            self.keys[layer_idx] = self._empty(key_states)
            self.values[layer_idx] = self._empty(value_states)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.where is not None:
            length = key_states.shape[2]
            keys[self.where, :, :length] = key_states.to(keys.dtype)
            values[self.where, :, :length] = value_states.to(values.dtype)
            return key_states, value_states
        assert self.places is not None
        rows, positions = self.places.slots, self.places.positions
        assert rows is not None
        keys[rows, :, positions] = key_states[:, :, 0].to(keys.dtype)
        values[rows, :, positions] = value_states[:, :, 0].to(values.dtype)
        reach = slice(self.reach)
        return keys[: len(rows), :, reach], values[: len(rows), :, reach]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self.slots, like.shape[1], self.capacity, like.shape[3])
        # Zeros, for attention multiplies what it masks: a leftover NaN would get through.
        return torch.zeros(shape, dtype=self.dtype or like.dtype, device=like.device)


class ModuleDecoder:
    """Through the model's own modules, whatever its family."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        self.model = model
        self.cache = SlotCache(slots, capacity, dtype)
        self.copies: WeightCopies | None = None
        if dtype is not None and model.device.type == "cuda" and not sharded(model):
            self.copies = WeightCopies(model, dtype)
        keeps = takes(model) & {"logits_to_keep", "kwargs"}
        self.last_only = {"logits_to_keep": 1} if keeps else {}

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        if self.copies is None:
            yield
        else:
            with self.copies.worn():
                yield

    @property
    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.cache.keys.values(), *self.cache.values.values()))

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        self.cache.where = slots
        # Rows begin in the first column, so causal attention keeps all from the padding.
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        self._logits(ids, positions)
        self.cache.where = None

    def step(self, tokens: Tensor, positions: Tensor, reach: int | None) -> Tensor:
        slots = torch.arange(len(positions), device=positions.device)
        self.cache.places, self.cache.reach = Places(positions, slots), reach
        return self._logits(tokens[:, None], positions[:, None])

    def move(self, source: Tensor, target: Tensor) -> None:
        for layer in (*self.cache.keys.values(), *self.cache.values.values()):
            layer[target] = layer[source]

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        with _attending(self.model, self.cache):
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **self.last_only,
            )
        return out.logits[:, -1]


class WeightCopies:
    """The matrices of a model in the precision of autocast, which would cast them at every step.

    Two bytes a weight, for many times that in traffic. Embeddings and norms stay as they are, as
    they do under autocast, so the numbers are the same.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        places = [m._parameters for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
        self.places = [(p, name) for p in places for name in p if p[name] is not None]
        self.copies = [torch.empty_like(self._at(place), dtype=dtype) for place in self.places]

    @contextlib.contextmanager
    def worn(self) -> Iterator[None]:
        """Put the copies, brought up to date, in the places of the weights for a while."""
        originals = [self._at(place) for place in self.places]
        for copy, original in zip(self.copies, originals):
            copy.copy_(original)
        try:
            for (parameters, name), copy in zip(self.places, self.copies):
                parameters[name] = cast(nn.Parameter, copy)
            yield
        finally:
            for (parameters, name), original in zip(self.places, originals):
                parameters[name] = original

    def _at(self, place: tuple[dict[str, nn.Parameter | None], str]) -> nn.Parameter:
        parameter = place[0][place[1]]
        assert parameter is not None
        return parameter


def sharded(model: nn.Module) -> bool:
    """Whether weights come and go, so that nothing may remember where they are."""
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
    """Attention over slots, with the arguments that flash attention gets; out [B, P, H, D]."""
    cache = _active.get()
    softcap = softcap if cache.capped else None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if cache.where is not None:
        out = causal_attention(query, key, value, scale, sliding_window, softcap)
        return out.transpose(1, 2).contiguous(), None
    assert cache.places is not None
    query = query[:, :, 0].to(key.dtype)
    out = attend(query, key, value, cache.places, None, scale, sliding_window, softcap)
    return out[:, None], None


AttentionInterface.register(ATTENTION, slot_attention)


@contextlib.contextmanager
def _attending(model: Model, cache: SlotCache) -> Iterator[None]:
    """Let the model attend by `slot_attention`, over this cache, for a while."""
    config = model.config.get_text_config()
    before, token = config._attn_implementation, _active.set(cache)
    # Some versions of transformers leave out soft caps under SDPA; training then has none either.
    cache.capped = before != "sdpa"
    config._attn_implementation = ATTENTION  # has no mask function, so no masks are built
    try:
        yield
    finally:
        config._attn_implementation = before
        _active.reset(token)


def mismatch(
    kind: Callable[[Model, int, int, torch.dtype | None], Decoder],
    model: Model,
    dtype: torch.dtype | None,
) -> float:
    """How far logits from slots are from those without a cache, relative to their spread.

    Two short prompts in slots that are not their own rows, with one at rest between them.
    """
    device, size = model.device, model.config.get_text_config().vocab_size
    # From all over the vocabulary: its first tokens are often special and untrained, and what a
    # model makes of those in bfloat16 can be rounding and little else.
    ids = (size // 3 + torch.arange(12, device=device).view(2, 6) * 7919) % size
    slots, last = torch.tensor([2, 0], device=device), torch.tensor([5, 3], device=device)
    rows = torch.arange(2, device=device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    positions = torch.zeros_like(tokens)
    tokens[slots], positions[slots] = ids[rows, last], last
    decoder = kind(model, 3, 8, dtype)
    with decoder.ready():
        decoder.prefill(ids[:, :5], slots)
        ours = decoder.step(tokens, positions, None)[slots].float()
    whole = model(input_ids=ids, use_cache=False).logits[rows, last].float()
    return float((ours - whole).norm() / (whole - whole.mean()).norm())


def takes(model: Model) -> set[str]:
    """The names of what a model's forward takes; "kwargs" among them where it takes any."""
    return set(inspect.signature(type(model).forward).parameters)
