"""The measure of gradients, on numbers by hand and on a process that can be enumerated."""

import itertools
import math

import pytest
import torch

from marlhf.core import (
    NGram,
    Responses,
    boundary_gae,
    gae,
    macro_gae,
    segment,
)
from marlhf.train.agreement import gradient_agreement, jackknife_error

LENGTH = 4


class Process:
    """Binary texts of four tokens: a policy and a critic for each prefix, a reward for each text.

    All sixteen texts are rows, so every expectation is a sum over rows.
    """

    def __init__(self, seed, critic_noise=1.0):
        generator = torch.Generator().manual_seed(seed)
        texts = list(itertools.product((0, 1), repeat=LENGTH))
        prefixes = [text[:n] for n in range(LENGTH) for text in texts]
        self.state = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
        logits = torch.randn(len(self.state), generator=generator, dtype=torch.float64)
        up = logits.sigmoid()  # probability of a 1 after each prefix
        rewards = torch.randn(16, LENGTH, generator=generator, dtype=torch.float64)
        self.mask = torch.ones(16, LENGTH, dtype=torch.bool)
        # Rewards may depend on the prefix and the token only.
        self.rewards = torch.zeros(16, LENGTH, dtype=torch.float64)
        self.probability = torch.ones(16, dtype=torch.float64)
        self.scores = torch.zeros(16, LENGTH, len(self.state), dtype=torch.float64)
        first = {text[: n + 1]: i for i, text in reversed(list(enumerate(texts))) for n in range(4)}
        for row, text in enumerate(texts):
            for t, token in enumerate(text):
                state = self.state[text[:t]]
                chance = up[state] if token else 1 - up[state]
                self.probability[row] *= chance
                self.scores[row, t, state] = token - up[state]  # gradient of the log-prob
                self.rewards[row, t] = rewards[first[text[: t + 1]], t]
        self.texts = texts
        exact = self._exact_values()
        noise = torch.randn(len(self.state), generator=generator, dtype=torch.float64)
        critic = exact + critic_noise * noise
        at = torch.tensor([[self.state[text[:t]] for t in range(LENGTH)] for text in texts])
        self.values = critic[at]
        self.pairs = segment(NGram(2), Responses(self.mask.long(), self.mask))

    def _exact_values(self):
        to_go = self.rewards.flip(1).cumsum(1).flip(1)
        values = torch.zeros(len(self.state), dtype=torch.float64)
        for prefix, i in self.state.items():
            rows = [r for r, text in enumerate(self.texts) if text[: len(prefix)] == prefix]
            weights = self.probability[rows] / self.probability[rows].sum()
            values[i] = (weights * to_go[rows, len(prefix)]).sum()
        return values

    def gradients(self, advantages):
        """The policy gradient of each text: [16, states]."""
        return (advantages[:, :, None] * self.scores).sum(dim=1)

    def mean(self, x):
        return (self.probability[:, None] * x).sum(dim=0)

    def variance(self, gradients):
        return float((self.probability * (gradients - self.mean(gradients)).square().sum(1)).sum())


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_boundary_gae_has_the_expected_gradient_of_macro_gae_from_the_start(seed, lam):
    process = Process(seed)
    arguments = process.rewards, process.values, process.pairs
    boundary = process.gradients(boundary_gae(*arguments, lam=lam)[0])
    start = process.gradients(macro_gae(*arguments, lam=lam, sigma="start")[0])
    equal = process.gradients(macro_gae(*arguments, lam=lam, sigma="equal")[0])
    torch.testing.assert_close(process.mean(boundary), process.mean(start))
    assert not torch.allclose(process.mean(boundary), process.mean(equal))


@pytest.mark.parametrize("seed", range(3))
def test_with_an_exact_critic_boundary_gae_has_less_variance(seed):
    process = Process(seed, critic_noise=0.0)
    arguments = process.rewards, process.values, process.pairs
    boundary = process.gradients(boundary_gae(*arguments)[0])
    start = process.gradients(macro_gae(*arguments, sigma="start")[0])
    assert process.variance(boundary) < process.variance(start)


def test_the_measure_finds_the_true_cosine_of_an_enumerated_process():
    process = Process(0)
    estimators = {
        "unbiased": gae(process.rewards, process.values, process.mask, lam=1.0)[0],
        "short": gae(process.rewards, process.values, process.mask, lam=0.0)[0],
        "boundary": boundary_gae(process.rewards, process.values, process.pairs, lam=0.5)[0],
    }
    by_text = torch.stack([process.gradients(advantages) for advantages in estimators.values()])
    truth = process.mean(by_text[0])
    exact = torch.tensor(
        [
            float(
                process.mean(g)
                @ truth
                / ((process.probability * g.square().sum(dim=1)).sum().sqrt() * truth.norm())
            )
            for g in by_text
        ]
    )
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(process.probability, 4000, replacement=True, generator=generator)
    found = gradient_agreement(by_text[:, drawn], by_text[0, drawn])
    assert ((found.cosine - exact).abs() < 4 * found.error).all()
    assert (found.error < 0.03).all()
    # The short reach is biased: it agrees with itself better than with the truth.
    assert found.consistency[1] > found.cosine[1] + 0.1
    torch.testing.assert_close(found.consistency[0], found.cosine[0])


def test_agreement_by_hand():
    reference = torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 0.0]])
    # products of different batches: 0, 1, 1, each twice: mean 2/3; squares 2, 2, 1: mean 5/3
    found = gradient_agreement(reference[None], reference)
    torch.testing.assert_close(found.cosine, torch.tensor([(2 / 3) / math.sqrt(5 / 3 * 2 / 3)]))
    # without the first: one product, 1; squares 2, 1. Without the last: product 0, so 0 / 0.
    torch.testing.assert_close(found.replicates[0, 0], torch.tensor(1 / math.sqrt(1.5)))
    assert found.replicates[0, 2].isnan()
    assert found.error.isnan()


def test_replicates_are_the_measure_without_each_batch():
    torch.manual_seed(0)
    gradients = torch.randn(2, 6, 5, dtype=torch.float64) + 2
    reference = torch.randn(6, 5, dtype=torch.float64) + 2
    found = gradient_agreement(gradients, reference)
    for batch in range(6):
        rest = [i for i in range(6) if i != batch]
        without = gradient_agreement(gradients[:, rest], reference[rest])
        torch.testing.assert_close(found.replicates[:, batch], without.cosine)


def test_the_scale_of_a_gradient_does_not_matter():
    torch.manual_seed(0)
    gradients, reference = torch.randn(1, 8, 5) + 1, torch.randn(8, 5) + 1
    found = gradient_agreement(gradients, reference)
    scaled = gradient_agreement(3 * gradients, 7 * reference)
    for ours, theirs in zip(found, scaled):
        torch.testing.assert_close(ours, theirs)


def test_the_jackknife_error_of_a_mean_is_its_standard_error():
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    without = (x.sum() - x) / 49
    torch.testing.assert_close(jackknife_error(without), x.std() / math.sqrt(50))


def test_too_few_batches_and_shapes_that_do_not_fit_are_sentences():
    with pytest.raises(ValueError, match="At least three batches"):
        gradient_agreement(torch.ones(1, 2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"gradients must be \[E, M, D\] .* got \[3, 4\]"):
        gradient_agreement(torch.ones(3, 4), torch.ones(3, 4))


def batches(cosine, generator, *, size=40, count=12):
    """Batches of an unbiased gradient whose expected cosine with the true one is `cosine`."""
    true = torch.zeros(size, dtype=torch.float64)
    true[0] = 1.0
    noise = torch.randn(count, size, generator=generator, dtype=torch.float64)
    return true + noise * math.sqrt((1 / cosine**2 - 1) / size)


@pytest.mark.parametrize("seed", range(3))
def test_small_cosines_cannot_be_told(seed):
    """Windows that happen to tell would read too much: at a true 0.15 nearly all say nothing."""
    generator = torch.Generator().manual_seed(seed)

    def told(cosine):
        windows = [batches(cosine, generator) for _ in range(200)]
        agreements = [gradient_agreement(x[None], x) for x in windows]
        found = torch.stack([agreement.known_cosines()[0] for agreement in agreements])
        return found[found.isfinite()]

    assert len(told(0.15)) < 0.15 * 200
    plain = told(0.5)
    assert len(plain) > 0.95 * 200
    assert abs(float(plain.mean()) - 0.5) < 0.02


def test_errors_include_that_of_the_projections():
    """The same batches by other projections differ, and error bars of blocks say by how much."""
    generator = torch.Generator().manual_seed(0)
    size, count, blocks, block = 200, 12, 8, 8
    exact = batches(0.8, generator, size=size, count=count)
    truth = float(gradient_agreement(exact[None], exact).cosine[0])
    off, errors = [], []
    for _ in range(100):
        project = torch.randn(size, blocks * block, generator=generator, dtype=torch.float64)
        short = exact @ project
        agreement = gradient_agreement(short[None], short, blocks=blocks)
        off.append(float(agreement.cosine[0]) - truth)
        errors.append(float(jackknife_error(agreement.without_block)[0]))
        assert float(agreement.error[0]) >= errors[-1]
    deviation = torch.tensor(off).square().mean().sqrt()
    assert 0.5 < float(torch.tensor(errors).square().mean().sqrt() / deviation) < 2
