"""How many samples exact values would save, from gradients of single responses: the arithmetic.

With a value that is right on average, and independent of the response that it credits, advantages
are unbiased at every lambda, whatever the noise of the value. So are those of RLOO. Two unbiased
estimators differ in their noise alone, and need samples in proportion to it:

    noise(e) = n (E|g_e|^2 - |m|^2)

for a batch's mean gradient g_e, its number of responses n, and the true gradient m.

Values by continuations add noise that exact values would not have. So they come as two independent
halves. A gradient is linear in the values, so E[g_first . g_second] is E|g_exact|^2, without it.
|m|^2 comes from products of different groups. Groups of responses to one prompt are independent.

Axes: U groups, G responses of each, B = U G rows, F ways to assign credit, L reaches, T tokens,
D parameters or projections of them, R estimates: of all groups, then without each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marlhf.core import Segments, macro_gae, rloo_advantages
from marlhf.train.agreement import MIN_ERRORS, jackknife_error

REACHES = (0.0, 0.5, 0.8, 0.95, 1.0)
"""Lambdas from one macro action to the next."""
L = len(REACHES)
FIRST, SECOND = slice(2, 2 + L), slice(2 + L, 2 + 2 * L)  # of the ways; 0 counts, 1 is RLOO
OTHERS = 2 + 2 * L


def advantages_by_way(
    rewards: Tensor,  # [B, T]
    cut: Segments,
    halves: Tensor,  # [2, B, T], values at the starts of macro actions by independent continuations
    group: int,
    critic: Tensor | None = None,  # [B, T], values that may be wrong
) -> Tensor:
    """1 everywhere, RLOO, each half's values at each reach, the critic's: [F, B, T].

    The first serves to subtract means later, which need the whole sample.
    """
    ones = cut.mask.to(rewards.dtype)
    rloo = rloo_advantages(rewards.sum(dim=1), group)[:, None] * ones
    sources = [*halves] if critic is None else [*halves, critic]
    by_value = [
        macro_gae(rewards, values, cut, lam=lam, sigma="start")[0]
        for values in sources
        for lam in REACHES
    ]
    return torch.stack([ones, rloo, *by_value])


class Sample(NamedTuple):
    """What is kept of some groups."""

    sums: Tensor  # [U, F, D], each group's gradient by every way
    products: Tensor  # [U, F, F], products of the gradients of a response, summed over the group

    @classmethod
    def of(cls, gradients: Tensor, group: int) -> Sample:
        """Of the gradient of each response, [F, B, D], group by group."""
        by_group = gradients.unflatten(1, (-1, group)).transpose(0, 1)  # [U, F, G, D]
        return cls(by_group.sum(dim=2), torch.einsum("ufgd,uegd->ufe", by_group, by_group))


class Estimates(NamedTuple):
    """For all groups, and without each; NaN where the true gradient is too small to tell."""

    remaining: Tensor  # [R, L], noise with exact values as a share of RLOO's
    sampled: Tensor  # [R, L], the same with the values from continuations
    worth: Tensor  # [R, O], responses of RLOO that one response by another way is worth
    cosines: Tensor  # [R, 1 + L + O], of RLOO, exact values, others: a batch with the true gradient

    def error(self, x: Tensor) -> Tensor:
        """The standard error of something that was made of these: [R, ...] -> [...]."""
        return jackknife_error(x[1:].movedim(0, -1))


def estimate(
    sample: Sample, group: int, batch: int, centres: Sequence[float], *, grouped: bool = False
) -> Estimates:
    """Compare exact values with RLOO, and with other ways after subtracting their `centres`.

    `batch` counts responses; bias weighs more the larger it is. The others compare responses within
    their group if `grouped`; else each response counts as one, to a prompt of its own.
    """
    sums, products = sample.sums.double() / group, sample.products.double() / group
    count = len(sums)
    if count < 3:
        raise ValueError(f"At least three groups are needed to compare; got {count}.")
    size = torch.tensor([count] + [count - 1] * count, dtype=sums.dtype)

    def total(x: Tensor) -> Tensor:
        """Of all groups, and without each: [U, ...] -> [R, ...]."""
        whole = x.sum(dim=0, keepdim=True)
        return torch.cat([whole, whole - x])

    def mean(x: Tensor) -> Tensor:
        return total(x) / size.view(-1, *[1] * (x.ndim - 1))

    def across(x: Tensor, y: Tensor) -> Tensor:
        """Mean products of different groups, which share no noise: [U, E, D] -> [R, E]."""
        pairs = (total(x) * total(y)).sum(dim=2) - total((x * y).sum(dim=2))
        return pairs / (size * (size - 1))[:, None]

    # All reaches are unbiased, so their mean shows the true gradient best.
    true = ((sums[:, FIRST] + sums[:, SECOND]) / 2).mean(dim=1, keepdim=True)
    square = across(true, true)  # [R, 1]
    by_row = mean(products)  # [R, F, F]
    crossed = by_row[:, FIRST, SECOND].diagonal(dim1=1, dim2=2)  # [R, L]
    own = by_row.diagonal(dim1=1, dim2=2)
    sampled = (own[:, FIRST] + own[:, SECOND] + 2 * crossed) / 4
    rloo = group * (mean(sums[:, 1:2].square().sum(dim=2)) - square)  # [R, 1]

    centre = sums.new_tensor(list(centres))  # [O]
    others = sums[:, OTHERS:] - centre[:, None] * sums[:, :1]
    along, consistent = across(others, true), across(others, others)
    if grouped:
        noise = group * (mean(others.square().sum(dim=2)) - consistent)
    else:
        ones = centre * (centre * own[:, :1] - 2 * by_row[:, 0, OTHERS:])
        noise = own[:, OTHERS:] + ones - consistent
    both = (consistent + noise / batch) * square  # the cosine is along / sqrt(both)
    worth = (rloo / (batch * square)) * along.clamp(min=0).square() / (both - along.square())
    known = square[0] > MIN_ERRORS * jackknife_error(square[1:, 0])
    unbiased = square / (square + torch.cat([rloo, crossed - square], dim=1) / batch)
    cosines = torch.cat([unbiased.sqrt(), along / both.sqrt()], dim=1)
    unknown = torch.nan
    return Estimates(
        (crossed - square) / rloo,
        (sampled - square) / rloo,
        torch.where(known, worth, unknown),
        torch.where(known, cosines, unknown),
    )
