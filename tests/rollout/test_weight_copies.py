"""Copies of matrices for sampling: autocast's numbers, in fewer products where compiled."""

import pytest
import torch

from marlhf.models.compile import compile_blocks
from marlhf.rollout.native import decoder_error
from marlhf.rollout.slots import CompiledDecoder, ModuleWeightCopies, PartOfProduct

IDS = torch.tensor([[5, 6, 7], [8, 2, 4]])


@pytest.fixture(autouse=True)
def as_sampling_does():
    with torch.no_grad():
        yield


def logits(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which keeps casts until its end
        return model(IDS).logits


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gpt2", "gemma2"])  # qwen2 has biases
def test_copies_give_autocasts_numbers(small, name, join):
    model = small(name)
    modules, copies = list(model.modules()), ModuleWeightCopies(model, torch.bfloat16, join=join)
    for _ in range(2):
        with copies.applied():
            assert model.lm_head.weight.dtype == torch.bfloat16
            parts = any(isinstance(module, PartOfProduct) for module in model.modules())
            assert parts == (join and name != "gpt2")
            found = logits(model)
        torch.testing.assert_close(found, logits(model), atol=0.02, rtol=0.02)
        assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        for weight in model.parameters():  # the second time there are others to copy
            weight.mul_(1.5)


def test_copies_are_gone_after_an_error(small):
    model = small("gemma2")
    modules = list(model.modules())
    with (
        pytest.raises(ZeroDivisionError),
        ModuleWeightCopies(model, torch.bfloat16, join=True).applied(),
    ):
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_layers_that_are_more_than_a_matrix_are_not_joined(small):
    model = small("gemma2")
    assert len(ModuleWeightCopies(model, torch.bfloat16, join=True).parts) == 4
    first, second = model.model.layers
    first.self_attn.k_proj = torch.nn.Sequential(first.self_attn.k_proj)
    first.mlp.up_proj.register_forward_hook(lambda *_: None)
    second.self_attn.v_proj.forward = lambda x: x
    size = second.mlp.up_proj.in_features, second.mlp.up_proj.out_features
    second.mlp.up_proj = torch.nn.Linear(*size, bias=True)
    assert not ModuleWeightCopies(model, torch.bfloat16, join=True).parts


def test_a_compiled_layer_has_four_products(small):
    products = []

    def count(graph, _):
        products.append(
            sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes)
        )
        return graph.forward

    def with_copies(*arguments):
        decoder = CompiledDecoder(*arguments)
        decoder.copies = ModuleWeightCopies(model, torch.bfloat16, join=True)  # as on a GPU
        return decoder

    torch._dynamo.reset()
    model = small("qwen3", num_hidden_layers=1)
    compile_blocks(model, backend=count)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert decoder_error(with_copies, model, torch.bfloat16) < 0.03
    assert products == [4, 4]  # of a prefill, and of a step
