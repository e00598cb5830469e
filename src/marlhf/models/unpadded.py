"""The pass of a Llama on a CPU: no padding, and a last layer for the wanted tokens alone.

A CPU computes whatever it is given, so a padded pass there costs its padding, and whatever the last
layer computes for tokens whose output nobody reads: nearly half of a two-layer reward model. Here
rows follow each other without padding, except in attention, and a layer is a few operations whose
gradients are written out (`llama_grads.py`). `forward.py` has the padded pass, which gives the same
numbers and stays for other families and devices.

Axes: B rows, W columns of a padded batch, T tokens, N picked tokens, P the most that are picked of
one row, D head size.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from marlhf.models.base import Model
from marlhf.models.llama_grads import AfterAttention, NormLinear, Put, RMSNorm, Rotate, Take

FAMILIES = tuple(
    f"{family}For{kind}"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
    for kind in ("CausalLM", "SequenceClassification")
)
"""What is computed here. These differ in biases, windows and norms of heads only."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the length of the longest text in a batch."""
QUERY_BLOCK = 32
"""Causal attention is computed for so many queries at a time, each over the keys up to its last:
torch's kernel for CPUs computes the scores of later keys too, and then discards them."""
MAX_BLOCKS = 4
"""More blocks save little arithmetic and cost a call each."""


def is_plain_llama(model: Model) -> bool:
    """Whether a model is a Llama, Mistral, Qwen 2 or Qwen 3, with no layer replaced.

    Adapters and quantisation replace linear layers, FSDP shards them.
    """
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
        and all(type(m) in (nn.Linear, nn.Embedding) for m in matrices)
        and not any(isinstance(p, DTensor) for p in model.parameters())
    )


def attention_window(attention: Any, config: Any) -> int | None:
    """Qwen sets the window per layer; in Mistral the config's window holds for all layers."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(config, "sliding_window", None)


class StillPlain:
    """Whether a plain Llama computes what its class does to rows of some length, asked each pass.

    Hooks and gradient checkpointing may come and go. Layers must not be replaced: that is noticed
    only where nothing holds on to the old ones.
    """

    def __init__(self, model: Model) -> None:
        attentions = [layer.self_attn for layer in model.base_model.layers]
        windows = [attention_window(attention, model.config) for attention in attentions]
        self._longest = min((w for w in windows if w is not None), default=math.inf)
        self._drops = any(attention.attention_dropout for attention in attentions)
        self._modules = [weakref.ref(module) for module in model.modules()]

    def __call__(self, model: Model, longest: int) -> bool:
        """For the model it was made for."""
        if longest > self._longest or (model.training and self._drops):
            return False
        for module in (ref() for ref in self._modules):
            if module is None:
                return False
            changed = module._forward_hooks or module._forward_pre_hooks
            if changed or module.__dict__.get("gradient_checkpointing"):
                return False
        return True


def in_cpu_floats(model: Model) -> bool:
    """Whether `unpadded_hidden` knows what a model computes in: complex numbers rotate heads."""
    weight = model.base_model.embed_tokens.weight
    floats = weight.is_cpu and weight.dtype in (torch.float32, torch.float64)
    return floats and not torch.is_autocast_enabled("cpu")


class Rows(NamedTuple):
    """Where the tokens of a padded batch are, and which of them are picked."""

    size: tuple[int, int]  # B, W
    places: Tensor  # [T], flat places of the tokens in [B, W]
    picked: Tensor  # [N], which of the tokens are wanted
    picked_places: Tensor  # [N], flat places of the picked tokens in [B, P]
    picked_columns: Tensor  # [B, P], their columns in [B, W]; any where fewer are picked

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, picked: Sequence[tuple[int, int]]) -> Rows:
        """Rows of some lengths in a batch of some width; a (first column, count) picked of each.

        >>> rows = Rows.of([3, 2], width=4, picked=[(1, 2), (0, 1)])
        >>> rows.places.tolist(), rows.picked.tolist()
        ([0, 1, 2, 4, 5], [1, 2, 3])
        >>> rows.picked_places.tolist(), rows.picked_columns.tolist()
        ([0, 1, 2], [[1, 2], [0, 1]])
        """
        columns = torch.arange(width)
        real = columns < torch.tensor(lengths)[:, None]  # [B, W]
        first, count = torch.tensor(picked).T[:, :, None]
        wanted = (columns >= first) & (columns < first + count)  # [B, W]
        places = real.flatten().nonzero().squeeze(1)
        chosen = wanted.flatten()[places].nonzero().squeeze(1)
        order = torch.arange(int(count.max()))
        filled = (order < count).flatten().nonzero().squeeze(1)
        return cls((len(lengths), width), places, chosen, filled, first + order)


def unpadded_hidden(model: Model, ids: Tensor, rows: Rows) -> Tensor:
    """The last hidden states of the picked tokens, row after row: [N, hidden size]."""
    trunk = model.base_model
    x = trunk.embed_tokens(ids.flatten()[rows.places])  # [T, hidden size]
    with torch.no_grad():
        # Of each column once, then each token its column's.
        cos, sin = (
            table[0].chunk(2, dim=1)[0]
            for table in trunk.rotary_emb(x, torch.arange(rows.size[1])[None])
        )
        angles = torch.complex(cos, sin).index_select(0, rows.places % rows.size[1])[:, None]
    for layer in trunk.layers[:-1]:
        x = _layer(layer, x, angles, rows)
    return _norm(trunk.norm, _last_layer(trunk.layers[-1], x, angles, rows))


def _layer(layer: Any, x: Tensor, angles: Tensor, rows: Rows) -> Tensor:
    heads = _heads(layer, ("q_proj", "k_proj", "v_proj"), x, angles)
    query, key, value = _pad(heads, rows.places, rows.size)
    out = _causal_attention(query, key, value, layer.self_attn.scaling)
    return _after_attention(layer, x, _unpad(out, rows.places))


def _last_layer(layer: Any, x: Tensor, angles: Tensor, rows: Rows) -> Tensor:
    """The layer's output at the picked tokens. Only their keys and values need the others."""
    picked, scale = rows.picked, layer.self_attn.scaling
    heads = _heads(layer, ("k_proj", "v_proj"), x, angles)
    key, value = _pad(heads, rows.places, rows.size)
    x = Take.apply(x, picked)
    queries = _heads(layer, ("q_proj",), x, angles[picked])
    later = torch.arange(rows.size[1]) > rows.picked_columns[:, :, None]  # [B, P, W]
    bias = _bias(later, x.dtype)[:, None]
    if rows.picked_columns.shape[1] == 1:
        # The query heads that share keys become rows of one product, [B, KV heads, group, D].
        folded = queries.joined.unflatten(1, (key.shape[1], -1))
        out = _attend(folded, key, value, scale, bias).flatten(1, 2)
    else:
        [padded] = _pad(queries, rows.picked_places, rows.picked_columns.shape)
        out = _unpad(_attend(padded, key, value, scale, bias), rows.picked_places)
    return _after_attention(layer, x, out)


class _Heads(NamedTuple):
    """Queries, keys or values of tokens, or several of them side by side."""

    joined: Tensor  # [T, heads, D]
    counts: list[int]  # of heads of each


def _heads(layer: Any, names: Sequence[str], x: Tensor, angles: Tensor) -> _Heads:
    """Some projections of the layer's input, queries and keys (which come first) rotated.

    Each head of these has its numbers in another order than in the model, which changes no product
    of a query with a key: the two that are rotated together, as a complex number, are neighbours.
    """
    attention, width = layer.self_attn, layer.self_attn.head_dim
    layers = [getattr(attention, name) for name in names]
    counts = [each.out_features // width for each in layers]
    rotated = sum(count for name, count in zip(names, counts) if name != "v_proj")
    order = _neighbours(rotated, sum(counts), width)
    norm = layer.input_layernorm
    parameters = [p for each in layers for p in (each.weight, each.bias)]
    joined = NormLinear.apply(x, norm.weight, norm.variance_epsilon, order, *parameters)
    joined = joined.unflatten(1, (-1, width))
    if "q_norm" in attention._modules:
        norms, order = {"q_proj": attention.q_norm, "k_proj": attention.k_norm}, order[:width]
        parts = [
            _norm(norms[name], part.flatten(0, 1), order).view_as(part) if name in norms else part
            for name, part in zip(names, joined.split(counts, dim=1))
        ]
        joined = torch.cat(parts, dim=1)
    return _Heads(Rotate.apply(joined, angles, rotated), counts)


@cache
def _neighbours(rotated: int, heads: int, width: int) -> Tensor:
    """Where each number of some heads is in the model, which rotates the halves of the first ones.

    >>> _neighbours(1, 2, 4).tolist()
    [0, 2, 1, 3, 4, 5, 6, 7]
    """
    order = torch.arange(heads * width)
    halves = order[: rotated * width].view(rotated, 2, width // 2)
    return torch.cat((halves.transpose(1, 2).flatten(), order[rotated * width :]))


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Each token over those before it: [B, heads, W, D].

    Padding comes last, so causality alone keeps every token from seeing it.
    """
    width = query.shape[2]
    block = max(QUERY_BLOCK, math.ceil(width / MAX_BLOCKS))
    columns = torch.arange(width)
    outs: list[Tensor] = []
    for queries, own in zip(query.split(block, dim=2), columns.split(block)):
        end = min(len(outs) * block + block, width)
        bias = _bias(columns[:end] > own[:, None], query.dtype)
        keys, values = (key, value) if end == width else (key[:, :, :end], value[:, :, :end])
        outs.append(_attend(queries, keys, values, scale, bias))
    # The kernel's output lies as [B, W, heads, D], and is read so afterwards.
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1).transpose(1, 2)


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What attention adds to scores: -inf where a key is hidden, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor) -> Tensor:
    groups = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale, enable_gqa=groups
    )


def _pad(heads: _Heads, places: Tensor, size: Sequence[int]) -> tuple[Tensor, ...]:
    """Heads of tokens as padded batches, [B, heads, W, D]: queries, keys, values apart."""
    x, (height, width) = heads.joined, size
    if x.shape[0] < height * width:
        x = Put.apply(x, places, height * width)
    return x.unflatten(0, (height, width)).transpose(1, 2).split(heads.counts, dim=1)


def _unpad(x: Tensor, places: Tensor) -> Tensor:
    """[B, heads, W, D] -> [T, heads, D]."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if len(places) == len(flat) else Take.apply(flat, places)


def _after_attention(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """The layer's output, from its input [T, hidden size] and from what its heads attended to."""
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    layers = (layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    parameters = [p for each in layers for p in (each.weight, each.bias)]
    return AfterAttention.apply(
        x, attended.flatten(1), norm.weight, norm.variance_epsilon, *parameters
    )


def _norm(norm: Any, x: Tensor, order: Tensor | None = None) -> Tensor:
    weight = norm.weight if order is None else norm.weight[order]
    return RMSNorm.apply(x, weight, norm.variance_epsilon)
