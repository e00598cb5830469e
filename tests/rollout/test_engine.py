import math

import pytest
import torch

from marlhf.rollout import Sampling
from marlhf.rollout.engine import draws


@pytest.mark.parametrize(
    "nonsense",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
    ],
)
def test_nonsense_is_a_sentence_with_its_name_and_value(nonsense):
    [(name, value)] = nonsense.items()
    with pytest.raises(ValueError, match=rf"{name} must .*; got {value}\."):
        Sampling(**nonsense)


def test_greedy_logprobs_are_at_temperature_one():
    assert (Sampling(temperature=0).scale, Sampling(temperature=0.8).scale) == (1.0, 0.8)


def test_only_top_k_and_top_p_truncate():
    assert not Sampling(temperature=0.5).truncated
    assert Sampling(top_k=5).truncated
    assert Sampling(top_p=0.9).truncated


def test_draws_are_uniform_and_belong_to_their_seed():
    table = draws(range(2000), 50)
    assert 0 <= table.min() < 1e-4 < 1 - 1e-4 < table.max() < 1
    counts = torch.histc(table, 20, 0, 1)
    assert ((counts - 5000) ** 2 / 5000).sum() < 45  # chi-square, 19 degrees: far beyond chance
    assert (
        abs(torch.corrcoef(torch.stack((table[:-1].flatten(), table[1:].flatten())))[0, 1]) < 0.02
    )
    assert torch.equal(draws([7, 1999], 9), table[[7, 1999], :9])
