"""Passes over packed rows give the numbers and gradients of padded ones."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlhf.models import fast_passes, graphs
from marlhf.models.fast_passes import pack_rows
from marlhf.models.forward import Sequences, final_scores, token_stats, token_values
from marlhf.models.packed import ROWS, TOKENS, Packing, can_pack

PACKABLE = ("llama", "llama-tied", "qwen2", "qwen3", "gemma", "gpt-neox", "phi")
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [18]]
RESPONSES = [[20, 21, 1], [22, 23, 24, 25, 26], [], [27]]


def both_ways(model):
    packed = copy.deepcopy(model)
    pack_rows(packed)
    return model, packed, Sequences.from_lists(PROMPTS, RESPONSES, 0)


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_rows_have_the_logprobs_and_gradients_of_padded_ones(small, name):
    padded, packed, sequences = both_ways(small(name))
    weights = torch.rand(sequences.mask.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for model in (padded, packed):
        logprobs = token_stats(model, sequences, 0.7).logprobs
        (logprobs * weights).sum().backward()
        found.append(logprobs.detach())
    assert fast_passes._PACKED[packed] is not None
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    theirs = dict(padded.named_parameters())
    for name, parameter in packed.named_parameters():
        if theirs[name].grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4)


def test_packed_values_and_scores_are_those_of_padded_rows(small):
    padded, packed, sequences = both_ways(small("llama", scalar=True))
    for read in (token_values, final_scores):
        torch.testing.assert_close(
            read(packed, sequences), read(padded, sequences), rtol=1e-4, atol=1e-5
        )
    assert fast_passes._PACKED[packed] is not None


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_windows_and_soft_caps_are_not_packed(small, name):
    model = small(name)
    assert not can_pack(model)
    pack_rows(model)
    assert fast_passes.packed_graphs(model, Sequences.from_lists(PROMPTS, RESPONSES, 0)) is None


def test_rows_of_nearly_one_length_stay_padded(small, monkeypatch):
    model = small("llama")
    pack_rows(model)
    alike = Sequences.from_lists([[5, 6, 7, 8]] * 3, [[9, 10], [11, 12], [13]], 0)
    assert fast_passes.packed_graphs(model, alike) is None
    assert fast_passes.packed_graphs(model, Sequences.from_lists(PROMPTS, RESPONSES, 0)) is not None


def test_a_model_that_differs_over_packed_rows_is_padded_and_says_so(small, monkeypatch):
    _, packed, sequences = both_ways(small("llama"))
    monkeypatch.setattr(fast_passes, "_packing_error", lambda model: 1.0)
    with pytest.warns(UserWarning, match="packed rows"):
        token_stats(packed, sequences)
    assert fast_passes._PACKED[packed] is None


@given(
    rows=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=40),
    width=st.integers(340, 400),
)
def test_every_token_is_in_one_row_and_every_pick_is_where_it_was(rows, width):
    lengths = [prompt + response for prompt, response in rows]
    packing = Packing.of(lengths, width, [(p - 1, r) for p, r in rows])
    total = len(packing.source)
    assert total % TOKENS == 0
    assert (len(packing.offsets) - 1) % ROWS == 0
    assert packing.offsets[0] == 0
    assert packing.offsets[-1] == total
    steps = packing.offsets.diff()
    assert bool((steps >= 0).all())
    assert int(steps.max()) <= packing.longest
    places = [row * width + column for row, n in enumerate(lengths) for column in range(n)]
    assert packing.source[: len(places)].tolist() == places
    wanted = [row * width + p - 1 + i for row, (p, r) in enumerate(rows) for i in range(r)]
    assert packing.source[packing.picked[: len(wanted)]].tolist() == wanted


def recorded():
    """What autograd needs of a recorded pass."""
    gradients = []
    return SimpleNamespace(
        forward=SimpleNamespace(replay=lambda: None),
        out=torch.ones(3),
        anchor=torch.zeros((), requires_grad=True),
        add_gradients=gradients.append,
        gradients=gradients,
    )


def test_no_graph_runs_between_a_forward_pass_and_its_backward_pass():
    graph = recorded()
    out = graphs._Replay.apply(graph.anchor, graph)
    assert graphs._waiting_for_backward()
    (out * 2).sum().backward()
    assert not graphs._waiting_for_backward()
    assert graph.gradients[0].tolist() == [2, 2, 2]


def test_a_forward_pass_that_nobody_needs_any_more_holds_nothing_up():
    graph = recorded()
    out = graphs._Replay.apply(graph.anchor, graph)
    assert graphs._waiting_for_backward()
    del out
    assert not graphs._waiting_for_backward()


def test_a_second_backward_pass_is_refused():
    graph = recorded()
    total = graphs._Replay.apply(graph.anchor, graph).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        total.backward()


def test_a_pass_that_cannot_be_recorded_says_so():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.warns(UserWarning, match=r"Llama could not be recorded.*2\.00 GiB"):
        assert graphs._if_possible(fail, "Llama") is None


def test_passes_of_large_models_are_not_recorded_with_gradients(monkeypatch):
    share = 4 * 6  # six numbers
    properties = SimpleNamespace(total_memory=share / graphs.GRADIENTS_SHARE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = torch.device("cuda")
    assert graphs.GraphedPasses(torch.nn.Linear(2, 2))._has_room(device, True)
    large = torch.nn.Linear(2, 3)
    assert not graphs.GraphedPasses(large)._has_room(device, True)
    assert graphs.GraphedPasses(large)._has_room(device, False)
    large.bias.requires_grad_(False)
    assert graphs.GraphedPasses(large)._has_room(device, True)


def test_recorded_passes_hold_a_bounded_share_of_memory(monkeypatch):
    properties = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    passes = graphs.GraphedPasses(torch.nn.Linear(2, 2).requires_grad_(False))
    for held, has_room in ((0, True), (1000 * graphs.POOL_SHARE, True), (300, False)):
        monkeypatch.setattr(graphs, "graph_bytes", lambda _, held=held: held)
        assert passes._has_room(torch.device("cuda"), False) == has_room


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("scalar", [False, True])
def test_replayed_passes_give_the_numbers_and_gradients_of_padded_ones(small, name, scalar):
    settings = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    model = small(name, scalar=scalar, **settings).cuda()
    padded, packed, _ = both_ways(model)
    read = token_values if scalar else (lambda m, s: token_stats(m, s, 0.7).logprobs)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for turn in range(4):  # as it is, recorded, replayed, replayed
        rows = [[int(x) for x in torch.randint(2, 48, (n,), generator=generator)] for n in (9, 4)]
        sequences = Sequences.from_lists(PROMPTS[:2], rows, 0, "cuda")
        with torch.autocast("cuda", torch.bfloat16):
            found = [read(m, sequences) for m in (padded, packed)]
            losses.append(found[1].sum())  # alive, as a loop's last loss is
        torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.1)
        for out in found:
            out.square().sum().backward()
        with torch.no_grad():  # an optimiser's step moves both alike
            for p, q in zip(padded.parameters(), packed.parameters()):
                if p.grad is not None:
                    scale = p.grad.norm().clamp(min=1e-3)
                    assert (p.grad - q.grad).norm() < 0.1 * scale, turn
                    p.sub_(1e-3 * p.grad)
                    q.copy_(p)
                    p.grad = q.grad = None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_replayed_passes_add_up_whatever_was_there(small):
    settings = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    model = small("llama", scalar=True, **settings).cuda()
    padded, packed, _ = both_ways(model)
    sequences = Sequences.from_lists(PROMPTS[:2], [[3, 4, 5], [6, 7]], 0, "cuda")
    kept = {}
    for turn in range(6):  # as it is, recorded and added to that, then replayed alone
        for m in (padded, packed):
            with torch.autocast("cuda", torch.bfloat16):
                token_values(m, sequences).square().sum().backward()
        for (name, p), q in zip(padded.named_parameters(), packed.parameters()):
            if p.grad is not None:
                scale = p.grad.norm().clamp(min=1e-3)
                assert (p.grad - q.grad).norm() < 0.1 * scale, (turn, name)
        if turn in (2, 4):
            kept[turn] = [p.grad for p in packed.parameters()]
        if turn in (1, 3):
            for p in (*padded.parameters(), *packed.parameters()):
                p.grad = None
    assert all(a is b for a, b in zip(kept[2], kept[4]))  # no second set of gradients
