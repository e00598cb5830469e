"""Frozen models in host memory: the same numbers, and on the device only while they compute."""

import torch

from marlhf.models.base import loaded, offload
from marlhf.models.load import load_scalar
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward import RewardModel


def addresses(model):
    return [x.data_ptr() for x in (*model.parameters(), *model.buffers())]


def test_an_offloaded_model_computes_the_same_and_leaves_the_device():
    """The device is faked by the CPU: a copy made for a pass stands for the one on a GPU."""
    model, tokenizer = load_scalar("tiny"), tiny_tokenizer()
    scorer = RewardModel(model, tokenizer, tokenizer)
    batch = [[5, 6], [7]], [[8], [9, 1]]
    expected, before = scorer(*batch), addresses(model)
    offload(model)
    host = addresses(model)
    assert not {*host} & {*before}  # nothing of the device's memory is held
    with loaded(model):
        assert not {*addresses(model)} & {*host}
    assert addresses(model) == host
    assert torch.equal(scorer(*batch), expected)
    assert addresses(model) == host


def test_a_model_that_fails_is_offloaded_again():
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    offload(layer)
    host = addresses(layer)
    try:
        with loaded(layer):
            raise torch.OutOfMemoryError("")
    except torch.OutOfMemoryError:
        assert addresses(layer) == host


def test_a_model_that_is_not_offloaded_stays_where_it_is():
    layer = torch.nn.Linear(2, 2)
    before = addresses(layer)
    with loaded(layer):
        assert addresses(layer) == before
