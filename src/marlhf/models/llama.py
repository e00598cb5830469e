"""The fast pass of Llama, Mistral, Qwen 2 and Qwen 3: one definition of a layer, over flat tokens.

The tokens of a batch follow each other in one dimension, and only `attend` knows where rows begin
and which token sees which. Training, prefill and decoding are this pass with another `attend`. On a
GPU a layer, or its halves around attention, is compiled, once for all layers. `forward.py`
has the pass through transformers' own modules, which gives the same numbers and serves every other
family, and models with shards, hooks or quantised layers.

Axes: T tokens, N selected tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from marlhf.kernels import has_triton
from marlhf.kernels.attention import causal_attention
from marlhf.models.adapters import AdaptedModel, is_adapted_linear
from marlhf.models.base import Model
from marlhf.models.compile import VARIANTS
from marlhf.models.sequences import send

FAMILIES = tuple(
    f"{family}For{kind}"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
    for kind in ("CausalLM", "SequenceClassification")
)
"""These differ only in biases, windows and norms of heads."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the length of the longest text in a batch."""
SMALL_MATRIX = 1 << 20
"""Up to so many weights, those that share an input are joined into one product even where they need
no cast: calling a product then takes as long as its arithmetic."""

QUERY_BLOCK, MAX_BLOCKS = 32, 4
"""Attention on a CPU is computed for at least so many queries at a time, in at most so many blocks:
more save little arithmetic and cost a call each."""

Attend = Callable[[Tensor, int], Tensor | None]
"""From a layer's heads before rotation, [T, H + 2 K, D], and the number of the layer to what the
query heads read, [T, H * D]. None ends the pass: a prefill needs no more than the last keys."""


def unwrapped(model: Any) -> tuple[Model, str | None]:
    """The transformers model that holds the layers, and which adapter is applied to them."""
    return (model.module, model.adapter) if isinstance(model, AdaptedModel) else (model, None)


def is_plain_llama(model: Any) -> bool:
    """Whether a model is of one of these families, with no layer replaced but by LoRA's.

    Quantisation and other kinds of adapters replace linear layers, FSDP shards them.
    """
    model, _ = unwrapped(model)
    own = type(model).__module__.startswith("transformers.")  # not code that came with a model
    if type(model).__name__ not in FAMILIES or not own:
        return False
    rope = model.config.rope_parameters
    rotary, whole = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0) == 1.0
    matrices = (m for m in model.modules() if hasattr(m, "weight") and m.weight.ndim == 2)
    return (
        model.config.hidden_act == "silu"
        and rotary not in LENGTH_DEPENDENT_ROPE
        and whole
        and all(type(m) in (nn.Linear, nn.Embedding) or is_adapted_linear(m) for m in matrices)
        and not any(isinstance(p, DTensor) for p in model.parameters())
    )


def is_unchanged(model: Any, longest: int) -> bool:
    """Whether a plain Llama computes just what its class does to rows of some length.

    Asked before each pass: hooks and gradient checkpointing may come and go.
    """
    model, _ = unwrapped(model)
    config = model.config
    for layer in model.base_model.layers:
        window = attention_window(layer.self_attn, config)
        if window is not None and longest > window:
            return False
        if model.training and layer.self_attn.attention_dropout:
            return False
    if any(module.__dict__.get("gradient_checkpointing") for module in model.modules()):
        return False
    return not has_hooks(model)


def has_hooks(model: Any) -> bool:
    """Whether forward hooks want to see or change what modules compute."""
    modules = unwrapped(model)[0].modules()
    return any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def attention_window(attention: Any, config: Any) -> int | None:
    """Qwen sets the window per layer; in Mistral the config's window holds for all layers."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(config, "sliding_window", None)


class LowRank(NamedTuple):
    """What LoRA adds to a product of x: x down^T up^T. R is the sum of the layers' ranks."""

    down: Tensor  # [R, in]
    up: Tensor  # [out, R], zero where a layer's outputs meet another's ranks

    @classmethod
    def of(cls, layers: Sequence[Any], adapter: str | None) -> LowRank | None:
        """Of linear layers with the same input; None where none has the adapter."""
        own = [adapter in getattr(layer, "lora_A", ()) for layer in layers]
        if adapter is None or not any(own):
            return None
        downs = [x.lora_A[adapter].weight for x, adapted in zip(layers, own) if adapted]
        ups = [
            x.lora_B[adapter].weight * x.scaling[adapter]
            if adapted
            else downs[0].new_zeros(x.out_features, 0)
            for x, adapted in zip(layers, own)
        ]
        return cls(torch.cat(downs), torch.block_diag(*ups))


class Product(NamedTuple):
    """Linear layers with the same input."""

    weights: tuple[Tensor, ...]  # [out, in]
    biases: tuple[Tensor | None, ...]
    low_rank: LowRank | None = None

    @classmethod
    def of(cls, layers: Sequence[Any], adapter: str | None = None) -> Product:
        plain = [getattr(layer, "base_layer", layer) for layer in layers]
        weights, biases = tuple(x.weight for x in plain), tuple(x.bias for x in plain)
        return cls(weights, biases, LowRank.of(layers, adapter))

    def is_joined(self, dtype: torch.dtype) -> bool:
        """Whether they become one matrix: a cast to another type copies them in any case."""
        if len(self.weights) == 1 or self.weights[0].dtype != dtype:
            return self.weights[0].dtype != dtype
        return sum(weight.numel() for weight in self.weights) <= SMALL_MATRIX

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the type of x."""
        if self.low_rank is None:
            return self._plain(x)
        down, up = (each.to(x.dtype) for each in self.low_rank)
        return self._plain(x) + F.linear(F.linear(x, down), up)

    def _plain(self, x: Tensor) -> Tensor:
        if self.is_joined(x.dtype):
            biases = [bias for bias in self.biases if bias is not None]
            bias = _joined(biases, x.dtype) if biases else None
            return F.linear(x, _joined(self.weights, x.dtype), bias)
        parts = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    cast = [part.to(dtype) for part in parts]
    return cast[0] if len(cast) == 1 else torch.cat(cast)


class Layer(NamedTuple):
    """The weights of a layer."""

    input_norm: Tensor
    qkv: Product
    head_norms: tuple[Tensor, Tensor] | None  # of queries and keys, Qwen 3
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, layer: Any, product: Callable[[list[Any]], Product]) -> Layer:
        """`product` is made of the linear layers that share an input."""
        attention, mlp = layer.self_attn, layer.mlp
        normed = "q_norm" in attention._modules
        return cls(
            layer.input_layernorm.weight,
            product([attention.q_proj, attention.k_proj, attention.v_proj]),
            (attention.q_norm.weight, attention.k_norm.weight) if normed else None,
            product([attention.o_proj]),
            layer.post_attention_layernorm.weight,
            product([mlp.gate_proj, mlp.up_proj]),
            product([mlp.down_proj]),
        )


class Sizes(NamedTuple):
    """What a pass must know of a model besides its weights."""

    heads: int  # H
    groups: int  # K
    width: int  # D
    scale: float  # of the products of queries and keys
    epsilon: float  # of norms

    @property
    def split(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        return self.heads, self.groups, self.groups

    @classmethod
    def of(cls, model: Model) -> Sizes:
        attention, config = model.base_model.layers[0].self_attn, model.config
        return cls(
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            attention.scaling,
            model.base_model.norm.variance_epsilon,
        )


def run_layers(
    x: Tensor,  # [T, hidden], embeddings
    layers: Sequence[Layer],
    attend: Attend,
    sizes: Sizes,
    final_norm: Tensor,
    *,
    selected: Tensor | None = None,  # [N]
    whole: Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]] | None = None,
) -> Tensor | None:
    """The last hidden states, [T, hidden] or of the selected tokens alone, [N, hidden], float32.

    What a layer adds to the residual is added by the norm that follows, which reads both anyway.
    `whole` computes all layers but the last in one call each, with the attention of `attend`.
    """
    delta = None
    before, after = (on_device(f, x.device) for f in (before_attention, after_attention))
    for number, layer in enumerate(layers):
        last = number == len(layers) - 1
        if whole is not None and not last:
            x, delta = whole(x, delta, number)
            continue
        x, qkv = before(x, delta, layer.input_norm, layer.qkv, sizes.epsilon)
        attended = attend(qkv.unflatten(1, (-1, sizes.width)), number)
        if attended is None:
            return None
        if selected is not None and last:
            x = x.index_select(0, selected)
            if len(attended) != len(x):  # attention may have been for the selected tokens alone
                attended = attended.index_select(0, selected)
        x, delta = after(x, attended, layer, sizes.epsilon)
    return rms_norm(x if delta is None else x + delta, final_norm, sizes.epsilon, wide(x))


def row_layer(
    x: Tensor,  # [B, W, hidden]
    delta: Tensor | None,
    layer: Layer,
    rotary: Rotary,  # of the W columns
    sizes: Sizes,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A whole layer over rows that begin in the first column: one call for a GPU's host.

    Gives the residual and what is to be added to it; and keys and values for a cache,
    [B, K, W, D], without gradients.
    """
    x, qkv = before_attention(x, delta, layer.input_norm, layer.qkv, sizes.epsilon)
    heads = rotated(qkv.unflatten(2, (-1, sizes.width)), layer.head_norms, rotary, sizes)
    query, key, value = (each.transpose(1, 2) for each in heads)
    attended = causal_attention(query, key, value, sizes.scale, window)
    x, delta = after_attention(x, attended.transpose(1, 2).flatten(2), layer, sizes.epsilon)
    return x, delta, key.detach(), value.detach()


def before_attention(
    x: Tensor, delta: Tensor | None, norm: Tensor, qkv: Product, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The residual x + delta, [T, hidden]; queries, keys and values of its norm, [T, heads * D].

    Here and below [B, W] may stand for T.
    """
    if delta is not None:
        x = x + delta
    return x, qkv(rms_norm(x, norm, epsilon, x.dtype))


def after_attention(
    x: Tensor, attended: Tensor, layer: Layer, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The residual after attention, and what the MLP adds to it: [T, hidden] each."""
    x = x + layer.out(attended)
    gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, epsilon, x.dtype)).chunk(2, dim=-1)
    return x, layer.down(F.silu(gate) * up)


class Rotary(NamedTuple):
    """Cosines and sines of tokens, [T, 1, D], the first half of the sines negated.

    Rotation is x * cos + rotate_half(x) * sin, where rotate_half negates its first half. Negating
    the sines instead leaves a plain `roll` in place of rotate_half.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Model, length: int) -> Rotary:
        """Of the first positions of a text."""
        trunk = model.base_model
        weight = trunk.embed_tokens.weight
        positions = torch.arange(length, device=weight.device)
        cos, sin = (x[0, :, None] for x in trunk.rotary_emb(weight[:1], positions[None]))
        return cls(cos, _negate_half(sin))

    def at(self, positions: Tensor) -> Rotary:
        return Rotary(self.cos[positions], self.sin[positions])

    def rows(self, count: int, length: int) -> Rotary:
        """Of several rows of some length, one after the other."""
        cos, sin = (x[:length].repeat(count, 1, 1) for x in self)
        return Rotary(cos, sin)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines as transformers has them, [T, D]."""
        return self.cos.squeeze(1).contiguous(), _negate_half(self.sin).squeeze(1)


def _negate_half(sin: Tensor) -> Tensor:
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def rotated(
    qkv: Tensor,  # [T, H + 2 K, D]
    norms: tuple[Tensor, Tensor] | None,
    rotary: Rotary,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normalised where the model does and rotated; and values."""
    if norms is not None:
        query, key, value = qkv.split(sizes.split, dim=-2)
        query, key = (rms_norm(x, w, sizes.epsilon, x.dtype) for x, w in zip((query, key), norms))
        return rotate(query, rotary), rotate(key, rotary), value
    both, value = qkv.split((sizes.heads + sizes.groups, sizes.groups), dim=-2)
    query, key = rotate(both, rotary).split(sizes.split[:2], dim=-2)  # fewer calls than one by one
    return query, key, value


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of heads, [T, heads, D]."""
    turned = torch.addcmul(x * rotary.cos, x.roll(x.shape[-1] // 2, dims=-1), rotary.sin)
    return turned.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x over its root mean square, rounded to its type as transformers does, times a weight."""
    unit = F.rms_norm(x.to(wide(x)), x.shape[-1:], eps=epsilon)
    return (unit.to(x.dtype) * weight).to(dtype)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class TokenLayout(NamedTuple):
    """Where the tokens of a padded batch [B, W] are in a flat pass, and which of them are wanted.

    A GPU computes padding along: rows of a micro-batch have similar lengths, and attention is then
    a plain batch. A CPU computes whatever it is given, so there the tokens are the real ones alone.
    """

    rows: int  # B
    width: int  # W
    places: Tensor | None  # [T], flat places of the tokens in [B, W]; None where padding is kept
    selected: Tensor  # [N], which of the tokens are wanted
    wanted: tuple[Tensor, Tensor] | None = None
    """Without padding: the columns of selected tokens, [B, P], any where a row has fewer; and where
    in [B, P] each of them is, [N]."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        width: int,
        selected: Sequence[tuple[int, int]],
        device: torch.device | str = "cpu",
        *,
        padded: bool = False,
    ) -> TokenLayout:
        """Rows of some lengths; a (first column, count) is selected of each.

        >>> layout = TokenLayout.of([3, 2], 4, [(1, 2), (0, 1)])
        >>> layout.places.tolist(), layout.selected.tolist()
        ([0, 1, 2, 4, 5], [1, 2, 3])
        """
        # In numpy: torch would wake a pool of threads for a few thousand numbers.
        first, count = np.array(selected, dtype=np.int64).reshape(-1, 2).T
        places, starts = None, np.arange(len(lengths), dtype=np.int64) * width
        columns = None
        if not padded:
            order = np.arange(count.max())
            columns = (
                torch.from_numpy(first[:, None] + order),
                torch.from_numpy(np.flatnonzero(order < count[:, None])),
            )
            places = torch.from_numpy(_ranges(starts, np.array(lengths, dtype=np.int64)))
            starts = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, dtype=np.int64)
        wanted = torch.from_numpy(_ranges(starts + first, count))
        return cls(len(lengths), width, places, send(wanted, device), columns)

    def pad(self, x: Tensor) -> Tensor:
        """Heads of tokens as a padded batch: [T, heads, D] -> [B, heads, W, D]."""
        size = self.rows * self.width
        if self.places is not None and len(x) < size:
            x = x.new_zeros(size, *x.shape[1:]).index_copy(0, self.places, x)
        return x.unflatten(0, (self.rows, self.width)).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, heads, W, D] -> [T, heads * D]."""
        flat = x.transpose(1, 2).reshape(self.rows * self.width, -1)
        if self.places is None or len(self.places) == len(flat):
            return flat
        return flat.index_select(0, self.places)


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... for each start, as many as its count."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)


def selected_hidden(
    model: Any,
    ids: Tensor,  # [B, W]
    lengths: Sequence[int],
    selected: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> Tensor:
    """The last hidden states of some tokens of each row, (first column, count): [N, hidden].

    Matrices are multiplied in `dtype`, which also goes from layer to layer.
    """
    model, adapter = unwrapped(model)
    trunk, sizes = model.base_model, Sizes.of(model)
    layout = TokenLayout.of(lengths, ids.shape[1], selected, ids.device, padded=ids.is_cuda)
    layers = [Layer.of(layer, partial(Product.of, adapter=adapter)) for layer in trunk.layers]
    flat, by_column = ids.flatten(), Rotary.of(model, layout.width)
    rotary = by_column.rows(layout.rows, layout.width)
    if layout.places is not None:
        flat, rotary = flat[layout.places], by_column.at(layout.places % layout.width)
    one_layer = on_device(row_layer, ids.device)

    def attend(qkv: Tensor, number: int) -> Tensor:
        heads = rotated(qkv, layers[number].head_norms, rotary, sizes)
        if layout.places is not None:
            joined = layout.pad(torch.cat(heads, dim=1))
            query, key, value = joined.split(sizes.split, dim=1)
            if number == len(layers) - 1 and layout.wanted is not None:
                return _attend_to_selected(heads[0], key, value, layout, sizes.scale)
            return layout.unpad(_attend_in_blocks(query, key, value, sizes.scale))
        query, key, value = map(layout.pad, heads)
        return layout.unpad(causal_attention(query, key, value, sizes.scale))

    def whole(x: Tensor, delta: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
        rows = (each if each is None else each.reshape(*ids.shape, -1) for each in (x, delta))
        x, added, *_ = one_layer(*rows, layers[number], by_column, sizes, None)
        return x.flatten(0, 1), added.flatten(0, 1)

    with torch.autocast(ids.device.type, enabled=False):  # types are chosen by hand
        x = trunk.embed_tokens(flat).to(dtype)
        hidden = run_layers(
            x,
            layers,
            attend,
            sizes,
            trunk.norm.weight,
            selected=layout.selected,
            whole=whole if layout.places is None else None,
        )
    assert hidden is not None
    return hidden


def _attend_to_selected(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [B, K, W, D], as values
    value: Tensor,
    layout: TokenLayout,
    scale: float,
) -> Tensor:
    """Attention of the selected tokens alone, [N, H * D]: a reward model reads one of each row."""
    assert layout.wanted is not None
    columns, places = layout.wanted
    padded = query.new_zeros(columns.numel(), *query.shape[1:])
    padded = padded.index_copy(0, places, query.index_select(0, layout.selected))
    hidden = torch.arange(layout.width) > columns[:, :, None]  # [B, P, W]
    bias = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
    out = F.scaled_dot_product_attention(
        padded.unflatten(0, columns.shape).transpose(1, 2),
        key,
        value,
        attn_mask=bias[:, None],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, places)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, a block of queries at a time over the keys up to its last.

    Torch's kernel for CPUs computes the scores of later keys too, and then discards them.
    """
    width = query.shape[2]
    block = max(QUERY_BLOCK, math.ceil(width / MAX_BLOCKS))
    columns = torch.arange(width)
    outs: list[Tensor] = []
    for start in range(0, width, block):
        end = min(start + block, width)
        bias = torch.zeros(end - start, end, dtype=query.dtype)
        bias.masked_fill_(columns[:end] > columns[start:end, None], -torch.inf)
        out = F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=bias,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        # The kernel's output lies as [B, W, heads, D], and is read so afterwards.
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, dim=1).transpose(1, 2)


def on_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function of tokens as it runs on a device: compiled on a GPU."""
    return _compiled(function) if device.type == "cuda" and has_triton() else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for any number of tokens.

    Norms and activations between products are then one kernel each, in both directions. What a
    backward pass can compute again from what it needs anyway is not kept, although a product reads
    it: 1% slower, and a third less memory for activations.
    """
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, VARIANTS)

    def backend(graph: Any, inputs: Any) -> Any:
        inductor = torch._dynamo.lookup_backend("inductor")
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            return inductor(graph, inputs)

    inner = torch.compile(function, backend=backend)

    def run(*args: Any) -> Any:
        for x in args:
            if isinstance(x, Tensor):
                _mark_dynamic(x, x.ndim - 1)
            elif isinstance(x, Rotary):
                _mark_dynamic(x.cos, 1)
                _mark_dynamic(x.sin, 1)
        return inner(*args)

    return run


def _mark_dynamic(x: Tensor, dimensions: int) -> None:
    """The sizes of the first dimensions may be others next time: compile for all."""
    if x.ndim > 1:  # not a norm's weight
        for dimension in range(dimensions):
            torch._dynamo.maybe_mark_dynamic(x, dimension)
