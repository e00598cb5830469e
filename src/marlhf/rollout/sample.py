"""From logits and uniform numbers to tokens: no noise as wide as the vocabulary, no host sync.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf.rollout.engine import Sampling

BLOCK = 256
"""Tokens whose probabilities are summed before the search goes into them."""
SHORT = 4096
"""A vocabulary up to this size is searched in one go."""
BELOW_ONE = 1 - 2.0**-52


def draw(
    logits: Tensor,  # [B, V]
    sampling: Sampling,
    uniform: Tensor,  # [B], float64 in [0, 1)
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-prob under the whole distribution at that temperature: [B]."""
    if sampling.scale != 1:
        logits = logits.float() / sampling.scale
    shares = logits.softmax(dim=1, dtype=torch.float32)
    if sampling.temperature == 0:
        token = logits.argmax(dim=1)
    else:
        token = pick(truncate(shares, sampling) if sampling.truncated else shares, uniform)
    # In float64, where the last bit may depend on the row's place in the batch, and not in float32.
    return token, shares.gather(1, token[:, None]).squeeze(1).double().log().float()


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose share of the weights, with all before it, exceeds the number: [B].

    In two levels where the vocabulary is large: the block first, then the token in it. So only
    short sums are cumulative, and in float64: a token of weight 0 is never drawn, however they
    round.
    """
    rows, size = weights.shape
    if size <= SHORT:
        edges = weights.double().cumsum(dim=1)
        return _first_above(edges, uniform[:, None] * edges[:, -1:]).squeeze(1)
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
    """The first column above the target, which is kept where there is one: [B, 1]."""
    target = torch.minimum(target.clamp(min=0), rising[:, -1:] * BELOW_ONE)
    found = torch.searchsorted(rising, target, right=True)
    return found.clamp(max=rising.shape[1] - 1)  # where all is NaN


def truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """Weights with what top-k and top-p exclude set to 0."""
    if 0 < sampling.top_k < weights.shape[1]:
        least = weights.topk(sampling.top_k, dim=1).values[:, -1:]
        weights = weights.masked_fill(weights < least, 0)
    if sampling.top_p < 1:
        ranked, order = weights.sort(dim=1, descending=True)
        ranked = ranked / ranked.sum(dim=1, keepdim=True)
        beyond = ranked.cumsum(dim=1) - ranked >= sampling.top_p  # the first always stays
        excluded = torch.zeros_like(beyond).scatter(1, order, beyond)
        weights = weights.masked_fill(excluded, 0)
    return weights
