"""The score of each token, d log pi(token) / d weights, as far as the last hidden states show it.

A policy gradient is a weighted sum of token scores, and estimators of advantages differ in the
weights alone. So one pass that keeps the scores tells the gradients of all estimators, each for the
price of a matrix product.

Whole scores are as large as the model. Kept here is the part that belongs to a linear map of the
hidden states before the head, h + U h with U = 0: for token t the outer product of
g = d log pi / d h and h itself. Both factors are projected by fixed random matrices, which keeps
inner products in expectation.

Axes: N tokens, H hidden size, E estimators, D = size * size numbers of a sketch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIZE = 24
"""Projections of each factor: 576 numbers for a gradient, whose inner products are then off by 4%
of the norms, much less than batches differ."""


class TokenScores:
    """Watches one pass of a policy, and keeps both factors of its tokens' scores.

    Give it to `token_stats`, call `backward` on a loss of the log-probs, then ask for `gradients`.
    What the loss did to each token's log-prob is divided out, so any loss will do in which every
    log-prob has a part.
    """

    def __init__(self, size: int | None = SIZE) -> None:
        self.size = size  # None keeps the whole factors
        self._hidden = self._hidden_grad = self._logprob_grad = torch.empty(0)

    def watch(self, hidden: Tensor, logprobs: Tensor, real: Tensor | None = None) -> None:
        """The head's input [N, H] and log-probs [N]; or both with padding, and who is `real`."""

        def flat(x: Tensor) -> Tensor:
            x = x.detach()
            if real is None:
                return x
            return x.flatten(0, 1)[real]

        def take_hidden(grad: Tensor) -> None:
            self._hidden_grad = flat(grad)

        def take_logprob(grad: Tensor) -> None:
            self._logprob_grad = flat(grad)

        self._hidden = flat(hidden)
        hidden.register_hook(take_hidden)
        logprobs.register_hook(take_logprob)

    @torch.no_grad()
    def gradients(self, weights: Tensor) -> Tensor:
        """The sum of all token scores by each estimator's weights: [E, N] -> [E, D]."""
        part = self._logprob_grad.float()[:, None]
        left = torch.where(part == 0, 0.0, self._hidden_grad.float() / part)
        right = self._hidden.float()
        if self.size is not None:
            project = _projections(right.shape[1], self.size, right.device)
            left, right = left @ project[0], right @ project[1]
        outer = (weights.float()[:, :, None] * left).transpose(1, 2) @ right  # [E, size, size]
        return outer.flatten(1)


_CACHE: dict[tuple[int, int, str], Tensor] = {}


def _projections(hidden: int, size: int, device: torch.device) -> Tensor:
    """Two random matrices, the same in every process and on every device: [2, H, size]."""
    key = hidden, size, str(device)
    if key not in _CACHE:
        drawn = torch.randn(2, hidden, size, generator=torch.Generator().manual_seed(hidden))
        _CACHE[key] = (drawn / math.sqrt(size)).to(device)
    return _CACHE[key]
