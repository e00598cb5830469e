"""Slots shorter than the longest response: the same responses."""

import pytest
import torch

from marlhf.models.tiny import tiny_model
from marlhf.rollout import Sampling, tiers
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.tiers import tier_rooms

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7], [20], [1, 1, 4], [9, 8], [30, 31, 32, 33], [2], [3]]
SEEDS = list(range(40, 48))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(tiers, "SHORTEST", 3)


def sampled(budget, limit, ends, limits=None, prompts=PROMPTS, device="cpu", again=False):
    torch.manual_seed(0)
    model = tiny_model().to(device)
    engine = NativeEngine(model, ends, 0, token_budget=budget, precision="float32")
    sampling = Sampling(max_new_tokens=limit)
    if again:  # what an earlier call left in the cache changes nothing
        engine.generate(prompts, sampling, SEEDS, limits)
    return engine.generate(prompts, sampling, SEEDS, limits)


def watch(monkeypatch):
    """How many responses each tier set aside."""
    counts = []
    run = tiers.TierSchedule.run

    def watched(self):
        found = run(self)
        counts.append(len(self.set_aside))
        return found

    monkeypatch.setattr(tiers.TierSchedule, "run", watched)
    return counts


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("ends", [[1], list(range(1, 200, 9)), []])
def test_responses_are_those_of_slots_that_fit_the_longest(monkeypatch, ends, device):
    whole = sampled(1 << 17, 60, ends, device=device)
    counts = watch(monkeypatch)
    in_tiers = sampled(256, 60, ends, device=device, again=len(ends) > 1)  # two whole slots fit
    assert len(counts) == (4 if len(ends) > 1 else 2)  # calls times tiers
    assert counts[0] > 0
    assert in_tiers.responses == whole.responses
    torch.testing.assert_close(in_tiers.logprobs, whole.logprobs)
    assert torch.equal(in_tiers.ended, whole.ended)


def test_limits_of_rows_and_shared_prompts_are_kept(monkeypatch):
    limits = [60, 3, 15, 1, 40, 16, 60, 12]
    prompts = [PROMPTS[0]] * 4 + [PROMPTS[0][:4]] * 4
    whole = sampled(1 << 17, 60, [], limits, prompts)
    counts = watch(monkeypatch)
    in_tiers = sampled(256, 60, [], limits, prompts)
    assert counts == [4, 0]  # longer than 15
    assert [len(response) for response in in_tiers.responses] == limits
    assert in_tiers.responses == whole.responses
    torch.testing.assert_close(in_tiers.logprobs, whole.logprobs)


def test_an_end_in_the_last_token_of_a_tier_is_the_end():
    free = sampled(1 << 17, 60, [])
    end = free.responses[0][14]  # the last token of the tier of 15
    whole, in_tiers = sampled(1 << 17, 60, [end]), sampled(256, 60, [end])
    assert in_tiers.responses == whole.responses
    assert in_tiers.responses[0] == free.responses[0][: free.responses[0].index(end) + 1]


def test_tiers_grow_until_every_row_has_a_slot_and_fit_the_host():
    assert tier_rooms(8, 8, 48, 0) == [48]
    assert tier_rooms(9, 8, 48, 0) == [12, 48]
    assert tier_rooms(33, 8, 48, 0) == [3, 12, 48]
    assert tier_rooms(1000, 8, 11, 0) == [11]  # slots for less than 3 are not worth it
    assert tier_rooms(33, 8, 48, 1 << 60) == [48]
