"""On a CPU, passes without padding give the numbers and gradients of the model's own forward."""

import copy

import pytest
import torch

from marlhf.models import forward
from marlhf.models.forward import (
    Sequences,
    final_scores,
    token_stats,
    token_values,
    unpad_rows,
)

UNPADDED = ("llama", "llama-tied", "qwen2", "qwen3")
PROMPTS = [
    [5, 6, 0, 8],  # 0 pads, and pads have no gradient
    [9, 10],
    [11, 12, 13, 14, 15, 16, 17],
    [18],
]
RESPONSES = [[20, 21, 1], [22, 23, 24, 25, 26], [], [27]]
EQUAL = [[5, 6, 7], [8, 9, 10]]
LONG = [[5 + i % 20 for i in range(40)], [9, 10]]  # with both, several blocks of queries
LONG_RESPONSES = [[7 + i % 19 for i in range(31)], [11, 12, 13]]


def read_logprobs(model, sequences):
    return token_stats(model, sequences, 0.7).logprobs


def assert_same_gradients(model, plain):
    grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert grads.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if name in grads:
            scale = float(grads[name].abs().max())
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", UNPADDED)
@pytest.mark.parametrize("read", [read_logprobs, token_values, final_scores])
@pytest.mark.parametrize(
    "rows",
    [(PROMPTS, RESPONSES), (EQUAL, EQUAL), (LONG, LONG_RESPONSES)],
    ids=["uneven", "equal", "long"],
)
def test_numbers_and_gradients_are_the_models_own(small, name, read, rows, monkeypatch):
    model = small(name, read is not read_logprobs, attention_bias=name == "llama")
    for parameter in model.parameters():  # no bias of 0, no norm of 1
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    plain, sequences = copy.deepcopy(model), Sequences.from_lists(*rows, 0)
    unpad_rows(model)
    calls = []
    real = forward.unpadded_hidden
    monkeypatch.setattr(forward, "unpadded_hidden", lambda *a: calls.append(1) or real(*a))
    ours = read(model, sequences)
    assert calls == [1]
    theirs = read(plain, sequences)
    weights = torch.rand(ours.shape, generator=torch.Generator().manual_seed(0))
    for found in (ours, theirs):
        (found * weights).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert calls == [1]
    assert_same_gradients(model, plain)


def fits(model, longest):
    unpad_rows(model)
    return forward._can_unpad(model, Sequences.from_lists([[5] * (longest - 1)], [[6]], 0))


def test_only_plain_models_within_their_window_are_unpadded(small):
    assert fits(small("mistral"), 4)
    assert not fits(small("mistral"), 5)  # its window is 4
    assert not fits(small("gpt2"), 4)
    assert not fits(small("gemma2"), 4)
    checkpointed = small("llama")
    checkpointed.gradient_checkpointing_enable()
    assert not fits(checkpointed, 4)
    hooked = small("llama")
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not fits(hooked, 4)
    remote = small("llama")  # code that came with a model may compute anything under this name
    remote.__class__ = type("LlamaForCausalLM", (type(remote),), {"__module__": "modeling_mine"})
    assert not fits(remote, 4)
    assert not fits(small("llama").bfloat16(), 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(small("llama"), 4)
