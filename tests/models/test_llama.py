"""The pass of `llama.py` gives the numbers and gradients of transformers' own modules."""

import copy

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from marlhf.models import forward, llama
from marlhf.models.compile import compile_blocks
from marlhf.models.forward import (
    Sequences,
    choose_passes,
    final_scores,
    pass_choice,
    token_stats,
    token_values,
)
from marlhf.models.llama import is_unchanged
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.native import decoder_error

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3")
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


READ = [read_logprobs, token_values, final_scores]


def both_ways(model, monkeypatch):
    """A copy by modules, `model` by llama.py, no bias of 0 and no norm of 1; and passes so far."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.data += 0.1 * noise.to(parameter)
    plain, passes = copy.deepcopy(model), []
    choose_passes(model)
    real = forward.selected_hidden
    monkeypatch.setattr(forward, "selected_hidden", lambda *a: passes.append(1) or real(*a))
    return plain, passes


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(
    "rows",
    [(PROMPTS, RESPONSES), (EQUAL, EQUAL), (LONG, LONG_RESPONSES)],
    ids=["uneven", "equal", "long"],
)
def test_numbers_and_gradients_are_the_models_own(small, name, read, rows, monkeypatch):
    biases = {"attention_bias": True, "mlp_bias": True} if name == "llama" else {}
    model = small(name, read is not read_logprobs, **biases)
    plain, passes = both_ways(model, monkeypatch)
    sequences = Sequences.from_lists(*rows, 0)
    ours, theirs = read(model, sequences), read(plain, sequences)
    assert passes == [1]
    weights = torch.rand(ours.shape, generator=torch.Generator().manual_seed(0))
    for result in (ours, theirs):
        (result * weights).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("read", READ)
def test_weights_in_the_right_type_are_multiplied_one_by_one(small, read, monkeypatch):
    """As in models too large to copy; small ones are joined."""
    monkeypatch.setattr("marlhf.models.llama.SMALL_MATRIX", 0)
    model = small("qwen3", read is not read_logprobs)
    plain, _ = both_ways(model, monkeypatch)
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0)
    for each in (model, plain):
        read(each, sequences).square().sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("scalar", [False, True])
def test_frozen_parameters_get_no_gradient(small, scalar, monkeypatch):
    model = small("qwen2", scalar)
    plain, _ = both_ways(model, monkeypatch)
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0)
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("layers.0" not in name and "down_proj" not in name)
        READ[scalar](each, sequences).sum().backward()
    assert_same_gradients(model, plain)


def test_under_autocast_matrices_are_multiplied_in_bfloat16(small, monkeypatch):
    model = small("llama")
    plain, passes = both_ways(model, monkeypatch)
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0)
    exact = read_logprobs(plain, sequences)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = read_logprobs(model, sequences), read_logprobs(plain, sequences)
    assert passes == [1]
    assert 0 < (ours - exact).norm() < 2 * (theirs - exact).norm() + 0.01 * exact.norm()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_gpus_pass_is_compiled_once_for_batches_of_all_sizes(small, name, monkeypatch):
    """As on a GPU: padded rows, a compiled call per layer. Here without a compiler of kernels."""
    model = small(name, num_hidden_layers=3)
    plain, _ = both_ways(model, monkeypatch)
    graphs, real = [], llama.TokenLayout.of

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    llama._compiled.cache_clear()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: backend)
    monkeypatch.setattr(llama, "on_device", lambda function, _: llama._compiled(function))
    monkeypatch.setattr(llama.TokenLayout, "of", lambda *a, **k: real(*a, **{**k, "padded": True}))
    counts = []
    for rows in ((PROMPTS, RESPONSES), (LONG, LONG_RESPONSES), (EQUAL, EQUAL)):
        sequences = Sequences.from_lists(*rows, 0)
        for each in (model, plain):
            each.zero_grad()
        ours, theirs = read_logprobs(model, sequences), read_logprobs(plain, sequences)
        for result in (ours, theirs):
            result.square().sum().backward()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert_same_gradients(model, plain)
        counts.append(len(graphs))
    llama._compiled.cache_clear()
    # The first layer, the others, and the last in two halves.
    assert counts == [4, 4, 4]


def fits(model, longest=4):
    choose_passes(model)
    return pass_choice(model).by_llama and is_unchanged(model, longest)


def test_only_plain_models_within_their_window_take_this_pass(small):
    assert fits(small("mistral"), 4)
    assert not fits(small("mistral"), 5)  # its window is 4
    assert not fits(small("gpt2"))
    assert not fits(small("gemma2"))
    checkpointed = small("llama")
    checkpointed.gradient_checkpointing_enable()
    assert not fits(checkpointed)
    hooked = small("llama")
    assert fits(hooked)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not is_unchanged(hooked, 4)
    dropping = small("llama", attention_dropout=0.1)
    assert not fits(dropping.train())
    assert fits(dropping.eval())
    remote = small("llama")  # code that came with a model may compute anything under this name
    remote.__class__ = type("LlamaForCausalLM", (type(remote),), {"__module__": "modeling_mine"})
    assert not fits(remote)


def test_llama_3_and_qwen_3_take_this_pass_and_sample_by_it(small):
    """Llama 3 stretches its rotary embeddings, alike for texts of any length."""
    stretched = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    stretched |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stretched["original_max_position_embeddings"] = 16
    for model in (small("llama", rope_parameters=stretched), small("qwen3")):
        plain = copy.deepcopy(model)
        assert fits(model, 71)
        assert LlamaDecoder.fits(model)
        assert decoder_error(LlamaDecoder, model, None, 71) < 1e-3
        sequences = Sequences.from_lists(LONG, LONG_RESPONSES, 0)
        torch.testing.assert_close(
            read_logprobs(model, sequences), read_logprobs(plain, sequences), rtol=1e-4, atol=1e-4
        )


def test_a_copy_of_a_model_keeps_its_passes_and_has_its_own_weights(small):
    model = small("llama")
    choose_passes(model)
    other = copy.deepcopy(model)
    assert pass_choice(other).by_llama
    assert pass_choice(other) is not pass_choice(model)
    other.model.layers[0].mlp.down_proj.weight.data += 1
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0)
    assert not torch.allclose(read_logprobs(model, sequences), read_logprobs(other, sequences))


MANY = (
    [[2 + (7 * i + j) % 40 for j in range(1 + i % 13)] for i in range(48)],
    [[3 + (5 * i + j) % 40 for j in range(1 + i % 7)] for i in range(48)],
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in FAMILIES])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("rows", [MANY, (LONG, LONG_RESPONSES)], ids=["many", "long"])
def test_on_a_gpu_they_are_as_close_as_bfloat16_allows(small, name, read, rows, monkeypatch):
    """To float32, in all numbers and all gradients together, as close as transformers' modules."""
    settings = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}
    model = small(name, read is not read_logprobs, **settings).cuda()
    plain, passes = both_ways(model, monkeypatch)
    exact = copy.deepcopy(plain)
    compile_blocks(plain, backend="eager")  # bfloat16 from layer to layer, here too
    sequences = Sequences.from_lists(*rows, 0, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = read(model, sequences), read(plain, sequences)
    truth = read(exact, sequences)
    assert passes == [1]
    for result in (ours, theirs, truth):
        result.square().sum().backward()
    assert (ours - truth).norm() < 2 * (theirs - truth).norm() + 0.02 * truth.norm()
    grads = [
        torch.cat(
            [p.grad.flatten() / p.grad.norm() for p in each.parameters() if p.grad is not None]
        )
        for each in (model, plain, exact)
    ]
    assert grads[0].shape == grads[1].shape == grads[2].shape
    ours, theirs = ((each - grads[2]).norm() for each in grads[:2])
    assert ours < 1.5 * theirs + 0.02 * grads[2].norm()


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in FAMILIES])
def test_on_a_gpu_float32_gives_the_modules_numbers_and_gradients(small, name, monkeypatch):
    model = small(name).cuda()
    plain, _ = both_ways(model, monkeypatch)
    sequences = Sequences.from_lists(LONG, LONG_RESPONSES, 0, "cuda")
    ours, theirs = (read_logprobs(m, sequences) for m in (model, plain))
    for result in (ours, theirs):
        result.square().sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    for a, b in zip(model.parameters(), plain.parameters()):
        if b.grad is not None:
            torch.testing.assert_close(
                a.grad, b.grad, rtol=1e-2, atol=1e-2 * float(b.grad.abs().max())
            )
