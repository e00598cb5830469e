"""Log-probs of chosen tokens straight from hidden states, a few positions at a time.

Logits are most of the memory of a small model: 16384 positions of 49152 tokens are 3 GiB in
float32, several times over in a backward pass. Here they exist for a few positions only, and are
computed a second time for the gradients rather than kept.

And the score of each token, d log pi(token) / d weights, as far as the last hidden states show it.
A policy gradient is a weighted sum of token scores, and estimators of advantages differ in the
weights alone. So one pass that keeps the scores tells the gradients of all estimators, each for the
price of a matrix product.

Whole scores are as large as the model. Kept here is the part that belongs to a linear map of the
hidden states before the head, h + U h with U = 0: for token t the outer product of
g = d log pi / d h and h itself. Each number of a sketch is p.g times q.h with random vectors p and
q of its own, which keeps inner products in expectation. These gradients have a rank near 3, and
products of few projections of each factor would be off by three times as much.

Axes: N positions or tokens, H hidden size, V vocabulary, E estimators, D numbers of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from marlhf.kernels import fused, pick

CHUNK = 1 << 26
"""Logits in a chunk. Larger chunks are no faster; much smaller ones are slower."""
CHUNK_ROWS = 1024
"""Positions in a chunk at least: with each the gradient of the whole head is read and written."""
SMALL = 1 << 20
"""Logits that are kept for the backward pass: so few are cheaper to keep than to compute again."""


class LogitRule(NamedTuple):
    """What a model makes of its head's output x: scale * x, or cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    cap: float | None = None


UNCHANGED = LogitRule()


def chosen_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    tokens: Tensor,  # [N]
    *,
    rule: LogitRule = UNCHANGED,
    temperature: float = 1.0,
    entropy: bool = False,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `tokens` and, without gradients, the entropy at each position: both [N].

    `dtype` is what logits are computed in, the hidden states' own unless given. Sums over the
    vocabulary and the gradient of the head are float32 in any case. `chunk` is the number of
    logits that exist at once.
    """
    dtype = dtype or hidden.dtype
    # Factors go into the hidden states, which are small, so that no pass over logits is needed.
    factor = rule.scale / (rule.cap or temperature)
    outer = None if rule.cap is None else rule.cap / temperature
    if factor != 1.0:
        hidden = hidden * factor
        bias = None if bias is None else bias * factor
    if chunk is None:
        rows = max(CHUNK_ROWS, CHUNK // len(weight))
        # Equal chunks: a small one at the end would cost nearly as much as the others.
        rows = max(1, math.ceil(len(hidden) / max(1, round(len(hidden) / rows))))
    else:
        rows = max(1, chunk // len(weight))
    options = _Options(outer, entropy, rows)
    logprobs, spread = _ChosenLogprobs.apply(hidden.to(dtype), weight, bias, tokens, options)
    return logprobs, spread if entropy else None


def fit_rule(x: Tensor, y: Tensor) -> LogitRule | None:
    """The rule by which a model turned x into y, both [V]; None if it is of another kind.

    x must hold `probe`'s numbers: large ones tell a cap, small ones the scale.
    """
    if y.shape != x.shape:
        return None
    x, y = x.double().cpu(), y.double().cpu()
    small, large = int(x.abs().argmin()), int(x.abs().argmax())
    scale, most = float(y[small] / x[small]), float(y[large] / x[large].sign())
    for rule in (LogitRule(scale), LogitRule(scale, most)):
        expected = scale * x
        if rule.cap:
            expected = rule.cap * (expected / rule.cap).tanh()
        if torch.allclose(y, expected, rtol=1e-4, atol=0):
            # The scale is a number that someone wrote down: not 0.99999994.
            return rule._replace(scale=float(f"{rule.scale:.6g}"))
    return None


def probe(size: int, device: torch.device) -> Tensor:
    """Logits to see what a model does to logits: from a thousandth to a million, [V]."""
    x = torch.logspace(-3, 6, size, device=device)
    x[1::2] *= -1
    return x


class _Options(NamedTuple):
    outer: float | None  # what a tanh of the head's output is multiplied by
    entropy: bool
    rows: int  # positions in a chunk


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=wide)
        spread = hidden.new_empty(len(hidden) if options.entropy else 0, dtype=wide)
        head = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        # Kept where so few: exponentials of all logits, [N, V], and their sums, [N, 1].
        weights = total = None
        for part in _parts(len(hidden), options.rows):
            logits, _ = _logits(hidden[part], *head, options.outer)
            if fused(logits) and not options.entropy:
                logprobs[part] = pick(logits, tokens[part])
                del logits  # not beside the next
                continue
            small = options.outer is None and logits.numel() <= SMALL
            if small and len(logits) == len(hidden) and not options.entropy:
                # As log_softmax, but the exponentials, which take most of the time, are left.
                below = logits.to(wide) - logits.amax(dim=1, keepdim=True)
                chosen = below.gather(1, tokens[:, None])
                weights = below.exp_()
                total = weights.sum(dim=1, keepdim=True)
                logprobs = (chosen - total.log()).squeeze(1)
                break
            whole = torch.log_softmax(logits, dim=1, dtype=wide)
            logprobs[part] = whole.gather(1, tokens[part, None]).squeeze(1)
            if options.entropy:
                spread[part] = -(whole.exp() * whole).sum(dim=1)
        ctx.save_for_backward(hidden, weight, bias, tokens, logprobs, weights, total)
        ctx.mark_non_differentiable(spread)
        ctx.options = options
        return logprobs, spread

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """With p the probabilities, d logprob / d logits is onehot - p; here its negative."""
        hidden, weight, bias, tokens, logprobs, weights, total = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        wide = logprobs.dtype
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if for_bias else None
        head = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        for part in _parts(len(hidden), ctx.options.rows):
            state, minus = hidden[part], -grads[0][part, None]
            if weights is None:
                logits, slope = _logits(state, *head, ctx.options.outer)
                change = torch.softmax(logits, dim=1, dtype=logits.dtype)
                del logits
            else:
                change, slope = (weights / total).to(hidden.dtype), None
            # The chosen token's p - 1 from float32: nearly 0 where the model is sure.
            chosen = torch.expm1(logprobs[part, None]).to(change.dtype)
            change.scatter_(1, tokens[part, None], chosen)
            if slope is not None:
                change = change.mul_(slope).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (change @ head[0]) * minus
            if grad_weight is not None:
                _add_product(grad_weight, change.T, (state * minus).to(change.dtype))
            if grad_bias is not None:
                grad_bias += (minus.to(change.dtype).T @ change)[0]
            del change
        return grad_hidden, grad_weight, grad_bias, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a tensor of a wider type, in one call where a GPU can."""
    if total.is_cuda and torch.version.hip is None and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, outer: float | None
) -> tuple[Tensor, Tensor | None]:
    """Logits [n, V] and, under a cap, their slope in what the head said."""
    logits = linear(hidden, weight, bias)
    if outer is None:
        return logits, None
    # In float32: tanh in bfloat16 is coarse where it saturates.
    bent = logits.to(torch.promote_types(logits.dtype, torch.float32)).tanh_()
    return outer * bent, bent.square_().neg_().add_(1).mul_(outer)


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, count, rows)]


BLOCK = 128
"""Numbers of a sketch that share a seed."""
BLOCKS = 16
"""2048 numbers for a gradient, whose inner products are then off by 4% of the norms."""
PROJECTED = 4096
"""Tokens that are projected at a time."""


class TokenScores:
    """Watches one pass of a policy, for the scores of its tokens.

    Give it to `token_stats`, and ask for `gradients` before any loss of the log-probs goes
    backward: scores are of the log-probs themselves, so a loss that clips tokens hides none.
    """

    def __init__(self, seeds: Sequence[int] | None = tuple(range(BLOCKS))) -> None:
        self.seeds = seeds  # of the blocks of a sketch; None keeps the whole factors
        self._watched: tuple[Tensor, Tensor, Tensor | None] | None = None

    def watch(self, hidden: Tensor, logprobs: Tensor, real: Tensor | None = None) -> None:
        """The head's input [N, H] and log-probs [N]; or both with padding, and who is `real`."""
        self._watched = hidden, logprobs, real

    def gradients(self, weights: Tensor) -> Tensor:
        """The sum of all token scores by each estimator's weights: [E, N] -> [E, D]."""
        assert self._watched is not None, "no pass was watched"
        hidden, logprobs, real = self._watched
        self._watched = None
        # Through the head alone. The graph stays for the loss.
        [grad] = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)
        left, right = grad.detach(), hidden.detach()
        if real is not None:
            left, right = left.flatten(0, 1)[real], right.flatten(0, 1)[real]
        return sketch(left.float(), right.float(), weights.float(), self.seeds)


@torch.no_grad()
def sketch(left: Tensor, right: Tensor, weights: Tensor, seeds: Sequence[int] | None) -> Tensor:
    """Sums of outer products of [N, H] and [N, H], weighted by [E, N]: [E, H * H], or [E, D]."""
    if seeds is None:
        return ((weights[:, :, None] * left).transpose(1, 2) @ right).flatten(1)
    drawn = [_projections(right.shape[1], i, seed, right.device) for i, seed in enumerate(seeds)]
    project = torch.cat(drawn, dim=2)  # [2, H, D]
    total = torch.zeros(len(weights), project.shape[2], device=right.device)
    for begin in range(0, len(left), PROJECTED):
        part = slice(begin, begin + PROJECTED)
        total += weights[:, part] @ ((left[part] @ project[0]) * (right[part] @ project[1]))
    return total / math.sqrt(project.shape[2])


@lru_cache(maxsize=2 * BLOCKS)
def _projections(hidden: int, block: int, seed: int, device: torch.device) -> Tensor:
    """Two random matrices, the same in every process and on every device: [2, H, BLOCK]."""
    generator = torch.Generator().manual_seed((hidden * 1_000_003 + seed) * BLOCKS + block)
    return torch.randn(2, hidden, BLOCK, generator=generator).to(device)
