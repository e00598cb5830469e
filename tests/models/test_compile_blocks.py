import copy
import pickle

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from marlhf.models.compile import compile_blocks, is_compiled, uncompiled
from marlhf.models.forward import Sequences, token_stats, token_values


def batch(rows=2, length=5):
    prompts = [[5, 6, 7 + i] for i in range(rows)]
    responses = [[3 + i + j for j in range(length - i)] for i in range(rows)]
    return Sequences.from_lists(prompts, responses, 0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_compiled_layers_give_what_plain_ones_give(small, family):
    plain, compiled = small(family, scalar=True), small(family, scalar=True)
    compile_blocks(compiled, backend="eager")
    for sequences in (batch(), batch(3, 7)):
        expected, found = token_values(plain, sequences), token_values(compiled, sequences)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        expected.sum().backward()
        found.sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_layers_and_shapes_share_their_code(small):
    torch._dynamo.reset()
    model = small("llama", scalar=True, num_hidden_layers=5)
    compile_blocks(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    for shape in ((2, 6), (3, 7), (4, 9), (5, 11)):
        token_values(model, batch(*shape))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_stages_with_many_settings_in_one_process_all_stay_compiled():
    torch._dynamo.reset()
    graphs = []

    class Layer(GradientCheckpointingLayer):
        def forward(self, hidden_states):
            return hidden_states * 2

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = torch.nn.Sequential(Layer())
    compile_blocks(model, backend=backend)
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for gradients in (True, False):
                for deterministic in (True, False):
                    torch.use_deterministic_algorithms(deterministic)
                    with torch.set_grad_enabled(gradients):
                        model(torch.ones(2, 3, dtype=dtype))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(graphs) == 12  # torch's own limit is 8


@torch.no_grad()
def test_passes_with_a_cache_are_not_compiled(small):
    model = small("llama")
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)

    def refuse(*_):
        raise AssertionError("compiled")

    compile_blocks(model, backend=refuse)
    found = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert found.tolist() == expected.tolist()
    with pytest.raises(Exception, match="compiled"):
        token_values(_scalar_like(model, small, refuse), batch())


def _scalar_like(model, small, backend):
    scalar = small("llama", scalar=True)
    compile_blocks(scalar, backend=backend)
    return scalar


@torch.no_grad()
def test_a_copy_runs_its_own_layers(small):
    model = small("llama", scalar=True)
    compile_blocks(model, backend="eager")
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.zero_()
    assert is_compiled(model)
    assert not token_values(copied, batch()).any()
    assert token_values(model, batch()).any()
    assert model.state_dict().keys() == copied.state_dict().keys()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@torch.no_grad()
def test_layers_pass_bfloat16_on_under_autocast(small):
    model, seen = small("llama"), []
    expected = token_stats(model, batch()).logprobs
    model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    compile_blocks(model, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_stats(model, batch()).logprobs
    assert seen == [torch.bfloat16]
    torch.testing.assert_close(found, expected, atol=0.3, rtol=0)


@torch.no_grad()
def test_a_compiled_model_arrives_plain_in_another_process(small):
    model = small("llama")
    compile_blocks(model, backend="eager")
    sent = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    layer = sent.model.layers[0]
    assert layer.forward.__func__ is type(layer).forward
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(sent(ids).logits, small("llama")(ids).logits)


@torch.no_grad()
def test_passes_that_are_not_worth_it_are_not_compiled(small):
    def refuse(*_):
        raise AssertionError("compiled")

    plain, model = small("gemma2"), small("gemma2")
    compile_blocks(model, backend=refuse)
    ids = torch.tensor([[5, 6, 7]])
    with uncompiled():
        found = model(ids, use_cache=False).logits
    assert torch.equal(found, plain(ids, use_cache=False).logits)
    with pytest.raises(Exception, match="compiled"):
        model(ids, use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize(("changes", "products"), [(False, 1), (True, 2)])
def test_equal_products_are_computed_once_unless_their_input_changes(changes, products):
    torch._dynamo.reset()
    found = []

    class Layer(GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.product = torch.nn.Linear(3, 2)

        def forward(self, hidden_states):
            x = hidden_states + 1
            before = self.product(x)
            if changes:
                x += 1
            return before - self.product(x)

    def count(graph, inputs):
        found.append(sum(n.target is torch.nn.functional.linear for n in graph.graph.nodes))
        return graph.forward

    plain = Layer()
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled, backend=count)
    x = torch.randn(4, 3)
    assert torch.equal(compiled(x), plain(x))
    assert found == [products]
