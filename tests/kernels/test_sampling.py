import subprocess
import sys

import pytest
import torch

from marlhf.kernels import sampling as kernels
from marlhf.kernels.sampling import BLOCK, draw, pick
from marlhf.rollout import Sampling
from marlhf.rollout.engine import draws


def chi_square(counts, probabilities):
    """The statistic over those outcomes that are expected at least five times."""
    expected = probabilities * counts.sum()
    often = expected >= 5
    return float(((counts - expected)[often] ** 2 / expected[often]).sum()), int(often.sum()) - 1


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1.0), [0, 1, 2, 3, 4, 5]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4, 5]),
        (Sampling(top_k=3), [0, 2, 5]),
        (Sampling(top_k=99), [0, 1, 2, 3, 4, 5]),
        (Sampling(top_p=0.7), [2, 5, 0]),  # 0.4 + 0.25 is less than 0.7, 0.15 makes it enough
        (Sampling(top_p=0.39), [2]),
        (Sampling(top_p=1e-6), [2]),
        (Sampling(top_k=3, top_p=0.8), [2, 5]),  # of what top-k left: 0.5, 0.3125, 0.1875
    ],
)
def test_tokens_follow_the_distribution(sampling, allowed):
    probabilities = torch.tensor([0.15, 0.1, 0.4, 0.06, 0.04, 0.25])
    logits = probabilities.log().expand(20_000, 6) + 3.0
    tokens, logprobs = draw(logits, sampling, draws([7], 20_000)[0])
    whole = (logits[0] / sampling.scale).softmax(dim=0)
    torch.testing.assert_close(logprobs, whole.log()[tokens])  # of the whole, truncated or not
    expected = torch.zeros(6).index_copy_(0, torch.tensor(allowed), whole[allowed])
    counts = tokens.bincount(minlength=6)
    assert set(counts.nonzero().flatten().tolist()) == set(allowed)
    statistic, freedom = chi_square(counts, expected / expected.sum())
    assert statistic < 30  # a chance of 2e-5 with five degrees of freedom, less with fewer
    assert freedom == len(allowed) - 1


@pytest.mark.parametrize("one_level_size", [kernels.ONE_LEVEL_SIZE, 0])
def test_tokens_in_later_blocks_are_drawn_as_often(one_level_size, monkeypatch):
    monkeypatch.setattr(kernels, "ONE_LEVEL_SIZE", one_level_size)
    weights = torch.rand(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(len(weights))
    for uniform in draws([3], 200_000)[0].split(5000):  # all at once they take gigabytes
        tokens = pick(weights.expand(len(uniform), -1), uniform)
        counts += tokens.bincount(minlength=len(weights))
    statistic, freedom = chi_square(counts, weights / weights.sum())
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_the_extremes_pick_the_first_and_the_last_that_may_be_drawn():
    weights = torch.zeros(1, 3 * BLOCK)
    weights[0, [BLOCK + 3, 2 * BLOCK - 1]] = torch.tensor([1e-30, 1.0])
    assert pick(weights, torch.tensor([0.0]).double()).item() == BLOCK + 3
    assert pick(weights, torch.tensor([1 - 2.0**-53]).double()).item() == 2 * BLOCK - 1


def test_a_token_without_probability_is_never_drawn():
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(4000, BLOCK + 40, generator=generator) ** 20
    weights[torch.rand(weights.shape, generator=generator) < 0.7] = 0
    uniform = torch.cat([draws([1], 3998)[0], torch.tensor([0.0, 1 - 2.0**-53]).double()])
    assert weights.gather(1, pick(weights, uniform)[:, None]).min() > 0


def test_a_larger_number_never_picks_an_earlier_token():
    weights = torch.rand(5 * BLOCK, generator=torch.Generator().manual_seed(2))
    tokens = pick(weights.expand(5000, -1), torch.linspace(0, 1 - 1e-9, 5000).double())
    assert (tokens.diff() >= 0).all()


WITH_TRITON = """
import sys, types
from importlib.machinery import ModuleSpec
import transformers.modeling_utils
for name in ("triton", "triton.language"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)
sys.modules["triton"].jit = lambda function: function
sys.modules["triton"].language = sys.modules["triton.language"]
import marlhf.kernels, marlhf.kernels.attention, marlhf.rollout.continuous
assert marlhf.kernels.has_triton() and callable(marlhf.kernels.fused_pick)
assert callable(marlhf.kernels.attention.triton_attention.can_attend)
assert callable(marlhf.rollout.continuous.triton_sampling.sample)
"""


def test_where_triton_is_the_fused_kernels_are_found():
    """Imports are those of a machine with Triton; a stub that cannot compile stands in for it."""
    subprocess.run([sys.executable, "-c", WITH_TRITON], check=True)
