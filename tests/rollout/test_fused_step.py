"""A decode step in fewer kernels gives what the plain one gives."""

import pytest
import torch

from marlhf.rollout import Sampling, fused_step
from marlhf.rollout.kernels import triton_attend
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.plain import PlainEngine
from marlhf.rollout.state import Prefixes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "head_dim": 16}


@pytest.fixture
def exact(monkeypatch):
    """In float32, where there is nothing to round."""
    monkeypatch.setattr(fused_step, "TYPES", (torch.float32,))


def uneven(small, name, **sizes):
    """A model with no bias of 0 and no norm of 1."""
    model = small(name, **SIZES, **sizes)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.cuda()


@torch.no_grad()
def steps(model, rows, dtype, prefixes=None, first=0, cache_rows=None):
    """Logits of the plain and the fused step from the same state, and the caches after them."""
    torch.manual_seed(2)
    decoder = LlamaDecoder(model, rows, 64, dtype)
    assert decoder.fused_rows
    cache = torch.randn_like(decoder.cache)
    tokens = torch.randint(0, 48, (rows,), device="cuda")
    positions = torch.randint(first, 64, (rows,), device="cuda")
    for step in (decoder.plain_step, decoder.step):
        decoder.cache.copy_(cache)
        with decoder.ready():
            logits = step(tokens, positions, None, prefixes, cache_rows)
        yield logits.clone(), decoder.cache.clone()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("rows", [1, 16, 33, 100, 200, 300, 450, 700])
def test_logits_and_cache_are_those_of_the_plain_step(small, name, rows, exact):
    (plain, plain_cache), (ours, cache) = steps(uneven(small, name), rows, torch.float32)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache, plain_cache, atol=1e-4, rtol=1e-4)


def test_a_product_with_many_inputs_is_left_to_the_library(small, exact, monkeypatch):
    monkeypatch.setattr(fused_step, "MAX_ADDED", 128)  # that of the MLP has 192
    (plain, _), (ours, _) = steps(uneven(small, "llama"), 40, torch.float32)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_borrowed_prefixes_are_read_where_they_are(small, exact, window):
    ends = torch.arange(40, device="cuda") % 8  # below all positions, which others write to
    prefixes = Prefixes(torch.arange(39, -1, -1, device="cuda"), ends)
    model = uneven(small, "mistral", sliding_window=window)
    (plain, _), (ours, _) = steps(model, 40, torch.float32, prefixes, first=8)
    (alone, _), _ = steps(model, 40, torch.float32, first=8)
    assert window in (1, 5) or not torch.allclose(alone, plain, atol=0.1)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("borrows", [False, True])
def test_slots_may_have_their_keys_and_values_in_any_rows(small, exact, borrows):
    order = torch.arange(39, -1, -1, device="cuda")
    prefixes = Prefixes(torch.arange(40, device="cuda"), order % 8) if borrows else None
    model = uneven(small, "llama")
    (plain, plain_cache), (ours, cache) = steps(model, 40, torch.float32, prefixes, 8, order)
    (alone, _), _ = steps(model, 40, torch.float32, prefixes, 8)
    assert not torch.allclose(alone, plain, atol=0.1)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache, plain_cache, atol=1e-4, rtol=1e-4)


def common_prefixes(rows, kind):
    """Rows of the cache to read, and up to where, in positions from 32 on that nobody writes to."""
    slots = torch.arange(rows, device="cuda")
    first = {"fours": slots // 4 * 4, "threes": slots // 3 * 3, "own": slots, "one": slots * 0}[
        kind
    ]
    return Prefixes(first, 20 + first % 7 + (slots % 3 if kind == "threes" else 0), together=True)


@pytest.mark.parametrize("kind", ["fours", "threes", "own", "one"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [1, 2, 8])  # of keys; there are eight of queries
@pytest.mark.parametrize("moved", [False, True])
def test_neighbours_read_a_common_prefix_together(
    small, exact, monkeypatch, kind, name, heads, moved
):
    from marlhf.rollout import triton_shared

    monkeypatch.setattr(triton_shared, "MIN_PROGRAMS", 1)
    launched = []
    attend_shared = triton_attend.attend_shared
    monkeypatch.setattr(
        triton_attend, "attend_shared", lambda *x: [launched.append(1), attend_shared(*x)]
    )
    rows = 40
    order = torch.arange(rows - 1, -1, -1, device="cuda") if moved else None
    model = uneven(small, name, num_key_value_heads=heads)
    prefixes = common_prefixes(rows, kind)
    (plain, plain_cache), (ours, cache) = steps(model, rows, torch.float32, prefixes, 32, order)
    assert len(launched) == 2 * model.config.num_hidden_layers  # with queries rotated and not
    apart = prefixes._replace(together=False)
    (one_by_one, _), _ = steps(model, rows, torch.float32, apart, 32, order)
    torch.testing.assert_close(plain, one_by_one, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, one_by_one, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache, plain_cache, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_slots_at_rest_disturb_no_neighbour(small, exact, monkeypatch):
    """They are at position 0, to which they write, and their prefix is not read for them."""
    from marlhf.rollout import triton_shared

    monkeypatch.setattr(triton_shared, "MIN_PROGRAMS", 1)
    decoder = LlamaDecoder(uneven(small, "llama"), 40, 64, torch.float32)
    cache = torch.randn_like(decoder.cache)
    tokens = torch.randint(0, 48, (40,), device="cuda")
    positions = torch.randint(32, 64, (40,), device="cuda")
    prefixes = common_prefixes(40, "fours")
    found = []
    for rests in (torch.tensor([], dtype=torch.int64), torch.tensor([0, 5, 6, 8, 9, 10, 11, 39])):
        at = positions.index_fill(0, rests.cuda(), 0)
        decoder.cache.copy_(cache)
        with decoder.ready():
            found.append(decoder.step(tokens, at, None, prefixes).clone())
    assert found[1].isfinite().all()
    assert torch.equal(found[0][at > 0], found[1][at > 0])


@pytest.mark.parametrize("heads", [3, 9])
@torch.no_grad()
def test_reading_together_is_as_exact_as_apart_in_bfloat16(heads):
    torch.manual_seed(0)
    slots, groups, width, length = 256, 3, 64, 200
    qkv = torch.randn(slots, heads + 2 * groups, width, device="cuda")
    cache = torch.randn(slots, 2 * groups, length, width, device="cuda")
    rotary = tuple(torch.randn(length, width // 2, device="cuda").repeat(1, 2) for _ in range(2))
    positions = torch.randint(150, length, (slots,), device="cuda")
    first = torch.arange(slots, device="cuda") // 4 * 4
    errors = {}
    for together in (False, True):
        prefixes = Prefixes(first, first % 50 + 90, together)
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            keys, values = cache.bfloat16().to(dtype).clone().chunk(2, dim=1)
            x = qkv.bfloat16().to(dtype)
            arguments = (positions, None, prefixes, 0.125, None, None, rotary)
            found.append(triton_attend.attend(x, keys, values, *arguments).float())
        errors[together] = float((found[0] - found[1]).square().mean().sqrt())
    assert 0 < errors[True] < 1.05 * errors[False]


def test_bfloat16_is_as_close_to_float32_as_the_plain_step(small, monkeypatch):
    model = uneven(small, "llama", num_hidden_layers=4)
    (plain, _), (ours, _) = steps(model, 200, torch.bfloat16)
    monkeypatch.setattr(fused_step, "TYPES", (torch.float32,))
    (truth, _), _ = steps(model, 200, torch.float32)
    plain_error, our_error = ((x.float() - truth).square().mean().sqrt() for x in (plain, ours))
    assert our_error < 1.2 * plain_error
    assert plain_error > 0  # and it is another computation


@pytest.mark.parametrize("borrows", ["nothing", "apart", "together"])
@pytest.mark.parametrize("rows", [16, 90, 128, 256, 384, 512, 768])
@torch.no_grad()
def test_an_early_launch_changes_no_bit(small, monkeypatch, rows, borrows):
    """As long as kernels wait for what others write, whatever they do before."""
    from marlhf.rollout import triton_begin

    model = uneven(small, "llama", num_hidden_layers=6)
    decoder = LlamaDecoder(model, rows, 320, torch.bfloat16)
    decoder.cache.normal_()
    tokens = torch.randint(0, 48, (rows,), device="cuda")
    positions = torch.randint(8, 320, (rows,), device="cuda")
    first = torch.arange(rows, device="cuda") // 4 * 4
    prefixes = Prefixes(first, positions[first] // 2, borrows == "together")
    found = []
    for early in (False, True):
        if not early:
            monkeypatch.setattr(triton_begin, "_can_launch_early", lambda _: False)
        with decoder.ready():
            arguments = (tokens, positions, None, None if borrows == "nothing" else prefixes)
            decoder.step(*arguments)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = decoder.step(*arguments)
            for _ in range(30):
                logits.zero_()
                graph.replay()
                found.append(logits.clone())
        monkeypatch.undo()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_whole_responses_are_those_of_the_plain_engine(small, name, exact):
    model = uneven(small, name)
    prompts = [[5 + i % 7, 2 + i, *range(3, 3 + i % 5 * 4)] for i in range(13)]
    options = {"precision": "float32", "token_budget": 64 * 5}
    plain = PlainEngine(model, [1, 7], 0, **options).generate(prompts, Sampling(10), range(13))
    engine = NativeEngine(model, [1, 7], 0, **options)
    for _ in range(2):  # the second time from recorded graphs
        native = engine.generate(prompts, Sampling(10), range(13))
        assert native.responses == plain.responses
        torch.testing.assert_close(native.logprobs, plain.logprobs, atol=1e-4, rtol=0)
    assert engine.session.decoder.fused_rows
