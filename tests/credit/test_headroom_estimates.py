"""Headroom against processes whose exact figures are known."""

import pytest
import torch

from marlhf.core import Segments
from marlhf.credit.headroom_estimates import (
    FIRST,
    REACHES,
    Sample,
    advantages_by_way,
    estimate,
)
from simulated import Chain

COMMON = Chain(6, 0.7 ** (1 / 6), 2)  # all six lines must be right
HALF = Chain(6, 0.35 ** (1 / 6), 2)
RARE = Chain(6, 0.1 ** (1 / 6), 2)
GRADED = Chain(6, 0.95, 2, graded=True)
EVEN = Chain(6, 0.5, 2, graded=True)


def exact_shares(chain: Chain, group: int = 4) -> torch.Tensor:
    exact = chain.exact(group)
    return torch.tensor([exact[f"exact {lam:g}"] / exact["rloo"] for lam in REACHES])


def test_the_exact_figures_are_those_of_a_large_sample():
    """The enumeration of outcomes, and the variance of a covariance, against sampling."""
    for chain in (HALF, GRADED):
        generator = torch.Generator().manual_seed(0)
        slips = chain.draw(20_000, generator)
        gradients = chain.gradients(slips, chain.values(slips).expand(2, -1, -1), 4)
        exact = chain.exact(4)
        by_group = gradients[1].unflatten(0, (-1, 4)).mean(dim=1)
        noise = 4 * (by_group.square().sum(dim=1).mean() - exact["square"])
        assert float(noise) == pytest.approx(exact["rloo"], rel=0.05)
        for lam, g in zip(REACHES, gradients[FIRST]):
            noise = g.square().sum(dim=1).mean() - exact["square"]
            assert float(noise) == pytest.approx(exact[f"exact {lam:g}"], rel=0.05)


@pytest.mark.parametrize("chain", [COMMON, HALF, RARE, GRADED])
def test_the_estimate_is_within_its_error_of_the_exact_figure(chain):
    estimates = estimate(chain.sample(4096, 4, 4, seed=1), 4, 64, [])
    off = (estimates.remaining[0] - exact_shares(chain)) / estimates.error(estimates.remaining)
    assert float(off.abs().max()) < 2.5, off
    assert float(estimates.error(estimates.remaining).max()) < 0.15


def test_the_noise_of_few_continuations_is_taken_out():
    """Over many small samples the halves are right, and what has the noise in it is too large."""
    true, shares, noisy = exact_shares(RARE), [], []
    for seed in range(40):
        estimates = estimate(RARE.sample(512, 4, 1, seed), 4, 64, [])
        shares.append(estimates.remaining[0])
        noisy.append(estimates.sampled[0])
    shares, noisy = torch.stack(shares), torch.stack(noisy)
    error = shares.std(dim=0) / 40**0.5
    assert bool(((shares.mean(dim=0) - true).abs() < 3 * error + 0.03).all())
    assert float(noisy[:, 0].mean()) > 2 * float(true[0])  # two continuations per boundary
    assert bool((noisy.mean(dim=0) > shares.mean(dim=0)).all())


def test_intervals_hold_the_exact_figure_about_as_often_as_they_say():
    true, inside = exact_shares(HALF), 0
    for seed in range(50):
        estimates = estimate(HALF.sample(256, 4, 4, seed), 4, 64, [])
        off = (estimates.remaining[0] - true).abs() <= 2 * estimates.error(estimates.remaining)
        inside += int(off[2])
    assert inside >= 40


def test_values_of_an_exact_critic_are_worth_the_headroom():
    """And those of one that knows nothing are worth no more than RLOO at a short reach."""
    sample = HALF.sample(8192, 4, 4, seed=0, critic=lambda chain, slips, _: chain.values(slips))
    estimates = estimate(sample, 4, 16, [0.0] * 5)
    torch.testing.assert_close(estimates.worth[0], 1 / estimates.remaining[0], rtol=0.25, atol=0.0)
    blind = estimate(
        HALF.sample(8192, 4, 4, seed=0, critic=lambda _, slips, __: torch.full(slips.shape, 0.35)),
        4,
        16,
        [0.0] * 5,
    )
    assert float(blind.worth[0, 0]) < 0.6 * float(estimates.worth[0, 0])
    # At lambda 1 the mean is a fair baseline, with the whole group to estimate it.
    assert float(blind.worth[0, -1]) > 1


def test_a_constant_error_of_the_critic_is_centred_as_training_does_it():
    def critic(chain, slips, _):
        return chain.values(slips) + 3.0

    sample = HALF.sample(2048, 4, 4, seed=3, critic=critic)
    right = HALF.sample(2048, 4, 4, seed=3, critic=lambda chain, slips, _: chain.values(slips))
    plain = estimate(right, 4, 64, [0.0] * 5)
    # At lambda 1 every advantage is 3 too low.
    centred = estimate(sample, 4, 64, [0.0] * 4 + [-3.0])
    torch.testing.assert_close(centred.cosines[0, -1], plain.cosines[0, -1])
    off = estimate(sample, 4, 64, [0.0] * 5)
    assert float(off.cosines[0, -1]) < 0.6 * float(plain.cosines[0, -1])


def test_by_hand():
    """Two prompts' worth of numbers small enough to check: advantages, sums and products."""
    mask = torch.ones(2, 2).bool()
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    halves = torch.tensor([[[0.5, 0.75], [0.5, 0.25]], [[0.0, 1.0], [1.0, 0.0]]])
    ways = advantages_by_way(rewards, Segments.from_starts(mask, mask), halves, group=2)
    torch.testing.assert_close(ways[1], torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    torch.testing.assert_close(ways[2], torch.tensor([[0.25, 0.25], [-0.25, -0.25]]))  # lambda 0
    torch.testing.assert_close(ways[6], torch.tensor([[0.5, 0.25], [-0.5, -0.25]]))  # lambda 1
    torch.testing.assert_close(ways[7], torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # second, 0
    gradients = ways[:, :, :1] * torch.tensor([[1.0], [-2.0]])  # [F, B, 1]
    sample = Sample.of(gradients, group=2)
    assert sample.sums.shape == (1, 12, 1)
    assert float(sample.sums[0, 1]) == 1 + 2
    assert float(sample.products[0, 2, 7]) == pytest.approx(0.25 * 1 + 0.5 * 2)


def test_jackknife_replicates_are_estimates_without_a_group():
    sample = GRADED.sample(32, 4, 4, seed=5, critic=lambda chain, slips, _: chain.values(slips))
    whole = estimate(sample, 4, 64, [0.1] * 5)
    rest = [number for number in range(8) if number != 3]
    without = estimate(Sample(*(x[rest] for x in sample)), 4, 64, [0.1] * 5)
    torch.testing.assert_close(whole.remaining[4], without.remaining[0])
    torch.testing.assert_close(whole.sampled[4], without.sampled[0])


def test_too_few_groups_are_refused():
    with pytest.raises(ValueError, match="At least three groups"):
        estimate(GRADED.sample(8, 4, 2, seed=0), 4, 64, [])
