"""Any transformers decoder over a preallocated key-value cache whose rows differ in length.

A row of the cache is a slot: it holds one response in progress, and the next one when that has
ended. The masks that transformers builds know nothing of slots. So `slot_attention` is registered
as an attention implementation, as flash attention is: transformers then builds no mask and passes
sliding windows and soft caps as arguments.

Autocast would cast a model's matrices again at every step, so copies of them are kept in the type
that sampling computes with.

Axes: S slots, B rows of a prefill, N new tokens of a text, H query heads, K key-value heads,
C positions, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import skip_init
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from marlhf.kernels.attention import (
    SlotPositions,
    attend,
    attend_opaque,
    attend_to_text,
    causal_attention,
)
from marlhf.models.base import Model
from marlhf.models.compile import LayerwiseCache, distinct_sizes, uncompiled
from marlhf.models.heads import backbone

ATTENTION = "marlhf_slots"
PREFILL_TOKENS = 1 << 14
"""The most tokens in one prefill, whatever the budget: where the GPU is the slower of the two, more
do not make it faster, and prompts of more different lengths would be padded to the longest."""
_active: ContextVar[Pass] = ContextVar("the current forward pass")


class Decoder(Protocol):
    """A model with a cache, as the engine drives it."""

    prefill_tokens: int
    """The most tokens in one prefill."""
    indexed: bool
    """Whether steps find keys and values by an index, so that slots are moved without them."""

    def ready(self) -> contextlib.AbstractContextManager[None]:
        """Everything else happens within this context, with the weights as of its beginning."""
        ...

    @property
    def cache_bytes(self) -> int: ...

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        """Write the keys and values of prompts, [B, P] and padded on the right, to slots [B]."""
        ...

    def extend(self, ids: Tensor, cache_rows: Tensor, positions: Tensor, reach: int) -> None:
        """Write the keys and values of tokens that follow what slots hold.

        Tokens and their positions, all of them below `reach`, are [B, N]. The slots are given by
        where their keys and values are, [B], whether `indexed` or not.
        """
        ...

    def step(
        self, tokens: Tensor, positions: Tensor, reach: int | None, cache_rows: Tensor | None = None
    ) -> Tensor:
        """Logits [S, V] after one more token in each of the first S slots, at positions [S].

        All positions are below `reach`, so attention may stop there; None where shapes are fixed.
        Where `indexed`, slots may have their keys and values in other rows of the cache, [S].
        """
        ...

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        """Copy some slots onto others, only their first `length` positions where given."""
        ...


@dataclass
class Pass:
    """What a forward pass over slots does: a prefill where `prefill_slots` is set, else a step, or
    an extension where positions are [B, N]."""

    at: SlotPositions | None = None
    prefill_slots: Tensor | None = None  # [B]
    reach: int | None = None
    use_softcap: bool = True


@dataclass
class LayerSlots:
    """One layer's keys and values, [S, K, C, D] each, as its attention writes and reads them.

    Compiled layers get this in place of the cache: it does not depend on the number of a layer, so
    that all layers share their code.
    """

    keys: Tensor
    values: Tensor
    now: Pass

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, and give those to attend to."""
        keys, values = self.keys, self.values
        if self.now.prefill_slots is not None:
            slots = self.now.prefill_slots[:, None]
            # Not `:length`: compiled, that would copy the positions of all slots and back.
            columns = torch.arange(key.shape[2], device=key.device)
            keys[slots, :, columns] = key.transpose(1, 2).to(keys.dtype)
            values[slots, :, columns] = value.transpose(1, 2).to(values.dtype)
            return key, value  # prompts attend to themselves alone
        assert self.now.at is not None
        positions, reach = self.now.at.positions, slice(self.now.reach)
        if positions.ndim == 2:
            own = self.now.at.cache_rows
            assert own is not None
            keys[own[:, None], :, positions] = key.transpose(1, 2).to(keys.dtype)
            values[own[:, None], :, positions] = value.transpose(1, 2).to(values.dtype)
            return keys[own, :, reach], values[own, :, reach]
        rows = torch.arange(len(positions), device=positions.device)
        keys[rows, :, positions] = key[:, :, 0].to(keys.dtype)
        values[rows, :, positions] = value[:, :, 0].to(values.dtype)
        return keys[: len(rows), :, reach], values[: len(rows), :, reach]

    def get_seq_length(self, *_: Any) -> int:
        return 0  # transformers derives positions from this, but they are always passed


class SlotCache(LayerwiseCache):
    """Keys and values of all layers, allocated when a layer is first used.

    Layers with a sliding window keep everything too; attention applies the window.
    """

    def __init__(
        self, slots: int, capacity: int, dtype: torch.dtype | None, *, compiled: bool
    ) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity, self.dtype = slots, capacity, dtype
        self.compiled = compiled
        self.slot_layers: dict[int, LayerSlots] = {}
        self.now = Pass()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.slot_layers:
            keys, values = self._empty(key_states), self._empty(value_states)
            self.slot_layers[layer_idx] = LayerSlots(keys, values, self.now)
        return self.slot_layers[layer_idx].update(key_states, value_states)

    def begin(self, now: Pass) -> None:
        self.now = now
        for layer in self.slot_layers.values():
            layer.now = now

    def of_layer(self, layer: nn.Module) -> LayerSlots | None:
        if not self.compiled:
            return None
        numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
        number = next((n for n in numbers if n is not None), None)
        # Not there before its first use, which allocates it.
        return None if number is None else self.slot_layers.get(number)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    @property
    def tensors(self) -> list[Tensor]:
        return [x for layer in self.slot_layers.values() for x in (layer.keys, layer.values)]

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self.slots, like.shape[1], self.capacity, like.shape[3])
        # Zeros: attention multiplies masked values by 0, and 0 times a leftover NaN is NaN.
        return torch.zeros(shape, dtype=self.dtype or like.dtype, device=like.device)


class ModuleDecoder:
    """Through the model's own modules, whatever its family."""

    prefill_tokens = PREFILL_TOKENS
    indexed = False
    compiled = False
    """Whether layers run compiled, where the model's are for training."""

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        self.model = self.prefilled = model
        self.cache = SlotCache(slots, capacity, dtype, compiled=self.compiled)
        self.copies: ModuleWeightCopies | None = None
        if dtype is not None and model.device.type == "cuda" and not sharded(model):
            self.copies = ModuleWeightCopies(model, dtype, join=self.compiled)
        # Logits of the last position only. A wrapper passes on any keyword.
        takes = forward_parameters(model) & {"logits_to_keep", "kwargs"}
        self.last_only = {"logits_to_keep": 1} if takes else {}

    def ready(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.copies is None else self.copies.applied()

    @property
    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in self.cache.tensors)

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        self._run(self.prefilled, ids, positions, Pass(prefill_slots=slots))

    def extend(self, ids: Tensor, cache_rows: Tensor, positions: Tensor, reach: int) -> None:
        now = Pass(SlotPositions(positions, cache_rows), reach=reach)
        with uncompiled():  # few passes are these, and their masks would be compiled along
            self._run(self.prefilled, ids, positions, now)

    def step(
        self, tokens: Tensor, positions: Tensor, reach: int | None, cache_rows: Tensor | None = None
    ) -> Tensor:
        assert cache_rows is None, "only where `indexed`"
        if self.compiled:
            # Compiled layers would be compiled again for each reach, and for positions that are a
            # view of others, as of the first slots: these always are.
            reach, positions = None, positions[:]
        now = Pass(SlotPositions(positions), reach=reach)
        out = self._run(self.model, tokens[:, None], positions[:, None], now)
        return out.logits[:, -1]

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        for layer in self.cache.tensors:
            layer[target, :, :length] = layer[source, :, :length]

    def _run(self, model: Model, ids: Tensor, positions: Tensor, now: Pass) -> Any:
        # A family that hands keywords on to its attention hands on this one.
        keywords: dict[str, Any] = {"slot_pass": now} if self.compiled else {}
        if model is self.model:
            keywords |= self.last_only
        sizes = distinct_sizes() if self.compiled else contextlib.nullcontext()
        with _slot_attention(self.model, self.cache, now), sizes:
            return model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **keywords,
            )


class CompiledDecoder(ModuleDecoder):
    """The same with the layers compiled: half as many kernels in a step."""

    prefill_tokens = 2 * PREFILL_TOKENS  # calling a compiled layer takes the host longer
    compiled = True

    def __init__(self, model: Model, slots: int, capacity: int, dtype: torch.dtype | None) -> None:
        super().__init__(model, slots, capacity, dtype)
        self.prefilled = backbone(model)  # nobody reads the logits of a prefill

    def prefill(self, ids: Tensor, slots: Tensor) -> None:
        if not self.cache.slot_layers:
            super().prefill(ids[:1, :1], slots[:1])  # allocates, which compiled layers do not
        # A size of one would be compiled once more: one row is done twice, and one column padded.
        if len(ids) == 1:
            ids, slots = ids.repeat(2, 1), slots.repeat(2)
        if ids.shape[1] == 1:
            ids = nn.functional.pad(ids, (0, 1))
        super().prefill(ids, slots.clone())  # a view would be compiled once more, too


def sharded(model: nn.Module) -> bool:
    """Whether FSDP gathers and frees the weights, so that their addresses change."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def slot_attention(
    module: nn.Module,
    query: Tensor,  # [B or S, H, P or N or 1, D]
    key: Tensor,  # [B or S, K, P or C, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slot_pass: Pass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over slots, called by transformers like flash attention; returns [B, P, H, D]."""
    now = _active.get() if slot_pass is None else slot_pass
    softcap = softcap if now.use_softcap else None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if now.prefill_slots is not None:
        out = causal_attention(query, key, value, scale, sliding_window, softcap)
        return out.transpose(1, 2).contiguous(), None
    assert now.at is not None
    query = query.to(key.dtype)
    if now.at.positions.ndim == 2:
        out = attend_to_text(query, key, value, now.at, scale, sliding_window, softcap)
        return out.transpose(1, 2).contiguous(), None
    query = query[:, :, 0]
    if torch.compiler.is_compiling():
        out = attend_opaque(query, key, value, now.at.positions, scale, sliding_window, softcap)
    else:
        out = attend(query, key, value, now.at, None, scale, sliding_window, softcap)
    return out[:, None], None


AttentionInterface.register(ATTENTION, slot_attention)


@contextlib.contextmanager
def _slot_attention(model: Model, cache: SlotCache, now: Pass) -> Iterator[None]:
    """Let the model attend by `slot_attention`, over this cache, for one pass."""
    config = model.config.get_text_config()
    before, token = config._attn_implementation, _active.set(now)
    # Some versions of transformers ignore soft caps under SDPA. Training then does without them,
    # and sampling has to match it.
    now.use_softcap = before != "sdpa"
    cache.begin(now)
    config._attn_implementation = ATTENTION  # has no mask function, so no masks are built
    try:
        yield
    finally:
        config._attn_implementation = before
        _active.reset(token)


def forward_parameters(model: Model) -> set[str]:
    """The names of the parameters of a model's forward; "kwargs" where it takes any keyword."""
    return set(inspect.signature(type(model).forward).parameters)


JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers with the same input, by their names in most families."""


class ModuleWeightCopies:
    """Copies of the matrices of a model in the precision of autocast.

    Autocast would cast them again at every step, and decoding is bound by memory traffic. The
    copies cost two bytes per weight. Embeddings and norms stay as they are, as they do under
    autocast, so the numbers are the same.

    With `join` the layers of `JOINED` become parts of one matrix product, for models that run
    compiled: three small products take nearly three times as long as one.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, join: bool) -> None:
        self.parts = list(_joined_layers(model, dtype)) if join else []
        joined = {id(layer) for parts in self.parts for layer in parts.layers}
        self.owners = [
            (layer, name)
            for layer in model.modules()
            if isinstance(layer, nn.Linear | Conv1D) and id(layer) not in joined
            for name, parameter in layer._parameters.items()
            if parameter is not None
        ]
        self.copies = [
            torch.empty_like(layer.get_parameter(name), dtype=dtype) for layer, name in self.owners
        ]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Bring the copies up to date, and let the layers compute with them for a while."""
        originals = [cast(Tensor, layer._parameters[name]) for layer, name in self.owners]
        joined = [pair for parts in self.parts for pair in parts.pairs]
        pairs = [*zip(self.copies, originals), *joined]
        if pairs:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [copy for copy, _ in pairs], [original for _, original in pairs]
            )
        try:
            # Straight into `_parameters`: assignment would refuse what is no nn.Parameter.
            for (layer, name), copy in zip(self.owners, self.copies):
                layer._parameters[name] = cast(nn.Parameter, copy)
            for parts in self.parts:
                parts.owner._modules.update(zip(parts.names, parts.replacements))
            yield
        finally:
            for (layer, name), original in zip(self.owners, originals):
                layer._parameters[name] = cast(nn.Parameter, original)
            for parts in self.parts:
                parts.owner._modules.update(zip(parts.names, parts.layers))


class JoinedLayers:
    """Linear layers of one module with the same input, and what computes them as one."""

    def __init__(self, owner: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
        self.owner, self.names = owner, names
        self.layers = [cast(nn.Linear, owner._modules[name]) for name in names]
        self.sizes = [layer.out_features for layer in self.layers]
        first = self.layers[0]
        whole = skip_init(  # drawing weights would change what is drawn after
            nn.Linear,
            first.in_features,
            sum(self.sizes),
            first.bias is not None,
            device=first.weight.device,
            dtype=dtype,
        )
        self.whole = cast(nn.Linear, whole.requires_grad_(False))
        self.pairs = split_pairs(self.whole, self.layers)
        stops = itertools.accumulate(self.sizes)
        self.replacements = [
            PartOfProduct(self.whole, stop - size, stop) for size, stop in zip(self.sizes, stops)
        ]


class PartOfProduct(nn.Module):
    """Some outputs of a linear layer, all of which are computed.

    Compiled layers compute what is the same only once (`compile_blocks`), so that all parts are one
    product; and parts that get another input than the others after all are still right.
    """

    def __init__(self, whole: nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.start : self.stop]


def split_pairs(whole: Any, layers: Sequence[nn.Linear]) -> list[tuple[Tensor, Tensor]]:
    """Each part of joined weights and biases with its original."""
    sizes = [layer.out_features for layer in layers]
    pairs = list(zip(whole.weight.split(sizes), (x.weight for x in layers)))
    if whole.bias is not None:
        pairs += zip(whole.bias.split(sizes), (x.bias for x in layers))
    return pairs


def _joined_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[JoinedLayers]:
    for owner in model.modules():
        for names in JOINED:
            layers = [owner._modules.get(name) for name in names]
            if all(map(_is_a_matrix, layers)):
                linear = cast(list[nn.Linear], layers)
                kinds = {(x.in_features, x.bias is None, x.weight.dtype) for x in linear}
                if len(kinds) == 1:
                    yield JoinedLayers(owner, names, dtype)


def _is_a_matrix(layer: nn.Module | None) -> bool:
    """Neither an adapter nor another layer in its place, nor one with hooks or another forward."""
    return (
        type(layer) is nn.Linear
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and "forward" not in vars(layer)
    )
