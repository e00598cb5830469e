"""The pass of a Llama on a GPU by kernels of our own: nothing to compile, little to launch.

A layer is four matrix products, attention, and four kernels between them, with gradients written
out. What the gradients need again and is cheap, norms and activations, is computed again rather
than kept. The last layer computes what follows attention for the wanted tokens alone. The pass
through the model's own modules, in `forward.py`, gives the same numbers and stays for other
families and for models with adapters, shards or hooks.

Axes: B rows, L tokens of a row, T = B * L, N picked tokens, H query heads, D head size. Packed rows
are one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from marlhf.models.base import Model
from marlhf.models.layer_kernels import (
    add_norm,
    attention,
    attention_backward,
    gated,
    gated_backward,
    has_attention,
    norm_backward,
    rotate,
    rotate_backward,
    swiglu,
)


def has_our_layers(model: Model) -> bool:
    """Whether the layers of a plain Llama are those of `kernel_hidden`: not Qwen 3's."""
    layer = model.base_model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    linear = (attention.o_proj, mlp.gate_proj, mlp.down_proj)
    return "q_norm" not in attention._modules and all(m.bias is None for m in linear)


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Queries, keys and values, [B, heads, L, D], and the scale of their products: [B, L, H, D]."""


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass are, and which of them see each other."""

    shape: tuple[int, int]  # B, L
    positions: Tensor  # [T], places within a row
    longest: int  # above all positions
    attend: Attend | None = None
    """None: each token sees those before it in its row, where positions are columns."""


def padded(height: int, width: int, device: torch.device) -> Places:
    """Rows that begin in the first column. Causality alone keeps tokens from seeing padding."""
    positions = torch.arange(width, device=device).repeat(height)
    return Places((height, width), positions, width)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    groups = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=groups
    )
    return out.transpose(1, 2)


def kernel_hidden(
    model: Model, ids: Tensor, places: Places, picked: Tensor, dtype: torch.dtype
) -> Tensor:
    """The last hidden states of the picked ones of tokens [T]: [N, hidden size].

    Matrices are multiplied in `dtype`, which also goes from layer to layer.
    """
    trunk = model.base_model
    with torch.no_grad():
        positions = torch.arange(places.longest, device=ids.device)
        tables = trunk.rotary_emb(trunk.embed_tokens.weight[:1], positions[None])
        cos, sin = (table[0].contiguous() for table in tables)
    x, delta = trunk.embed_tokens(ids).to(dtype), None
    *others, last = trunk.layers
    with torch.autocast(ids.device.type, enabled=False):  # types are chosen by hand
        for layer in others:
            x, attended = _attention(layer, x, delta, places, (cos, sin))
            x, delta = _after_attention(layer, x, attended)
        x, attended = _attention(last, x, delta, places, (cos, sin))
        x, attended = (each.index_select(0, picked) for each in (x, attended))
        x, delta = _after_attention(last, x, attended)
        return Norm.apply(x, delta, trunk.norm.weight, trunk.norm.variance_epsilon)


def kept_bytes(model: Model, tokens: int, dtype: torch.dtype) -> int:
    """Memory that a pass over so many tokens keeps for its gradients."""
    layer = model.base_model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    linear = (attention.q_proj, attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [each.out_features for each in (*linear, mlp.gate_proj, mlp.up_proj)]
    numbers = 2 * attention.q_proj.in_features + sum(sizes)
    return tokens * len(model.base_model.layers) * numbers * dtype.itemsize


def _attention(
    layer: Any, x: Tensor, delta: Tensor | None, places: Places, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """x + delta, and what its heads attended to: [T, hidden size] and [T, H * D]."""
    module, before = layer.self_attn, layer.input_layernorm
    parts = (module.q_proj, module.k_proj, module.v_proj)
    weights, biases = [p.weight for p in parts], [p.bias for p in parts]
    bias = None if biases[0] is None else _joined(biases, x.dtype)
    width, scale = module.head_dim, module.scaling
    options = _Heads(places, rotary, width, before.variance_epsilon, scale)
    inputs = x, delta, before.weight, _joined(weights, x.dtype), bias, options, *weights, *biases
    if places.attend is None and has_attention(x, width, places.longest):
        return NormAttend.apply(*inputs)
    x, query, key, value = NormHeads.apply(*inputs)
    out = (places.attend or _causal_attention)(query, key, value, scale)
    return x, out.reshape(x.shape[0], -1)


def _after_attention(layer: Any, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's two last residuals, whose sum is its output: [T, hidden size] each."""
    mlp, between = layer.mlp, layer.post_attention_layernorm
    linear = (layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    parameters = out, gate, up, down = [each.weight for each in linear]
    cast = [_joined(weights, x.dtype) for weights in ([out], [gate, up], [down])]
    epsilon = between.variance_epsilon
    if torch.is_grad_enabled():
        return AfterAttention.apply(x, attended, between.weight, epsilon, *cast, *parameters)
    out, gate_up, down = cast
    x, normed = add_norm(x, attended @ out.T, between.weight, epsilon, x.dtype)
    return x, gated(normed, gate_up) @ down.T


@torch.no_grad()
def _joined(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights with the same input as one, in the type to multiply in."""
    if len(weights) == 1:
        return weights[0].to(dtype)
    first = weights[0]
    whole = first.new_empty(sum(map(len, weights)), *first.shape[1:], dtype=dtype)
    for part, weight in zip(whole.split([len(w) for w in weights]), weights):
        part.copy_(weight)
    return whole


class _Heads(NamedTuple):
    places: Places
    rotary: tuple[Tensor, Tensor]
    width: int  # of a head
    epsilon: float
    scale: float


class Norm(torch.autograd.Function):
    """The root-mean-square norm of x + delta, in float32 at least: [N, hidden size]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, normed = add_norm(x, delta, weight, epsilon, _sum_type(x))
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return normed

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, unit = norm_backward(grad.contiguous(), x, weight, ctx.epsilon)
        return grad_x, grad_x, (grad * unit).sum(dim=0).to(weight.dtype), None


class NormHeads(torch.autograd.Function):
    """x + delta, and rotated queries, keys and values of its norm. `_project` says from what."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        x, qkv = _project(ctx, *inputs)
        ctx.save_for_backward(x, *inputs[2:4])
        return x, *qkv.transpose(1, 2).split(ctx.heads, dim=1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_sum: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor | None, ...]:
        places, rotary = ctx.options[:2]
        grad = rotate_backward((query, key, value), rotary, places.positions).flatten(1)
        return _project_backward(ctx, grad_sum, grad, *ctx.saved_tensors)


class NormAttend(torch.autograd.Function):
    """`NormHeads` and attention: x + delta, and what its heads attended to, [T, H * D]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, qkv = _project(ctx, *inputs)
        out, lse = attention(qkv, ctx.heads[0], ctx.options.scale)
        ctx.save_for_backward(x, *inputs[2:4], qkv, out, lse)
        return x, out.view(len(x), -1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_sum: Tensor, grad_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        *saved, qkv, out, lse = ctx.saved_tensors
        rotary, scale = ctx.options.rotary, ctx.options.scale
        grad = attention_backward(grad_out.reshape(out.shape), qkv, out, lse, rotary, scale)
        return _project_backward(ctx, grad_sum, grad.view(len(grad_out), -1), *saved)


def _project(
    ctx: Any,
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: _Heads,
    *parameters: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """x + delta, and the rotated heads of its norm, [B, L, H + 2 K, D].

    `weight` and `bias` are the parameters, joined and in the type to multiply in.
    """
    places, rotary, width, epsilon, _ = options
    x, normed = add_norm(x, delta, norm_weight, epsilon, x.dtype)
    qkv = F.linear(normed, weight, bias).unflatten(1, (-1, width))
    ctx.options, ctx.adds = options, delta is not None
    ctx.sizes = [p.shape[0] for p in parameters[:3] if p is not None]
    ctx.heads = [size // width for size in ctx.sizes]
    ctx.dtypes = [None if p is None else p.dtype for p in parameters]
    rotate(qkv, rotary, places.positions, ctx.heads[0] + ctx.heads[1])
    return x, qkv.unflatten(0, places.shape)


def _project_backward(
    ctx: Any, grad_sum: Tensor, grad: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments, from that of the heads before their rotation, [T, out]."""
    epsilon = ctx.options.epsilon
    grad_x, unit = norm_backward(grad @ weight, x, norm_weight, epsilon, grad_sum.contiguous())
    grad_norm, grad_weights, grad_biases = None, (None,) * 3, (None,) * 3
    if ctx.needs_input_grad[2] or any(ctx.needs_input_grad[6:9]):
        grad_norm, whole = _normed_weight_grads(grad, unit, weight, norm_weight)
        grad_weights = whole.split(ctx.sizes)
    if any(ctx.needs_input_grad[9:]):
        grad_biases = grad.sum(dim=0, dtype=_sum_type(grad)).split(ctx.sizes)
    grad_delta = grad_x if ctx.adds else None
    parts = _in_types((*grad_weights, *grad_biases), ctx.dtypes)
    return grad_x, grad_delta, grad_norm, None, None, None, *parts


class AfterAttention(torch.autograd.Function):
    """A layer from its heads' output on: projection, residual, norm and SwiGLU.

    Gives what the SwiGLU is to be added to, and the SwiGLU. `out`, `gate_up` and `down` are the
    parameters, joined and in the type to multiply in.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        norm_weight: Tensor,
        epsilon: float,
        out: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, normed = add_norm(x, attended @ out.T, norm_weight, epsilon, x.dtype)
        gates = normed @ gate_up.T
        ctx.save_for_backward(x, attended, gates, norm_weight, out, gate_up, down)
        ctx.epsilon, ctx.dtypes = epsilon, [p.dtype for p in parameters]
        return x, swiglu(gates) @ down.T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_sum: Tensor, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, attended, gates, norm_weight, out, gate_up, down = ctx.saved_tensors
        learns = ctx.needs_input_grad[2] or any(ctx.needs_input_grad[7:])
        grad_gates, product = gated_backward(grad, down, gates)
        grad_down = _weight_grad(grad, product) if learns else None
        del product
        grad_x, unit = norm_backward(
            grad_gates @ gate_up, x, norm_weight, ctx.epsilon, grad_sum.contiguous()
        )
        grad_norm = grad_gate = grad_up = grad_out = None
        if learns:
            grad_norm, whole = _normed_weight_grads(grad_gates, unit, gate_up, norm_weight)
            grad_gate, grad_up = whole.chunk(2)
            grad_out = _weight_grad(grad_x, attended)
        parts = _in_types((grad_out, grad_gate, grad_up, grad_down), ctx.dtypes)
        return grad_x, grad_x @ out, grad_norm, None, None, None, None, *parts


def _normed_weight_grads(
    grad: Tensor, unit: Tensor, weight: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a norm's weight and of the weights that follow it.

    For y = W (n * u), with `unit` u and `grad` that of y, both come from the sum over tokens of
    grad outer u, which is as small as W: a sum of its own over tokens would read them all again.
    """
    outer = _weight_grad(grad, unit)
    grad_norm = (outer * weight).sum(dim=0)
    return grad_norm.to(norm_weight.dtype), outer.mul_(norm_weight)


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The sum over tokens of the outer products of their rows, in float32 at least."""
    if grad.is_cuda and torch.version.hip is None and grad.dtype != _sum_type(grad):
        return torch.mm(grad.T, x, out_dtype=_sum_type(grad))
    return (grad.T @ x).to(_sum_type(grad))


def _in_types(
    grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    return [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes)]


def _sum_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
