"""The pass of a Llama on a CPU: no padding, and a last layer for the wanted tokens alone.

A CPU computes whatever it is given, so a padded pass there costs its padding, and whatever the last
layer computes for tokens whose output nobody reads: nearly half of a two-layer reward model. Here
rows follow each other without padding, except in attention, and the operations between the matrix
products have their gradients written out. `forward.py` has the padded pass, which gives the same
numbers and stays for other families and devices.

Axes: B rows, W columns of a padded batch, T tokens, N picked tokens, P the most that are picked of
one row, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from marlhf.models.base import Model

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
    rotary = model.config.rope_parameters.get("rope_type", "default")
    matrices = (m for m in model.modules() if hasattr(m, "weight") and m.weight.ndim == 2)
    return (
        model.config.hidden_act == "silu"
        and rotary not in LENGTH_DEPENDENT_ROPE
        and all(type(m) in (nn.Linear, nn.Embedding) for m in matrices)
        and not any(isinstance(p, DTensor) for p in model.parameters())
    )


def attention_window(attention: Any, config: Any) -> int | None:
    """Qwen sets the window per layer; in Mistral the config's window holds for all layers."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(config, "sliding_window", None)


def fits(model: Model, longest: int) -> bool:
    """Whether `unpadded_hidden` computes what this model does to rows of at most some length."""
    if not is_plain_llama(model) or model.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if hooked or model.is_gradient_checkpointing:
        return False
    attentions = [layer.self_attn for layer in model.base_model.layers]
    windows = [attention_window(attention, model.config) for attention in attentions]
    return all(window is None or longest <= window for window in windows) and not (
        model.training and any(attention.attention_dropout for attention in attentions)
    )


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
        # Angles of each column once, then each token its column's: [T, 1, D].
        tables = trunk.rotary_emb(x, torch.arange(rows.size[1])[None])
        columns = rows.places % rows.size[1]
        cos, sin = (table[0].index_select(0, columns)[:, None] for table in tables)
        # Rotation is x * cos + rotate_half(x) * sin, where rotate_half negates its first half.
        # Negating the sines instead leaves a plain roll in place of rotate_half.
        sin[..., : sin.shape[2] // 2].neg_()
    for layer in trunk.layers[:-1]:
        x = _layer(layer, x, cos, sin, rows)
    return _norm(trunk.norm, _last_layer(trunk.layers[-1], x, cos, sin, rows))


def _layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    attention = layer.self_attn
    normed = _norm(layer.input_layernorm, x)
    names = ("q_proj", "k_proj", "v_proj")
    query, key, value = (_heads(attention, name, normed) for name in names)
    query, key = _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
    query, key, value = (_pad(each, rows.places, rows.size) for each in (query, key, value))
    out = _causal_attention(query, key, value, attention.scaling)
    x = x + attention.o_proj(_unpad(out, rows.places).flatten(1))
    return x + _feed_forward(layer, x)


def _last_layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    """The layer's output at the picked tokens. Only their keys and values need the others."""
    attention, picked = layer.self_attn, rows.picked
    normed = _norm(layer.input_layernorm, x)
    query = _heads(attention, "q_proj", _Take.apply(normed, picked))
    key, value = (_heads(attention, name, normed) for name in ("k_proj", "v_proj"))
    query = _Rotate.apply(query, cos[picked], sin[picked])
    key = _Rotate.apply(key, cos, sin)
    key, value = (_pad(each, rows.places, rows.size) for each in (key, value))
    visible = torch.arange(rows.size[1]) <= rows.picked_columns[:, :, None]  # [B, P, W]
    bias = torch.where(visible, 0.0, -torch.inf).to(query.dtype)[:, None]
    if rows.picked_columns.shape[1] == 1:
        # The query heads that share keys become rows of one product, [B, KV heads, group, D].
        folded = query.view(len(query), key.shape[1], -1, query.shape[2])
        out = _attend(folded, key, value, attention.scaling, bias).flatten(1)
    else:
        padded = _pad(query, rows.picked_places, rows.picked_columns.shape)
        out = _attend(padded, key, value, attention.scaling, bias)
        out = _unpad(out, rows.picked_places).flatten(1)
    x = _Take.apply(x, picked) + attention.o_proj(out)
    return x + _feed_forward(layer, x)


def _heads(attention: Any, name: str, x: Tensor) -> Tensor:
    """Queries, keys or values: [T, heads, D]."""
    out = getattr(attention, name)(x).view(len(x), -1, attention.head_dim)
    norm = getattr(attention, {"q_proj": "q_norm", "k_proj": "k_norm"}.get(name, ""), None)
    return out if norm is None else _norm(norm, out.flatten(0, 1)).view_as(out)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Each token over those before it: [B, heads, W, D].

    Padding comes last, so causality alone keeps every token from seeing it.
    """
    width = query.shape[2]
    block = max(QUERY_BLOCK, math.ceil(width / MAX_BLOCKS))
    columns = torch.arange(width)
    outs: list[Tensor] = []
    for start in range(0, width, block):
        end = min(start + block, width)
        visible = columns[:end] <= columns[start:end, None]
        bias = torch.where(visible, 0.0, -torch.inf).to(query.dtype)
        queries, keys, values = query[:, :, start:end], key[:, :, :end], value[:, :, :end]
        outs.append(_attend(queries, keys, values, scale, bias))
    # The kernel's output lies as [B, W, heads, D], and is read so afterwards.
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor) -> Tensor:
    groups = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale, enable_gqa=groups
    )


def _pad(x: Tensor, places: Tensor, size: Sequence[int]) -> Tensor:
    """Heads of tokens as a padded batch: [T, heads, D] -> [B, heads, W, D]."""
    height, width = size
    if len(x) < height * width:
        x = _Put.apply(x, places, height * width)
    return x.view(height, width, *x.shape[1:]).transpose(1, 2)


def _unpad(x: Tensor, places: Tensor) -> Tensor:
    """[B, heads, W, D] -> [T, heads, D]."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if len(places) == len(flat) else _Take.apply(flat, places)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    x, mlp = _norm(layer.post_attention_layernorm, x), layer.mlp
    return mlp.down_proj(_SwiGLU.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def _norm(norm: Any, x: Tensor) -> Tensor:
    return _RMSNorm.apply(x, norm.weight, norm.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    """x over its root mean square, times a weight: [T, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + epsilon)  # [T, 1]
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        product = grad * unit
        share = (product @ weight / len(weight))[:, None]  # of the gradient that lies along x
        grad_x = torch.addcmul(grad * weight, unit, share, value=-1).mul_(scale)
        return grad_x, product.sum(dim=0), None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up: [T, width]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        sigmoid = gate.sigmoid()
        ctx.save_for_backward(gate, up, sigmoid)
        return (gate * sigmoid).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        gate, up, sigmoid = ctx.saved_tensors
        silu = gate * sigmoid
        # d silu = sigmoid * (1 + gate * (1 - sigmoid)) = silu + sigmoid * (1 - silu)
        slope = torch.addcmul(silu + sigmoid, silu, sigmoid, value=-1)
        return slope.mul_(up).mul_(grad), silu.mul_(grad)


class _Rotate(torch.autograd.Function):
    """Rotary embedding: [T, heads, D] by angles [T, 1, D]; the first half of the sines negated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[2] // 2, dims=2), sin)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[2] // 2
        return (grad * cos).add_((grad * sin).roll(half, dims=2)), None, None


class _Take(torch.autograd.Function):
    """Some rows of a tensor, each at most once, which autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(x)
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        [places] = ctx.saved_tensors
        return _put(grad, places, ctx.size), None


class _Put(torch.autograd.Function):
    """The reverse of `_Take`: rows at their places in a larger tensor, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return _put(x, places, size)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        [places] = ctx.saved_tensors
        return grad.index_select(0, places), None, None


def _put(x: Tensor, places: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, *x.shape[1:]).index_copy_(0, places, x)
