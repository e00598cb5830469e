"""Passes by our own kernels give the numbers and gradients of the model's own forward."""

import copy

import pytest
import torch
from tests.models.test_unpadded import (
    EQUAL,
    LONG_RESPONSES,
    PROMPTS,
    RESPONSES,
    assert_same_gradients,
    read_logprobs,
)

from marlhf.models import fast_passes, layer_kernels, llama_layers
from marlhf.models.compile import compile_blocks
from marlhf.models.fast_passes import pack_rows, use_kernels
from marlhf.models.forward import Sequences, final_scores, token_values

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WITH_KERNELS = ("llama", "llama-tied", "qwen2")


MANY_BLOCKS = [[5 + i % 20 for i in range(600)], [9, 10]], LONG_RESPONSES
READ = [read_logprobs, token_values, final_scores]


def both_ways(model, monkeypatch):
    """The model as it is and with kernels, no bias of 0 and no norm of 1; and calls of kernels."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.data += 0.1 * noise.to(parameter)
    plain, calls = copy.deepcopy(model), []
    use_kernels(model)
    real = llama_layers.kernel_hidden
    monkeypatch.setattr(llama_layers, "kernel_hidden", lambda *a: calls.append(1) or real(*a))
    return plain, calls


@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("rows", [(PROMPTS, RESPONSES), (EQUAL, EQUAL)], ids=["uneven", "equal"])
@pytest.mark.parametrize("way", ["padded", "packed", "own attention"])
def test_numbers_and_gradients_are_the_models_own(small, name, read, rows, way, monkeypatch):
    model = small(name, read is not read_logprobs)
    plain, calls = both_ways(model, monkeypatch)
    if way == "packed":
        pack_rows(model)
    if way == "own attention":
        monkeypatch.setattr(llama_layers, "has_attention", lambda *_: True)
    sequences = Sequences.from_lists(*rows, 0)
    ours, theirs = read(model, sequences), read(plain, sequences)
    assert calls == [1]
    weights = torch.rand(ours.shape, generator=torch.Generator().manual_seed(0))
    for found in (ours, theirs):
        (found * weights).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, plain)
    with torch.no_grad():  # another way there
        torch.testing.assert_close(read(model, sequences), ours.detach(), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("read", READ)
def test_a_frozen_model_gives_the_same_numbers_again_and_again(small, name, read, monkeypatch):
    model = small(name, read is not read_logprobs).requires_grad_(False)
    plain, _ = both_ways(model, monkeypatch)
    sequences = Sequences.from_lists(PROMPTS, RESPONSES, 0)
    with torch.no_grad():
        first, second, theirs = (read(m, sequences) for m in (model, model, plain))
    torch.testing.assert_close(first, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)  # residuals are added up in place, and nothing else


def fits(model, longest=4):
    use_kernels(model)
    return fast_passes.has_kernels(model, longest)


def test_only_plain_models_within_their_window_have_kernels(small):
    assert fits(small("mistral"), 4)
    assert not fits(small("mistral"), 5)  # its window is 4
    for name in ("gpt2", "gemma2", "qwen3"):
        assert not fits(small(name))
    assert not fits(small("llama", attention_bias=True))  # its output projection has one, too
    assert not fits(small("llama", mlp_bias=True))
    checkpointed = small("llama")
    checkpointed.gradient_checkpointing_enable()
    assert not fits(checkpointed)
    hooked = small("llama")
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not fits(hooked)
    replaced = small("llama")
    assert fits(replaced)
    replaced.model.layers[0].mlp = torch.nn.Identity()
    assert not fast_passes.has_kernels(replaced, 4)
    dropping = small("llama", attention_dropout=0.1)
    assert not fits(dropping.train())
    assert fits(dropping.eval())


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in WITH_KERNELS])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("gated_tokens", [layer_kernels.GATED_TOKENS, 1])
@pytest.mark.parametrize("rows", [(PROMPTS, RESPONSES), MANY_BLOCKS], ids=["short", "long"])
def test_on_a_gpu_they_are_as_close_as_bfloat16_allows(
    small, name, read, gated_tokens, rows, monkeypatch
):
    monkeypatch.setattr(layer_kernels, "GATED_TOKENS", gated_tokens)  # those of products and SwiGLU
    settings = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}
    model = small(name, read is not read_logprobs, **settings).cuda()
    plain, calls = both_ways(model, monkeypatch)
    exact = copy.deepcopy(plain)
    compile_blocks(plain, backend="eager")  # bfloat16 from layer to layer, here too
    sequences = Sequences.from_lists(*rows, 0, "cuda")
    for turn in range(4):  # as it is, recorded, replayed, replayed
        with torch.autocast("cuda", torch.bfloat16):
            ours, theirs = read(model, sequences), read(plain, sequences)
        truth = read(exact, sequences)
        for found in (ours, theirs, truth):
            found.square().sum().backward()
        assert (ours - truth).norm() < 2 * (theirs - truth).norm() + 0.01 * truth.norm()
        parameters = zip(model.named_parameters(), plain.parameters(), exact.parameters())
        for (name, a), b, c in parameters:
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is None:
                continue
            worst = 2 * (b.grad - c.grad).norm() + 0.03 * c.grad.norm() + 1e-4
            assert (a.grad - c.grad).norm() < worst, (name, turn)
            with torch.no_grad():  # an optimiser's step moves all alike
                step = 0.01 * c.grad / (c.grad.norm() + 1)  # however many tokens it sums up
                for p in (a, b, c):
                    p.sub_(step)
                    p.grad = None
    assert calls[:1] == [1]
    assert len(calls) == 3  # as it is, and twice to record


ROWS, LENGTH, HEADS, GROUPS = 3, 37, 6, 2


def random(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def kernel_cases():
    """Arguments of each kernel, by its name; widths that are not powers of two among them."""
    tokens, width = ROWS * LENGTH, 16
    positions = torch.arange(LENGTH).repeat(ROWS)
    angles = random(LENGTH, width // 2, dtype=torch.float32).repeat(1, 2)
    rotary = angles.cos(), angles.sin()
    heads = random(ROWS, LENGTH, HEADS + 2 * GROUPS, width).transpose(1, 2)
    grads = heads.split((HEADS, GROUPS, GROUPS), dim=1)
    for size in (96, 576, 5000):
        x, weight = random(tokens, size), random(size, dtype=torch.float32)
        yield "add_norm", (x, None, weight, 1e-5, torch.bfloat16)
        yield "add_norm", (x, random(tokens, size) / 2, weight, 1e-5, torch.float32)
        yield "norm_backward", (random(tokens, size) * 2, x, weight, 1e-5, None)
        yield "norm_backward", (random(tokens, size) * 2, x, weight, 1e-5, random(tokens, size))
        outer = random(tokens, size, dtype=torch.float32)
        yield "normed_weight_grads", (outer, x, weight)
        yield "normed_weight_grads", (outer, x.float(), weight.bfloat16())
        yield "swiglu", (random(tokens, 2 * size),)
        yield "swiglu_backward", (x, random(tokens, 2 * size))
        yield "pick", (3 * random(tokens, size), torch.arange(tokens) % size)
    hidden = random(7, 96)
    hidden[0, 5:] = hidden[1, :5] = -torch.inf
    yield "pick", (hidden, torch.tensor([1, 7, 0, 0, 0, 0, 0]))
    yield "norm_backward", (random(9000, 96), random(9000, 96), random(96), 1e-6, None)
    yield (
        "norm_backward",
        (random(9, 64, dtype=torch.float32), random(9, 64), random(64), 0.1, None),
    )
    for which in (range(HEADS + GROUPS), range(HEADS, HEADS + GROUPS)):
        yield "rotate", (random(tokens, HEADS + 2 * GROUPS, width), rotary, positions, which)
    yield "rotate_backward", (grads, rotary, positions)
    yield "rotate_backward", (tuple(g.contiguous() for g in grads), rotary, positions)


@pytest.mark.parametrize("length", [5, 64, 150, 700])
@pytest.mark.parametrize(("groups", "width"), [(1, 16), (2, 64), (6, 32)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_attention_is_torchs_own(length, groups, width, device):
    """In float32, with the gradient of what was rotated before."""
    heads = random(ROWS, length, HEADS + 2 * groups, width, dtype=torch.float32).to(device)
    angles = random(length, width // 2, dtype=torch.float32).repeat(1, 2).to(device)
    rotary = angles.cos(), angles.sin()
    leaf = heads.clone().requires_grad_()
    turned, values = leaf.split((HEADS + groups, groups), dim=2)
    a, b = turned.chunk(2, dim=3)
    turned = turned * rotary[0][:, None] + torch.cat((-b, a), dim=3) * rotary[1][:, None]
    qkv = torch.cat((turned, values), dim=2)
    query, key, value = qkv.transpose(1, 2).split((HEADS, groups, groups), dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.2, enable_gqa=True
    ).transpose(1, 2)
    grad = random(*expected.shape, dtype=torch.float32).to(device)
    expected.backward(grad)
    out, lse = layer_kernels.attention(qkv.detach(), HEADS, 0.2)
    ours = layer_kernels.attention_backward(grad, qkv.detach(), out, lse, rotary, 0.2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, leaf.grad, rtol=1e-4, atol=1e-4)
    # Queries may be left for attention to rotate.
    for keep in (True, False):
        half = torch.cat((heads[:, :, :HEADS], qkv[:, :, HEADS:]), dim=2).detach()
        again, _ = layer_kernels.attention(half, HEADS, 0.2, rotary, keep=keep)
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
        if keep:
            torch.testing.assert_close(half, qkv.detach())


CASES = [pytest.param(*case, marks=gpu) for case in kernel_cases()]


@pytest.mark.parametrize(("name", "args"), CASES)
def test_kernels_compute_what_their_plain_twins_do(name, args):
    compare_with_plain(name, args, "cuda")


@pytest.mark.parametrize("case", [pytest.param(c, marks=gpu) for c in ((96, 200), (576, 1536))])
@pytest.mark.parametrize("tokens", [4096, 4321])
def test_gates_in_one_kernel_are_those_of_two(case, tokens, monkeypatch):
    """Nearly to the bit, so that passes without gradients are those with them."""
    size, outputs = case
    x, weight = random(tokens, size).cuda(), random(2 * outputs, size).cuda() / size**0.5
    down, gate_up = random(size, outputs).cuda() / size**0.5, random(tokens, 2 * outputs).cuda()

    def results():
        yield layer_kernels.gated(x, weight)
        yield from layer_kernels.gated_backward(x, down, gate_up)

    gates = layer_kernels.triton_gates
    assert gates.can_gate(x, weight) == (torch.cuda.get_device_capability()[0] == 9)
    one = list(results())
    monkeypatch.setattr(layer_kernels, "GATED_TOKENS", tokens + 1)
    two = list(results())
    truth = (
        layer_kernels.swiglu(x.float() @ weight.float().T),
        *layer_kernels.swiglu_backward(x.float() @ down.float(), gate_up.float()),
    )
    for ours, plain, exact in zip(one, two, truth, strict=True):
        torch.testing.assert_close(ours.float(), exact, rtol=0.02, atol=0.02)
        assert (ours == plain).float().mean() > 0.999  # sums may be added in another order
        torch.testing.assert_close(ours, plain, rtol=0.01, atol=0.01)


def compare_with_plain(name, args, device):
    module = layer_kernels.triton_norms if "norm" in name else layer_kernels.triton_layers
    kernel, plain = getattr(module, name), getattr(layer_kernels, name)

    def moved(x, device):
        if isinstance(x, tuple):
            return tuple(moved(y, device) for y in x)
        return x.to(device, copy=True) if isinstance(x, torch.Tensor) else x

    mine, theirs = moved(args, device), moved(args, "cpu")
    ours, expected = kernel(*mine), plain(*theirs)
    if ours is None:  # it works in place
        ours, expected = mine[0], theirs[0]
    pairs = zip(ours, expected) if isinstance(ours, tuple) else [(ours, expected)]
    for found, wanted in pairs:
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found.cpu(), wanted, rtol=0.02, atol=0.02)
