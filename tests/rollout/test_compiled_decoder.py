"""Sampling through a family's modules with their layers compiled, against the same uncompiled."""

import pytest
import torch

from marlhf.kernels.attention import SlotPositions, attend, attend_opaque
from marlhf.models.compile import compile_blocks
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine, decoder_error
from marlhf.rollout.slots import CompiledDecoder, ModuleDecoder

PROMPTS = [[5 + i % 7, 2 + i, *range(3, 3 + i % 5 * 4)] for i in range(13)]
ENDS = [1, 7, 9]
FAMILIES = ["gemma2", "gpt2", "gpt-neox", "phi"]
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def sample(model, decoder, **options):
    engine = NativeEngine(model, ENDS, 0, **options)
    engine._choose = lambda _: decoder
    return engine.generate(PROMPTS, Sampling(10, 0.9), range(13))


@pytest.mark.parametrize(("name", "kinds"), [("gemma2", 2), ("gpt-neox", 1)])
def test_compiled_layers_sample_what_plain_ones_sample(small, name, kinds):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = small(name)
    compile_blocks(compiled, backend="eager")
    with torch.no_grad():
        assert decoder_error(CompiledDecoder, compiled, None) < 1e-4
    # Six slots for thirteen rows: refilled, moved and shrunk on the way.
    found = sample(compiled, CompiledDecoder, token_budget=64 * 6)
    expected = sample(small(name), ModuleDecoder)
    assert found.responses == expected.responses
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    # A prefill and a step for each kind of layer, compiled for the check before sampling.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * kinds


@torch.no_grad()
def test_layers_and_numbers_of_rows_share_their_code(small):
    torch._dynamo.reset()
    model = small("gpt-neox", num_hidden_layers=4)
    compile_blocks(model, backend="eager")
    decoder = CompiledDecoder(model, 8, 32, None)
    torch._dynamo.utils.counters.clear()
    for rows, length in ((5, 7), (1, 9), (3, 1)):
        decoder.prefill(torch.full((rows, length), 5), torch.arange(rows))
    for rows in (8, 4, 2):
        decoder.step(torch.full((rows,), 6), torch.arange(rows) + 1, None)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # prefill and step
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
def test_other_passes_with_a_cache_stay_as_they_are(small):
    def refuse(*_):
        raise AssertionError("compiled")

    model = small("gpt-neox")
    compile_blocks(model, backend=refuse)
    sample(model, ModuleDecoder)
    with pytest.raises(Exception, match="compiled"):
        decoder_error(CompiledDecoder, model, None)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0)])
def test_attention_as_one_operation_is_attention(window, softcap):
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 4, 16), torch.randn(5, 2, 9, 16), torch.randn(5, 2, 9, 16)
    positions = torch.tensor([0, 8, 4])
    arguments = (query, keys, values, positions, 0.3, window, softcap)
    expected = attend(query, keys, values, SlotPositions(positions), None, 0.3, window, softcap)
    assert torch.equal(attend_opaque(*arguments), expected)
    torch.library.opcheck(attend_opaque, arguments)


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in FAMILIES])
def test_compiled_models_are_sampled_from_compiled_on_a_gpu(small, name):
    model = small(name, **({} if name == "gpt2" else {"head_dim": 16})).cuda()
    expected = sample(model, ModuleDecoder, precision="float32")
    compile_blocks(model)
    engine = NativeEngine(model, ENDS, 0, precision="float32")
    for _ in range(3):  # the first steps of each size run without a graph
        found = engine.generate(PROMPTS, Sampling(10, 0.9), range(13))
    assert engine.decoder_class is CompiledDecoder
    assert found.responses == expected.responses
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=gpu) for n in ("gemma2", "qwen3", "phi")])
def test_compiled_models_sample_with_joined_weights_in_bfloat16_on_a_gpu(small, name):
    model = small(name, head_dim=16).cuda()
    compile_blocks(model)
    engine = NativeEngine(model, ENDS, 0, precision="bfloat16")
    engine._choose = lambda _: CompiledDecoder
    first, *others = (engine.generate(PROMPTS, Sampling(10, 0.9), range(13)) for _ in range(4))
    assert engine.session.decoder.copies.parts
    assert all(each.responses == first.responses for each in others)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert decoder_error(CompiledDecoder, model, torch.bfloat16) < 0.1
