"""From logits and uniform numbers to tokens, by inverting the cumulative distribution.

One random number per token instead of one per vocabulary entry, and no host sync.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf.config.stage import Sampling

BLOCK = 256
"""A large vocabulary is searched in two levels: blocks of this many tokens, then tokens."""
ONE_LEVEL_SIZE = 4096
"""A vocabulary up to this size is searched in one level."""
BELOW_ONE = 1 - 2.0**-52


def draw(
    logits: Tensor,  # [B, V]
    sampling: Sampling,
    uniform: Tensor,  # [B], float64 in [0, 1)
) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-prob under the whole distribution at that temperature: [B]."""
    if sampling.scale != 1:
        logits = logits.float() / sampling.scale
    shares = logits.softmax(dim=1, dtype=torch.float32)
    if sampling.temperature == 0:
        token = logits.argmax(dim=1)
    else:
        token = pick(truncate(shares, sampling) if sampling.truncated else shares, uniform)
    # The logarithm in float64: in float32 its last bit may depend on the row's place in the batch.
    return token, shares.gather(1, token[:, None]).squeeze(1).double().log().float()


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative share of the weights exceeds the number: [B].

    In two levels where the vocabulary is large: the block first, then the token in it. Cumulative
    sums then stay short, and they are in float64, so rounding never draws a token of weight 0.
    """
    rows, size = weights.shape
    if size <= ONE_LEVEL_SIZE:
        edges = weights.double().cumsum(dim=1)
        # Here the target is between 0 and the last sum as soon as the number is below 1.
        target = uniform.clamp(max=BELOW_ONE)[:, None] * edges[:, -1:]
        return _search(edges, target).squeeze(1)
    if size % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -size % BLOCK))
    tiles = weights.view(rows, -1, BLOCK)
    sums = tiles.sum(dim=2, dtype=torch.float64)  # [B, V / BLOCK]
    edges = sums.cumsum(dim=1)
    target = uniform[:, None] * edges[:, -1:]
    block = _first_above(edges, target)  # [B, 1]
    before = edges.gather(1, block) - sums.gather(1, block)
    tile = tiles.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    inside = _first_above(tile.double().cumsum(dim=1), target - before)
    return (block * BLOCK + inside).squeeze(1)


def _first_above(rising: Tensor, target: Tensor) -> Tensor:
    """The first column above the target: [B, 1].

    Rounding may put the target at or above the last sum, or below 0: it is kept in between.
    """
    return _search(rising, torch.minimum(target.clamp(min=0), rising[:, -1:] * BELOW_ONE))


def _search(rising: Tensor, target: Tensor) -> Tensor:
    column = torch.searchsorted(rising, target, right=True)
    return column.clamp(max=rising.shape[1] - 1)  # NaN sorts last, beyond the last column


def truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """The weights, 0 for the tokens that top-k and top-p exclude."""
    if 0 < sampling.top_k < weights.shape[1]:
        least = weights.topk(sampling.top_k, dim=1).values[:, -1:]
        weights = weights.masked_fill(weights < least, 0)
    if sampling.top_p < 1:
        ranked, order = weights.sort(dim=1, descending=True)
        ranked = ranked / ranked.sum(dim=1, keepdim=True)
        beyond = ranked.cumsum(dim=1) - ranked >= sampling.top_p  # the likeliest always stays
        excluded = torch.zeros_like(beyond).scatter(1, order, beyond)
        weights = weights.masked_fill(excluded, 0)
    return weights
