"""The pass of `llama.py` gives the numbers and gradients of transformers' own modules."""

import copy

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from marlhf.config.stage import LoRA
from marlhf.models import forward, llama
from marlhf.models.adapters import FrozenBaseModel
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
from marlhf.rollout import Sampling
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.native import NativeEngine, decoder_error

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


def compiled_as_on_a_gpu(monkeypatch):
    """Padded rows, a compiled call per layer; without a compiler of kernels. The graphs so far."""
    graphs, real = [], llama.TokenLayout.of

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    llama._compiled.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: backend)
    monkeypatch.setattr(llama, "on_device", lambda function, _: llama._compiled(function))
    monkeypatch.setattr(llama.TokenLayout, "of", lambda *a, **k: real(*a, **{**k, "padded": True}))
    return graphs


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_gpus_pass_is_compiled_once_for_batches_of_all_sizes(small, name, monkeypatch):
    model = small(name, num_hidden_layers=3)
    plain, _ = both_ways(model, monkeypatch)
    graphs = compiled_as_on_a_gpu(monkeypatch)
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


def adapted(model):
    """A policy, a critic, and a reference on one base, with adapters as if they were trained."""
    pytest.importorskip("peft")
    base = FrozenBaseModel(model)
    views = (
        base.language_model(LoRA(r=4)),
        base.scalar_model(LoRA(r=2, target_modules=("q_proj", "down_proj"))),
        base.language_model(None),
    )
    generator = torch.Generator().manual_seed(0)
    for view in views:
        for parameter in view.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data.to(model.device)
    return views


def stats_and_gradients(view, sequences):
    read = token_values if hasattr(view, "score") else read_logprobs
    result = read(view, sequences)
    if result.requires_grad:
        view.zero_grad()
        result.square().sum().backward()
    return [result.detach(), *(p.grad for p in view.parameters())]


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_take_this_pass_with_the_modules_numbers(small, name):
    views = adapted(small(name))
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0)
    theirs = [[x.clone() for x in stats_and_gradients(view, sequences)] for view in views]
    for view in views:
        choose_passes(view)
        assert pass_choice(view).by_llama
    for view, expected in zip(views, theirs):
        for found, x in zip(stats_and_gradients(view, sequences), expected, strict=True):
            torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-5 * float(x.abs().max()))


def test_adapters_are_compiled_once_for_batches_of_all_sizes(small, monkeypatch):
    views = adapted(small("llama", num_hidden_layers=4))[:2]
    for view in views:
        choose_passes(view)
    graphs, counts = compiled_as_on_a_gpu(monkeypatch), []
    for rows in ((PROMPTS, RESPONSES), (LONG, LONG_RESPONSES), (EQUAL, EQUAL)):
        for view in views:
            stats_and_gradients(view, Sequences.from_lists(*rows, 0))
        counts.append(len(graphs))
    llama._compiled.cache_clear()
    assert counts == [8, 8, 8]  # of each view what a model without adapters takes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_with_an_adapter_samples_by_it(small, name):
    policy, *_ = adapted(small(name))
    assert LlamaDecoder.fits(policy)
    engine = NativeEngine(policy, [-1], 0)
    for _ in range(2):  # the second time after an update, with the same decoder
        rollout = engine.generate(PROMPTS, Sampling(max_new_tokens=6), seeds=[0, 1, 2, 3])
        assert engine.decoder_class is LlamaDecoder
        sequences = Sequences.from_lists(PROMPTS, rollout.responses, 0)
        trained = token_stats(policy, sequences).logprobs
        torch.testing.assert_close(rollout.logprobs, trained, rtol=0, atol=1e-5)
        for parameter in policy.parameters():
            parameter.data *= 1.5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_adapters_are_as_close_as_bfloat16_allows(small, device):
    """To float32, in numbers and in all gradients together, as close as transformers' modules."""
    model = small("qwen3", hidden_size=256, intermediate_size=512).to(device)
    views = adapted(model)
    sequences = Sequences.from_lists(LONG, LONG_RESPONSES, 0, device)

    def numbers(view):
        result, *grads = stats_and_gradients(view, sequences)
        return result, torch.cat([torch.zeros(1, device=device), *map(torch.flatten, grads)])

    exact = [numbers(view) for view in views]
    with torch.autocast(device, torch.bfloat16):
        by_modules = [numbers(view) for view in views]
        for view in views:
            choose_passes(view)
        ours = [numbers(view) for view in views]
    for trio in zip(ours, by_modules, exact):
        for found, theirs, truth in zip(*trio):
            assert (found - truth).norm() <= 2 * (theirs - truth).norm() + 0.02 * truth.norm()
    rollout = NativeEngine(views[0], [-1], 0, precision="bfloat16").generate(
        LONG, Sampling(max_new_tokens=9), [0, 1]
    )
    with torch.autocast(device, torch.bfloat16):
        again = Sequences.from_lists(LONG, rollout.responses, 0, device)
        trained = token_stats(views[0], again).logprobs
    assert (trained - rollout.logprobs).abs().mean() < 0.05
