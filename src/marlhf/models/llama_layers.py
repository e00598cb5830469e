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

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    normed_weight_grads,
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
    layers = list(trunk.layers)
    with torch.autocast(ids.device.type, enabled=False):  # types are chosen by hand
        for i, (layer, own) in enumerate(zip(layers, _matrices(layers, dtype))):
            x, attended = _attention(layer, own, x, delta, places, (cos, sin))
            if i == len(layers) - 1:
                x, attended = (each.index_select(0, picked) for each in (x, attended))
            x, delta = _after_attention(layer, own, x, attended)
        return Norm.apply(x, delta, trunk.norm.weight, trunk.norm.variance_epsilon)


def kept_bytes(model: Model, tokens: int, dtype: torch.dtype) -> int:
    """Memory that a pass over so many tokens keeps for its gradients."""
    layer = model.base_model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    linear = (attention.q_proj, attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [each.out_features for each in (*linear, mlp.gate_proj, mlp.up_proj)]
    numbers = 2 * attention.q_proj.in_features + sum(sizes)
    return tokens * len(model.base_model.layers) * numbers * dtype.itemsize


class _Matrices(NamedTuple):
    """Those of a layer as they are multiplied: those with the same input as one."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor


CAST_NUMBERS = 1 << 25
"""Weights that are cast together: a kernel for each of a small model takes long to launch."""


def _matrices(layers: Sequence[Any], dtype: torch.dtype) -> Iterator[_Matrices]:
    """The weights of each layer in the type to multiply in."""
    numbers = sum(p.numel() for p in layers[0].parameters())
    together = max(1, CAST_NUMBERS // numbers)
    for start in range(0, len(layers), together):
        yield from _cast(layers[start : start + together], dtype)


@torch.no_grad()
def _cast(layers: Iterable[Any], dtype: torch.dtype) -> list[_Matrices]:
    copies: list[Tensor] = []
    originals: list[Tensor] = []

    def joined(*parts: Tensor) -> Tensor:
        first = parts[0]
        if len(parts) == 1 and first.dtype == dtype:
            return first
        whole = first.new_empty(sum(map(len, parts)), *first.shape[1:], dtype=dtype)
        copies.extend(whole.split([len(part) for part in parts]))
        originals.extend(parts)
        return whole

    found: list[_Matrices] = []
    for layer in layers:
        mlp, out = layer.mlp, layer.self_attn.o_proj
        heads = _heads_of(layer)
        found.append(
            _Matrices(
                joined(*(each.weight for each in heads)),
                None if heads[0].bias is None else joined(*(each.bias for each in heads)),
                joined(out.weight),
                joined(mlp.gate_proj.weight, mlp.up_proj.weight),
                joined(mlp.down_proj.weight),
            )
        )
    if copies:
        torch._foreach_copy_(copies, originals)  # pyright: ignore[reportPrivateImportUsage]
    return found


def _heads_of(layer: Any) -> tuple[Any, Any, Any]:
    module = layer.self_attn
    return module.q_proj, module.k_proj, module.v_proj


def _attention(
    layer: Any,
    matrices: _Matrices,
    x: Tensor,
    delta: Tensor | None,
    places: Places,
    rotary: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """x + delta, and what its heads attended to: [T, hidden size] and [T, H * D]."""
    module, before = layer.self_attn, layer.input_layernorm
    parts = _heads_of(layer)
    weights, biases = [p.weight for p in parts], [p.bias for p in parts]
    width, scale = module.head_dim, module.scaling
    options = _Heads(places, rotary, width, before.variance_epsilon, scale)
    joined = matrices.qkv, matrices.qkv_bias
    inputs = x, delta, before.weight, *joined, options, *weights, *biases
    if places.attend is None and has_attention(x, width, places.longest):
        return NormAttend.apply(*inputs)
    x, query, key, value = NormHeads.apply(*inputs)
    out = (places.attend or _causal_attention)(query, key, value, scale)
    return x, out.reshape(x.shape[0], -1)


def _after_attention(
    layer: Any, matrices: _Matrices, x: Tensor, attended: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The layer's two last residuals, whose sum is its output: [T, hidden size] each.

    Of frozen weights it is one, and x is written over: products are added to it where they are
    computed. Passes of weights that learn round as those with gradients do, which they are compared
    with.
    """
    mlp, between = layer.mlp, layer.post_attention_layernorm
    linear = (layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    parameters = [each.weight for each in linear]
    out, gate_up, down = matrices[2:]
    epsilon = between.variance_epsilon
    if torch.is_grad_enabled():
        return AfterAttention.apply(
            x, attended, between.weight, epsilon, out, gate_up, down, *parameters
        )
    frozen = not any(each.requires_grad for each in parameters)
    delta = None
    if frozen:
        x.addmm_(attended, out.T)
    else:
        delta = attended @ out.T
    x, normed = add_norm(x, delta, between.weight, epsilon, x.dtype)
    product = gated(normed, gate_up)
    if frozen:
        return x.addmm_(product, down.T), None
    return x, product @ down.T


class _Heads(NamedTuple):
    places: Places
    rotary: tuple[Tensor, Tensor]
    width: int  # of a head
    epsilon: float
    scale: float


class Norm(torch.autograd.Function):
    """The root-mean-square norm of x + delta, in float32 at least: [N, hidden size]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> Tensor:
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
        x, qkv = _project(ctx, *inputs, by_attention=False)
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
        x, qkv = _project(ctx, *inputs, by_attention=True)
        rotary, scale = ctx.options.rotary, ctx.options.scale
        out, lse = attention(qkv, ctx.heads[0], scale, rotary, keep=any(ctx.needs_input_grad))
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
    by_attention: bool,
) -> tuple[Tensor, Tensor]:
    """x + delta, and the heads of its norm, [B, L, H + 2 K, D].

    They are rotated, of queries and keys only the keys where attention rotates the queries.
    `weight` and `bias` are the parameters, joined and in the type to multiply in.
    """
    places, rotary, width, epsilon, _ = options
    x, normed = add_norm(x, delta, norm_weight, epsilon, x.dtype)
    qkv = F.linear(normed, weight, bias).unflatten(1, (-1, width))
    ctx.options, ctx.adds = options, delta is not None
    ctx.sizes = [p.shape[0] for p in parameters[:3] if p is not None]
    ctx.heads = [size // width for size in ctx.sizes]
    ctx.dtypes = [None if p is None else p.dtype for p in parameters]
    queries, keys, _ = ctx.heads
    which = range(queries if by_attention else 0, queries + keys)
    rotate(qkv, rotary, places.positions, which)
    return x, qkv.unflatten(0, places.shape)


def _project_backward(
    ctx: Any, grad_sum: Tensor, grad: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments, from that of the heads before their rotation, [T, out]."""
    epsilon = ctx.options.epsilon
    grad_x, unit = norm_backward(grad @ weight, x, norm_weight, epsilon, grad_sum.contiguous())
    grad_norm, grad_weights, grad_biases = None, (None,) * 3, (None,) * 3
    if ctx.needs_input_grad[2] or any(ctx.needs_input_grad[6:9]):
        grad_norm, whole = normed_weight_grads(_weight_grad(grad, unit), weight, norm_weight)
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
            grad_norm, whole = normed_weight_grads(
                _weight_grad(grad_gates, unit), gate_up, norm_weight
            )
            grad_gate, grad_up = whole.chunk(2)
            grad_out = _weight_grad(grad_x, attended)
        parts = _in_types((grad_out, grad_gate, grad_up, grad_down), ctx.dtypes)
        return grad_x, grad_x @ out, grad_norm, None, None, None, None, *parts


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
