"""Processes whose values are known: a chain of lines, each with a slip of its own.

Line k slips with probability p, by a logit that it shares with other lines. The reward comes at the
end: 1 if no line slipped, or the share of lines that did not.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from marlhf.core import Segments
from marlhf.credit.headroom_estimates import REACHES, Sample, advantages_by_way


class Chain(NamedTuple):
    """`lines` lines, of which each is right with probability `right`."""

    lines: int
    right: float
    parameters: int
    graded: bool = False

    def rewards(self, slips: Tensor) -> Tensor:
        """[B, T] bool -> [B, T]."""
        rewards = torch.zeros(slips.shape, dtype=torch.float64)
        ok = (~slips).double()
        rewards[:, -1] = ok.mean(dim=1) if self.graded else ok.prod(dim=1)
        return rewards

    def success(self, slips: Tensor) -> Tensor:
        """The chance of 1 at the end, before each line, where the reward is all or nothing."""
        alive = torch.cat([torch.ones(len(slips), 1), (~slips).cumprod(dim=1)[:, :-1]], dim=1)
        return alive.double() * self.right ** (self.lines - torch.arange(self.lines)).double()

    def values(self, slips: Tensor) -> Tensor:
        """Exact: [B, T]."""
        if not self.graded:
            return self.success(slips)
        ok = (~slips).double().cumsum(dim=1) - (~slips).double()
        left = self.lines - torch.arange(self.lines)
        return (ok + self.right * left) / self.lines

    def sampled(self, slips: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Means of the returns of `count` continuations: [B, T]."""
        if not self.graded:
            drawn = self.success(slips).expand(count, *slips.shape)
            return torch.bernoulli(drawn, generator=generator).mean(dim=0)
        left = (self.lines - torch.arange(self.lines)).double().expand(count, *slips.shape)
        ok = (~slips).double().cumsum(dim=1) - (~slips).double()
        more = torch.binomial(left.contiguous(), torch.full_like(left, self.right), generator)
        return (ok + more.mean(dim=0)) / self.lines

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.rand(rows, self.lines, generator=generator) > self.right

    def scores(self, slips: Tensor) -> Tensor:
        """The derivative of each line's log-probability: [B, T, D]."""
        shared = torch.eye(self.parameters)[torch.arange(self.lines) % self.parameters]
        return (slips.double() - (1 - self.right))[:, :, None] * shared.double()

    def gradients(self, slips: Tensor, halves: Tensor, group: int, critic=None) -> Tensor:
        """By every way, of each response: [F, B, D]."""
        mask = torch.ones_like(slips)
        cut = Segments.from_starts(mask, mask)
        ways = advantages_by_way(self.rewards(slips), cut, halves, group, critic)
        return torch.einsum("fbt,btd->fbd", ways, self.scores(slips))

    def sample(self, rows: int, group: int, count: int, seed: int, critic=None) -> Sample:
        """As `marlhf credit --headroom` has it, with `count` continuations in each half."""
        generator = torch.Generator().manual_seed(seed)
        slips = self.draw(rows, generator)
        halves = torch.stack([self.sampled(slips, count, generator) for _ in range(2)])
        values = None if critic is None else critic(self, slips, generator)
        return Sample.of(self.gradients(slips, halves, group, values), group)

    def exact(self, group: int) -> dict[str, float]:
        """The noise of one response by exact values at each reach, and by RLOO; and |m|^2.

        By going through all outcomes. A group's gradient by RLOO is the sample covariance of its
        returns and scores, whose variance is known.
        """
        slips = torch.tensor(list(product([False, True], repeat=self.lines)))
        chance = torch.where(slips, 1 - self.right, self.right).double().prod(dim=1)
        values = self.values(slips)
        ways = self.gradients(
            slips.repeat_interleave(2, 0), values.repeat_interleave(2, 0)[None].expand(2, -1, -1), 2
        )

        def mean(x: Tensor) -> Tensor:
            return (chance[:, None] * x).sum(dim=0)

        by_reach = ways[2 : 2 + len(REACHES), ::2]
        square = float(mean(by_reach[-1]).square().sum())
        noise = {
            f"exact {lam:g}": float(mean(g.square()).sum()) - square
            for lam, g in zip(REACHES, by_reach)
        }
        x = self.rewards(slips).sum(dim=1, keepdim=True)
        x = x - mean(x)
        y = self.scores(slips).sum(dim=1)  # their means are 0
        n, both = group, mean(x * y)
        of_covariance = (
            mean((x * y).square()) / n
            - (n - 2) / (n * (n - 1)) * both.square()
            + mean(x.square()) * mean(y.square()) / (n * (n - 1))
        )
        return noise | {"rloo": group * float(of_covariance.sum()), "square": square}
