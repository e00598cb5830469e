"""The fast engine against its plain twin, and its parts against theirs."""

import contextlib
import gc
import itertools
import platform
import weakref
from random import Random

import pytest
import torch

from marlhf.kernels import attention
from marlhf.rollout import Sampling, continuous, native
from marlhf.rollout.continuous import sample
from marlhf.rollout.engine import draws
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.native import NativeEngine, decoder_error
from marlhf.rollout.plain import PlainEngine
from marlhf.rollout.slots import ModuleDecoder
from marlhf.rollout.state import DecodeState

PROMPTS = [[5 + i % 7, 2 + i, *range(3, 3 + i % 5 * 4)] for i in range(13)]
ENDS = [1, 7, 9]
gpu = pytest.mark.gpu
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def together(model, sampling, seeds=range(13), prompts=PROMPTS, **options):
    """Responses and log-probs of the plain engine and of the native one."""
    plain = PlainEngine(model, ENDS, 0, **options).generate(prompts, sampling, seeds)
    engine = NativeEngine(model, ENDS, 0, **options)
    native = engine.generate(prompts, sampling, seeds)
    return plain, native, engine


def assert_same_logprobs(ours, theirs):
    """Bit for bit, where products do not depend on the number of rows."""
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    if platform.machine() == "aarch64":
        assert ours.equal(theirs)


def test_large_prefills_are_split_where_they_would_be_padding(small, monkeypatch):
    """Seen from outside: how many prompts go into one prefill."""
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 8)
    batches = []
    prefill = LlamaDecoder.prefill

    def seen(self, ids, slots):
        batches.append(len(ids))
        prefill(self, ids, slots)

    def batches_of(lengths):
        prompts = [[5 + i, *range(2, 2 + n)] for i, n in enumerate(lengths)]
        engine = NativeEngine(small("llama"), ENDS, 0, token_budget=32 * 64)
        engine.generate(prompts, Sampling(2), range(len(lengths)))  # also checks the decoder
        engine.session.decoder.prefill_tokens = 32
        batches.clear()
        engine.generate(prompts, Sampling(2), range(len(lengths)))
        return sorted(batches)

    monkeypatch.setattr(LlamaDecoder, "prefill", seen)
    assert batches_of([4] * 8) == [8]
    assert batches_of([7, 1, 2, 3, 6, 2]) == [1, 1, 1, 3]


@pytest.mark.parametrize("early", [1, 2, 32])
def test_families_are_the_same_however_much_is_compared_first(monkeypatch, early):
    monkeypatch.setattr(continuous, "EARLY", early)
    random = Random(early)
    for shortest in (1, 3):
        lengths = [random.randint(shortest, 6) for _ in range(40)]
        prompts = [[random.randint(1, 2) for _ in range(length)] for length in lengths]
        found = continuous.prefix_families(prompts)
        expected = continuous._families(list(range(40)), prompts)
        assert sorted(found) == sorted(min(family) for family in expected for _ in family)
        for a, b in itertools.combinations(range(40), 2):
            short, long = sorted((prompts[a][:-1], prompts[b][:-1]), key=len)
            begins = long[: len(short)] == short
            assert begins or found[a] != found[b]
            assert found[a] == found[b] or short != long


@pytest.mark.parametrize("sampling", [Sampling(10, 0.9), Sampling(10, 1.0, top_k=9, top_p=0.8)])
def test_slots_sample_what_the_plain_loop_samples(small, family, sampling):
    plain, native, engine = together(small(family), sampling)
    assert native.responses == plain.responses
    assert native.ended.equal(plain.ended)
    torch.testing.assert_close(native.logprobs, plain.logprobs, atol=1e-5, rtol=0)
    assert engine.decoder_class in (LlamaDecoder, ModuleDecoder)  # and so no fallback


def test_llama_and_its_like_are_written_out_and_their_modules_agree(small):
    for family in ("llama", "llama-tied", "mistral", "qwen2", "qwen3"):
        model = small(family)
        assert LlamaDecoder.fits(model)
        with torch.no_grad():
            assert decoder_error(LlamaDecoder, model, None) < 1e-5
            assert decoder_error(ModuleDecoder, model, None) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_small_matrices_are_joined_and_sample_as_they_do_apart(small, family, monkeypatch):
    model, sampling = small(family), Sampling(10, 1.0)
    joined = NativeEngine(model, ENDS, 0).generate(PROMPTS, sampling, range(13))
    monkeypatch.setattr("marlhf.models.llama.SMALL_MATRIX", 0)
    engine = NativeEngine(model, ENDS, 0)
    apart = engine.generate(PROMPTS, sampling, range(13))
    assert engine.session is not None
    assert not engine.session.decoder.weights.copies
    assert apart.responses == joined.responses
    torch.testing.assert_close(apart.logprobs, joined.logprobs, atol=1e-5, rtol=0)


def test_a_hook_is_called_by_sampling_whenever_it_was_registered(small):
    model = small("llama")
    engine = NativeEngine(model, ENDS, 0)
    before = engine.generate(PROMPTS, Sampling(4), range(13))
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    calls = []
    during = engine.generate(PROMPTS, Sampling(4), range(13))
    assert calls
    assert engine.decoder_class is ModuleDecoder
    handle.remove()
    calls.clear()
    after = engine.generate(PROMPTS, Sampling(4), range(13))
    assert not calls
    assert engine.decoder_class is LlamaDecoder
    assert before.responses == during.responses == after.responses


def test_a_response_depends_on_its_prompt_and_seed_alone(small):
    model, sampling = small("llama"), Sampling(10, 1.0)
    whole = NativeEngine(model, ENDS, 0).generate(PROMPTS, sampling, range(13))
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0)).tolist()
    for budget in (1, 64 * 3, 64 * 8):  # two slots, three, eight
        engine = NativeEngine(model, ENDS, 0, token_budget=budget)
        part = engine.generate([PROMPTS[i] for i in order], sampling, order)
        assert part.responses == [whole.responses[i] for i in order]
        assert_same_logprobs(part.logprobs, whole.logprobs[order])
    pair = NativeEngine(model, ENDS, 0).generate([PROMPTS[4]] * 2, sampling, [4, 5])
    assert pair.responses[0] == whole.responses[4]
    assert pair.responses[0] != pair.responses[1]


def test_a_batch_costs_its_mean_and_not_its_longest(small):
    model = small("llama")
    engine = NativeEngine(model, ENDS, 0, token_budget=64 * 4)  # four slots
    rows = []
    step = LlamaDecoder.step
    with pytest.MonkeyPatch.context() as patch:

        def counted(self, tokens, *arguments):
            rows.append(len(tokens))
            return step(self, tokens, *arguments)

        patch.setattr(LlamaDecoder, "step", counted)
        rollout = engine.generate(PROMPTS * 3, Sampling(40, 1.0), range(39))
    lengths = [len(response) for response in rollout.responses]
    batches = [max(lengths[i : i + 4]) for i in range(0, 39, 4)]
    assert sum(lengths) <= sum(rows) - 3 < 4 * sum(batches)  # the first call tries two prompts
    assert sum(rows) < 1.5 * sum(lengths)


def test_a_call_that_fits_uses_the_cache_of_the_last(small):
    engine = NativeEngine(small("llama"), ENDS, 0)
    first = engine.generate(PROMPTS, Sampling(10), range(13))
    session = engine.session
    assert engine.generate(PROMPTS, Sampling(10), range(13)).responses == first.responses
    assert engine.generate(PROMPTS[:5], Sampling(10), range(5)).responses == first.responses[:5]
    assert engine.session is session
    engine.generate([[3] * 50], Sampling(60), [0])
    assert engine.session is not session


def test_weights_may_change_between_calls(small):
    model = small("llama")
    engine = NativeEngine(model, ENDS, 0)
    engine.generate(PROMPTS, Sampling(6, 0), range(13))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    engine.update_weights(model)
    expected = PlainEngine(model, ENDS, 0).generate(PROMPTS, Sampling(6, 0), range(13))
    assert engine.generate(PROMPTS, Sampling(6, 0), range(13)).responses == expected.responses


@pytest.mark.parametrize(
    ("rounded", "exact", "taken"),
    [(0.05, 0.9, LlamaDecoder), (0.2, 1e-5, LlamaDecoder), (0.2, 0.02, None), (0.9, 1e-5, None)],
)
def test_what_bfloat16_leaves_open_float32_decides(small, monkeypatch, rounded, exact, taken):
    def error(kind, model, dtype, length, extends):
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        return exact if dtype is None else rounded

    monkeypatch.setattr("marlhf.rollout.native.decoder_error", error)
    engine = NativeEngine(small("llama"), ENDS, 0, precision="bfloat16")
    expected = (
        pytest.warns(UserWarning, match="off by") if taken is None else contextlib.nullcontext()
    )
    with expected:
        engine.generate(PROMPTS, Sampling(2), range(13))
    assert engine.decoder_class is taken


@torch.no_grad()
@pytest.mark.parametrize("kind", [LlamaDecoder, ModuleDecoder])
def test_decoders_in_bfloat16_give_autocasts_numbers(small, kind):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert decoder_error(kind, small("qwen3"), torch.bfloat16) < 0.03


def test_a_model_that_only_passes_calls_on_is_sampled_from(small):
    class View(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner = [model]
            self.config, self.device = model.config, model.device

        def forward(self, **kwargs):
            return self.inner[0](**kwargs)

    model = small("qwen2")
    engine = NativeEngine(View(model), ENDS, 0)
    plain = PlainEngine(model, ENDS, 0).generate(PROMPTS, Sampling(8), range(13))
    assert engine.generate(PROMPTS, Sampling(8), range(13)).responses == plain.responses
    assert engine.decoder_class is ModuleDecoder


def test_attention_that_cannot_be_taken_over_is_said_once_and_sampled_plainly(small, monkeypatch):
    monkeypatch.setattr(LlamaDecoder, "fits", lambda model: False)
    monkeypatch.setattr(ModuleDecoder, "step", lambda *_: torch.zeros(3, 48))
    model = small("llama")
    engine = NativeEngine(model, ENDS, 0)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM \(logits were off by .* plain loop"):
        native = engine.generate(PROMPTS, Sampling(6), range(13))
    plain = PlainEngine(model, ENDS, 0).generate(PROMPTS, Sampling(6), range(13))
    assert native.responses == plain.responses
    assert engine.generate(PROMPTS, Sampling(6), range(13)).responses == plain.responses


def test_shrinking_moves_whole_slots():
    state = DecodeState.empty(6, 4, torch.device("cpu"))
    for tensor in state.tensors:
        tensor.copy_(torch.randint(1, 9, tensor.shape))
    kept = [tensor[[4, 5]].clone() for tensor in state.tensors]
    state.move(torch.tensor([4, 5]), torch.tensor([0, 2]))
    for tensor, old in zip(state.tensors, kept):
        assert tensor[[0, 2]].equal(old)
    assert not state.running[[4, 5]].any()


@gpu
@on_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_sample_what_the_plain_loop_samples(small, family, temperature):
    sizes = {} if family.startswith("gpt2") else {"head_dim": 16}
    model = small(family, **sizes).cuda()
    for budget in (1 << 17, 64 * 5):
        options = {"precision": "float32", "token_budget": budget}
        plain, native, engine = together(model, Sampling(10, temperature), **options)
        again = engine.generate(PROMPTS, Sampling(10, temperature), range(13))  # all recorded
        assert native.responses == plain.responses == again.responses
        torch.testing.assert_close(again.logprobs, plain.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[gpu, on_gpu])])
def test_without_end_tokens_every_response_runs_to_the_limit(small, device):
    engine = NativeEngine(small("llama", head_dim=16).to(device), [], 0, precision="float32")
    responses = engine.generate(PROMPTS, Sampling(6, 0.9), range(13)).responses
    assert {len(response) for response in responses} == {6}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[gpu, on_gpu])])
def test_the_memory_of_a_session_is_free_once_it_is_dropped(small, device):
    """Not once garbage is collected: the next session is larger, and there may be no room."""
    model = small("llama", head_dim=16).to(device)
    engine = NativeEngine(model, ENDS, 0)
    gc.disable()
    try:
        for _ in range(3):
            engine.generate(PROMPTS, Sampling(4), range(13))
        decoder = weakref.ref(engine.session.decoder)
        engine.session = None
        assert decoder() is None
    finally:
        gc.enable()


@gpu
@on_gpu
def test_kernels_are_their_plain_twins(monkeypatch):
    torch.manual_seed(0)
    slots, heads, groups, width, length = 33, 9, 3, 64, 200

    def random(*shape):
        return torch.randn(shape, device="cuda")

    positions = torch.randint(0, length, (slots,), device="cuda")
    order = torch.randperm(slots, device="cuda")
    qkv = random(slots, heads + 2 * groups, width)
    keys, values = random(slots, groups, length, width), random(slots, groups, length, width)
    logits = random(slots, 5000) * 3
    uniform = draws(range(slots), 5, "cuda")

    def results():
        at = attention.SlotPositions(positions)
        query = qkv[:, :heads]
        for window, cap in ((None, None), (7, None), (90, 3.0)):
            yield attention.attend(query, keys, values, at, None, 0.125, window, cap)
            at.cache_rows = order
            yield attention.attend(query, keys, values, at, None, 0.125, window, cap)
            at.cache_rows = None
        state = DecodeState.empty(slots, 5, torch.device("cuda"))
        state.uniform[:, :5] = uniform
        state.running[:30] = True
        ends = torch.arange(40, device="cuda")
        sample(logits, Sampling(5, 0.8), state, ends)
        yield from state.tensors

    fused = list(results())
    monkeypatch.setattr(attention, "has_kernel", lambda *_: False)
    monkeypatch.setattr(continuous, "fused", lambda _: False)
    for ours, plain in zip(fused, results(), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@gpu
@on_gpu
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("rows", [1, 16, 40, 200])
@pytest.mark.parametrize("moved", [False, True])
@torch.no_grad()
def test_a_step_by_the_kernel_is_the_plain_step(small, family, rows, moved):
    """Logits and cache, where attention rotates queries and new keys and stores these."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "head_dim": 16}
    model, generator = small(family, **sizes), torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # no bias of 0, no norm of 1
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    decoder = LlamaDecoder(model.cuda(), rows, 64, torch.float32)
    assert decoder.fused
    torch.manual_seed(2)
    cache = torch.randn_like(decoder.cache)
    slots = torch.arange(rows, device="cuda")
    tokens = torch.randint(0, 48, (rows,), device="cuda")
    positions = torch.randint(8, 64, (rows,), device="cuda")
    order = slots.flip(0) if moved else None
    results = []
    for decoder.fused in (False, True):
        decoder.cache.copy_(cache)
        with decoder.ready():
            logits = decoder.step(tokens, positions, None, order)
        results.append((logits.clone(), decoder.cache.clone()))
    (plain, plain_cache), (ours, our_cache) = results
    torch.testing.assert_close(ours, plain, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(our_cache, plain_cache, atol=1e-3, rtol=1e-3)


class IndexedDecoder(LlamaDecoder):
    """Reads keys and values by an index, as on a GPU, in the plain form."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.indexed = True


def counted_prefills(engine, *arguments):
    """The rollout of an engine, and the number of rows that it prefilled."""
    rows = []
    engine.generate(*arguments)  # once before, as choosing a decoder prefills too
    decoder_class = engine.decoder_class
    prefill = decoder_class.prefill
    with pytest.MonkeyPatch.context() as patch:

        def counted(self, ids, slots):
            rows.append(len(ids))
            prefill(self, ids, slots)

        patch.setattr(decoder_class, "prefill", counted)
        return engine.generate(*arguments), sum(rows)


SHARED = [
    prompt
    for start in ([5, 6, 7, 8], [9, 3], [5, 6, 2])
    for length in (0, 3, 30)
    for prompt in [[*start, *range(11, 11 + length), 4]] * 3
]
"""Three samples each of three prompts and of two continuations of each."""


def test_samples_of_one_prefix_are_prefilled_once(small, family):
    model, sampling, seeds = small(family), Sampling(10, 0.9), range(len(SHARED))
    alone, every = counted_prefills(
        NativeEngine(model, ENDS, 0, share_prefixes=False), SHARED, sampling, seeds
    )
    shared, once = counted_prefills(NativeEngine(model, ENDS, 0), SHARED, sampling, seeds)
    assert (every, once) == (27, 3)
    assert shared.responses == alone.responses
    assert_same_logprobs(shared.logprobs, alone.logprobs)


@pytest.mark.parametrize("slots", [2, 4, 7])
def test_a_running_slot_gives_its_prefix_to_later_rows(small, slots):
    model, sampling, seeds = small("llama"), Sampling(10, 1.0), range(len(SHARED))
    whole = NativeEngine(model, ENDS, 0, share_prefixes=False).generate(SHARED, sampling, seeds)
    order = torch.randperm(len(SHARED), generator=torch.Generator().manual_seed(0)).tolist()
    engine = NativeEngine(model, ENDS, 0, token_budget=64 * slots)
    part, prefilled = counted_prefills(engine, [SHARED[i] for i in order], sampling, order)
    assert prefilled < len(SHARED)
    assert part.responses == [whole.responses[i] for i in order]
    assert_same_logprobs(part.logprobs, whole.logprobs[order])


@pytest.mark.parametrize("rows", [2, 5, 27])
def test_slots_that_are_moved_leave_their_keys_and_values_where_they_are(small, rows, monkeypatch):
    """And a call with fewer rows than the last does not write where another slot reads."""
    model, sampling = small("llama"), Sampling(24, 0.9)
    monkeypatch.setattr(native, "LlamaDecoder", IndexedDecoder)
    engine = NativeEngine(model, [*range(1, 12)], 0)
    engine.generate(SHARED, sampling, range(len(SHARED)))
    monkeypatch.setattr(LlamaDecoder, "move", None)
    alone = PlainEngine(model, engine.end_tokens, 0)
    prompts = [[7 + i, *prompt] for i, prompt in enumerate(SHARED[:rows])]  # no two begin alike
    found = engine.generate(prompts, sampling, range(rows))
    expected = alone.generate(prompts, sampling, range(rows))
    assert found.responses == expected.responses
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)


def test_prompts_of_one_token_share_nothing_and_need_nothing(small):
    engine = NativeEngine(small("llama"), ENDS, 0)
    plain = PlainEngine(engine.model, ENDS, 0)
    prompts = [[5], [5], [6], [5, 6], [5, 6]]
    shared, prefilled = counted_prefills(engine, prompts, Sampling(6), range(5))
    assert shared.responses == plain.generate(prompts, Sampling(6), range(5)).responses
    assert prefilled == 1


@gpu
@on_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_graphs_sample_the_same_from_shared_prefixes(small, precision):
    model, sampling, seeds = small("llama", head_dim=16).cuda(), Sampling(10, 0.9), range(27)
    for slots in (64, 16):  # all rows at once, and copies from slots that are still running
        options = {"precision": precision, "token_budget": 64 * slots}
        alone = NativeEngine(model, ENDS, 0, share_prefixes=False, **options)
        shared = NativeEngine(model, ENDS, 0, **options)
        for _ in range(2):  # the second time from recorded graphs
            wanted = alone.generate(SHARED, sampling, seeds)
            got = shared.generate(SHARED, sampling, seeds)
        if precision == "float32":
            assert got.responses == wanted.responses
            torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
        else:  # a draw at the edge between two tokens may fall on the other side
            same = [a == b for a, b in zip(got.responses, wanted.responses)]
            assert sum(same) >= 24
            rows = torch.tensor(same, device="cuda")
            width = min(got.logprobs.shape[1], wanted.logprobs.shape[1])
            gap = got.logprobs[rows, :width] - wanted.logprobs[rows, :width]
            assert float(gap.abs().max()) < 0.05
