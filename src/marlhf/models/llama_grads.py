"""The operations of a Llama's layer on a CPU, few and large, with their gradients written out.

For a small model a call costs as much as its arithmetic, and autograd adds a node to each. Here the
norm before some linear layers, the layers themselves and what follows them are one node, nothing is
kept that the gradients do not need, and what can be is computed on weights rather than on tokens.

Axes: T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def _unit(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, [T, width]; and what x was multiplied by, [T, 1]."""
    size = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    scale = size.mul_(size).mul_(1 / x.shape[1]).add_(epsilon).rsqrt_()
    return x * scale, scale


def _unit_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """The gradient of `_unit`'s x: without the part that lies along x."""
    along = (grad * unit).sum(dim=1, keepdim=True)
    return torch.addcmul(grad, unit, along, value=-1 / unit.shape[1]).mul_(scale)


def _joined_linear(
    unit: Tensor,
    norm_weight: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Any],
    order: Tensor | None = None,
) -> Tensor:
    """Layers with the same input as one product, outputs in some order: [T, in] -> [T, out].

    The norm's weight multiplies the columns of theirs, which are fewer numbers than the tokens'.
    """
    bias = None if biases[0] is None else _join(biases, order)
    return F.linear(unit, _join(weights, order) * norm_weight, bias)


def _join(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    return joined if order is None else joined.index_select(0, order)


class _LinearGrads(NamedTuple):
    unit: Tensor  # [T, in]
    norm_weight: Tensor
    layers: list[Tensor | None]  # weight and bias of each


def _joined_linear_backward(
    grad: Tensor,
    unit: Tensor,
    norm_weight: Tensor,
    weights: Sequence[Tensor],
    order: Tensor | None = None,
    *,
    biased: bool,
) -> _LinearGrads:
    joined, sizes = _join(weights, order), [weight.shape[0] for weight in weights]
    product = grad.T @ unit  # as large as the weights

    def apart(x: Tensor) -> Sequence[Tensor]:
        x = x if order is None else torch.empty_like(x).index_copy_(0, order, x)
        return x.split(sizes)

    biases = apart(grad.sum(dim=0)) if biased else [None] * len(sizes)
    return _LinearGrads(
        grad @ (joined * norm_weight),
        (product * joined).sum(dim=0),
        [each for pair in zip(apart(product * norm_weight), biases) for each in pair],
    )


class RMSNorm(torch.autograd.Function):
    """x over its root mean square, times a weight: [T, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        unit, scale = _unit(x, epsilon)
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).sum(dim=0)
        return _unit_backward(grad * weight, unit, scale), grad_weight, None


class NormLinear(torch.autograd.Function):
    """Linear layers (weight and bias of each) of `RMSNorm`, their outputs in some order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, epsilon: float, order: Tensor, *layers: Any
    ) -> Tensor:
        weights = layers[::2]
        unit, scale = _unit(x, epsilon)
        ctx.save_for_backward(unit, scale, norm_weight, *weights)
        ctx.order = order
        return _joined_linear(unit, norm_weight, weights, layers[1::2], order)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        unit, scale, norm_weight, *weights = ctx.saved_tensors
        grads = _joined_linear_backward(
            grad, unit, norm_weight, weights, ctx.order, biased=any(ctx.needs_input_grad[5::2])
        )
        grad_x = _unit_backward(grads.unit, unit, scale)
        return grad_x, grads.norm_weight, None, None, *grads.layers


class AfterAttention(torch.autograd.Function):
    """A layer from its heads' output on: projection, residual, norm, SwiGLU, residual."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, norm_weight: Tensor, epsilon: float, *layers: Any
    ) -> Tensor:
        out, gate, up, down = (layers[i : i + 2] for i in range(0, 8, 2))  # weight and bias
        x = F.linear(attended, *out).add_(x)
        unit, scale = _unit(x, epsilon)
        # Not joined: operations on halves of rows take longer than two calls do.
        gate, gate_weight = _joined_linear(unit, norm_weight, gate[:1], gate[1:]), gate[0]
        up, up_weight = _joined_linear(unit, norm_weight, up[:1], up[1:]), up[0]
        sigmoid = gate.sigmoid()
        product = (gate * sigmoid).mul_(up)
        inputs = (attended, unit, scale, norm_weight, gate, up, sigmoid, product)
        ctx.save_for_backward(*inputs, out[0], gate_weight, up_weight, down[0])
        return F.linear(product, *down).add_(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        attended, unit, scale, norm_weight, gate, up, sigmoid, product, *weights = ctx.saved_tensors
        out_weight, gate_weight, up_weight, down_weight = weights
        out_biased, _, gate_biased, _, up_biased, _, down_biased = ctx.needs_input_grad[5:]
        grad_gate, grad_up = _swiglu_backward(grad @ down_weight, gate, up, sigmoid)
        of_gate = _joined_linear_backward(
            grad_gate, unit, norm_weight, [gate_weight], biased=gate_biased
        )
        of_up = _joined_linear_backward(grad_up, unit, norm_weight, [up_weight], biased=up_biased)
        grad_x = _unit_backward(of_gate.unit.add_(of_up.unit), unit, scale).add_(grad)
        return (
            grad_x,
            grad_x @ out_weight,
            of_gate.norm_weight.add_(of_up.norm_weight),
            None,
            grad_x.T @ attended,
            grad_x.sum(dim=0) if out_biased else None,
            *of_gate.layers,
            *of_up.layers,
            grad.T @ product,
            grad.sum(dim=0) if down_biased else None,
        )


def _swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, sigmoid: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, from that of silu(gate) * up: [T, width] each."""
    silu = gate * sigmoid
    # d silu = sigmoid * (1 + gate * (1 - sigmoid)) = silu + sigmoid * (1 - silu)
    slope = torch.addcmul(silu + sigmoid, silu, sigmoid, value=-1)
    return slope.mul_(up).mul_(grad), silu.mul_(grad)


class Rotate(torch.autograd.Function):
    """Rotary embedding of the first heads, [T, heads, D], by complex numbers [T, 1, D / 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.heads = heads
        return _rotate(x, angles, heads)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        [angles] = ctx.saved_tensors
        return _rotate(grad.contiguous(), angles.conj_physical(), ctx.heads), None, None


def _rotate(x: Tensor, angles: Tensor, heads: int) -> Tensor:
    out = torch.empty_like(x)
    out[:, heads:] = x[:, heads:]
    source, target = (
        torch.view_as_complex(each[:, :heads].unflatten(2, (-1, 2))) for each in (x, out)
    )
    torch.mul(source, angles, out=target)
    return out


class Take(torch.autograd.Function):
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


class Put(torch.autograd.Function):
    """The reverse of `Take`: rows at their places in a larger tensor, zeros elsewhere."""

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
