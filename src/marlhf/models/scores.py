"""The score of each token, d log pi(token) / d weights, as far as the last hidden states show it.

A policy gradient is a weighted sum of token scores, and estimators of advantages differ in the
weights alone. So one pass that keeps the scores tells the gradients of all estimators, each for the
price of a matrix product.

Whole scores are as large as the model. Kept here is the part that belongs to a linear map of the
hidden states before the head, h + U h with U = 0: for token t the outer product of
g = d log pi / d h and h itself. Each number of a sketch is p.g times q.h with random vectors p and
q of its own, which keeps inner products in expectation. These gradients have a rank near 3, and
products of few projections of each factor would be off by three times as much.

Axes: N tokens, H hidden size, E estimators, D numbers of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 128
"""Numbers of a sketch that share a seed."""
BLOCKS = 16
"""2048 numbers for a gradient, whose inner products are then off by 4% of the norms."""
CHUNK = 4096
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
    for begin in range(0, len(left), CHUNK):
        part = slice(begin, begin + CHUNK)
        total += weights[:, part] @ ((left[part] @ project[0]) * (right[part] @ project[1]))
    return total / math.sqrt(project.shape[2])


@lru_cache(maxsize=2 * BLOCKS)
def _projections(hidden: int, block: int, seed: int, device: torch.device) -> Tensor:
    """Two random matrices, the same in every process and on every device: [2, H, BLOCK]."""
    generator = torch.Generator().manual_seed((hidden * 1_000_003 + seed) * BLOCKS + block)
    return torch.randn(2, hidden, BLOCK, generator=generator).to(device)
