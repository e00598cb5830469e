"""The fast engine against its plain twin, and its parts against theirs."""

import contextlib
import gc
import itertools
import platform
import weakref
from random import Random
from types import SimpleNamespace

import pytest
import torch

from marlhf.rollout import Sampling, continuous, kernels, llama, llama_weights, prefills
from marlhf.rollout.check import decoder_error
from marlhf.rollout.continuous import sample
from marlhf.rollout.engine import draws
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.plain import PlainEngine
from marlhf.rollout.slots import ModuleDecoder
from marlhf.rollout.state import DecodeState, Prefixes

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


def test_large_prefills_are_split_where_they_would_be_padding(monkeypatch):
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 8)
    schedule = object.__new__(continuous.Schedule)
    schedule.decoder = SimpleNamespace(first_tokens=20)

    def batches(budget, lengths, idle=False):
        schedule.budget = budget
        found = schedule._prefill_batches(lengths, idle=idle)
        found = [[lengths[i] for i in batch] for batch in found]
        assert sorted(itertools.chain(*found)) == sorted(lengths)
        return found

    assert batches(32, [4] * 8) == [[4] * 8]
    assert batches(32, [7, 1, 2, 3, 6, 2]) == [[1, 2, 2], [3], [6], [7]]
    assert batches(8, [1, 4]) == [[1, 4]]  # no larger than others: as it is
    assert batches(32, [0, 0]) == [[0, 0]]
    # An idle GPU begins with few, where others are left.
    assert batches(60, [2] * 40, idle=True) == [[2] * 8, [2] * 22, [2] * 10]
    assert batches(60, [2] * 16, idle=True) == [[2] * 16]
    assert batches(64, [8] * 8, idle=True) == [[8] * 8]
    assert batches(64, [0] * 99, idle=True) == [[0] * 16, [0] * 83]
    schedule.decoder.first_tokens = 0
    assert batches(60, [2] * 40, idle=True) == [[2] * 30, [2] * 10]


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
    monkeypatch.setattr(llama_weights, "SMALL_MATRIX", 0)
    engine = NativeEngine(model, ENDS, 0)
    apart = engine.generate(PROMPTS, sampling, range(13))
    assert engine.session is not None
    assert not any(p.copied for block in engine.session.decoder.blocks for p in block.projections)
    assert apart.responses == joined.responses
    torch.testing.assert_close(apart.logprobs, joined.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "mistral", "qwen2"])
def test_a_step_on_a_cpu_has_the_bits_of_the_plain_step(small, family, joined, monkeypatch):
    whole = {"sliding_window": None} if family == "mistral" else {}
    model, sampling = small(family, **whole), Sampling(40, 1.0)
    if not joined:
        monkeypatch.setattr(llama_weights, "SMALL_MATRIX", 0)
    engine = NativeEngine(model, ENDS, 0, token_budget=64 * 6)  # six slots, refilled and shrunk
    ours = engine.generate(PROMPTS, sampling, range(13))
    assert engine.session is not None
    assert len(engine.session.decoder.cpu_steps) > 1  # several numbers of slots
    monkeypatch.setattr(llama.CPUStep, "fits", lambda _: False)
    engine = NativeEngine(model, ENDS, 0, token_budget=64 * 6)
    plain = engine.generate(PROMPTS, sampling, range(13))
    assert not engine.session.decoder.cpu_steps
    assert ours.responses == plain.responses
    assert ours.logprobs.equal(plain.logprobs)


def test_norms_of_heads_and_short_windows_take_the_plain_step(small):
    for family in ("qwen3", "mistral"):
        assert not llama.CPUStep.fits(LlamaDecoder(small(family), 2, 64, None))
    assert not llama.CPUStep.fits(LlamaDecoder(small("llama"), 2, 64, torch.bfloat16))
    assert llama.CPUStep.fits(LlamaDecoder(small("llama"), 2, 64, None))


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
    def error(kind, model, dtype, length):
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


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
@pytest.mark.parametrize("length", [1, 31, 50])
@torch.no_grad()
def test_a_rounded_prefill_does_the_same(small, rows, length):
    decoder = LlamaDecoder(small("llama"), 16, 64, torch.float32)
    ids, slots = torch.randint(2, 48, (rows, length)), torch.randperm(16)[:rows]
    with decoder.ready():
        decoder._prefill(ids, slots)
        plain = decoder.cache[:, slots, :, :length].clone()
        decoder.cache.fill_(7.0)
        rounded, same_slots = prefills._round_up(ids, slots, 64)
        decoder._prefill(rounded, same_slots)
    assert rounded.shape == (rounded.shape[0], 32 if length < 32 else 64)
    assert rounded.shape[0] in (1, 4, 8, 16)
    torch.testing.assert_close(decoder.cache[:, slots, :, :length], plain)
    others = torch.ones(16, dtype=torch.bool).index_fill(0, slots, False)
    assert decoder.cache[:, others].eq(7.0).all()


@gpu
@on_gpu
@torch.no_grad()
def test_recorded_prefills_are_those_that_are_not(small):
    model = small("llama", head_dim=16).cuda()
    decoder = LlamaDecoder(model, 16, 64, torch.float32)
    for turn in range(4):  # as it is, recorded, replayed, replayed
        ids = torch.randint(2, 48, (5, 20 + turn), device="cuda")
        slots = torch.randperm(16, device="cuda")[:5]
        with decoder.ready():
            decoder.prefill(ids, slots)
            found = decoder.cache[:, slots, :, : 20 + turn].clone()
            decoder._prefill(ids, slots)
        expected = decoder.cache[:, slots, :, : 20 + turn]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for parameter in model.parameters():  # the next is of other weights
            parameter.mul_(0.9)


@gpu
@on_gpu
def test_kernels_are_their_plain_twins(monkeypatch):
    torch.manual_seed(0)
    slots, heads, groups, width, length = 33, 9, 3, 64, 200

    def random(*shape):
        return torch.randn(shape, device="cuda")

    positions = torch.randint(0, length, (slots,), device="cuda")
    order = torch.randperm(slots, device="cuda")
    rotary = random(length, width // 2).repeat(1, 2), random(length, width // 2).repeat(1, 2)
    inputs = [random(slots, 576), random(slots, 576), random(576).abs()]
    qkv = random(slots, heads + 2 * groups, width)
    keys, values = random(slots, groups, length, width), random(slots, groups, length, width)
    norms = (random(width).abs(), random(width).abs(), 1e-6)
    logits = random(slots, 5000) * 3
    uniform = draws(range(slots), 5, "cuda")

    def results():
        residual, delta, weight = (x.clone() for x in inputs)
        at = kernels.Positions(positions, order)
        yield from kernels.add_norm(residual, delta, weight, 1e-5, torch.float32)
        for norm in (None, norms):
            x, cache = qkv.clone(), torch.cat([keys, values], dim=1)
            kernels.rotate_and_store(x, rotary, at, cache, norm)
            yield from (x, cache)
        query = qkv[:, :heads]
        for window, cap in ((None, None), (7, None), (90, 3.0)):
            yield kernels.attend(query, keys, values, at, None, 0.125, window, cap)
            at.prefixes = Prefixes(order, positions // 2)
            yield kernels.attend(query, keys, values, at, None, 0.125, window, cap)
            at.cache_rows = order
            yield kernels.attend(query, keys, values, at, None, 0.125, window, cap)
            at.prefixes = at.cache_rows = None
        state = DecodeState.empty(slots, 5, torch.device("cuda"))
        state.uniform[:, :5] = uniform
        state.running[:30] = True
        ends = torch.arange(40, device="cuda")
        sample(logits, Sampling(5, 0.8), state, ends)
        yield from state.tensors

    fused = list(results())
    monkeypatch.setattr(kernels, "triton_kernels", None)
    monkeypatch.setattr(continuous, "fused", lambda _: False)
    for ours, plain in zip(fused, results(), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("ends", [[], [*range(1, 12)]])  # many ends: fewer slots on the way
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_borrowed_prefixes_are_read_where_they_are(small, family, ends, monkeypatch):
    model, sampling, seeds = small(family), Sampling(24, 0.9), range(len(SHARED))
    copied = NativeEngine(model, ends, 0).generate(SHARED, sampling, seeds)
    monkeypatch.setattr(llama, "fused", lambda _: True)  # as on a GPU
    engine = NativeEngine(model, ends, 0)
    for _ in range(2):  # the second time slots begin in rows of the cache where others ended
        borrowed = engine.generate(SHARED, sampling, seeds)
        assert engine.session is not None
        state = engine.session.step(sampling).state
        assert (state.prefix_ends > 0).any()
        assert (state.cache_rows != torch.arange(state.slots)).any() == bool(ends)
        assert borrowed.responses == copied.responses
        torch.testing.assert_close(borrowed.logprobs, copied.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [2, 5, 27])
def test_slots_that_are_moved_leave_their_keys_and_values_where_they_are(small, rows, monkeypatch):
    """And a call with fewer rows than the last does not write where another slot reads."""
    model, sampling = small("llama"), Sampling(24, 0.9)
    monkeypatch.setattr(llama, "fused", lambda _: True)
    engine = NativeEngine(model, [*range(1, 12)], 0)
    engine.generate(SHARED, sampling, range(len(SHARED)))
    monkeypatch.setattr(LlamaDecoder, "move", None)
    alone = PlainEngine(model, engine.end_tokens, 0)
    prompts = [[7 + i, *prompt] for i, prompt in enumerate(SHARED[:rows])]  # no two begin alike
    found = engine.generate(prompts, sampling, range(rows))
    expected = alone.generate(prompts, sampling, range(rows))
    assert found.responses == expected.responses
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)


def test_slots_that_are_refilled_borrow_nothing(small, monkeypatch):
    model, sampling, seeds = small("llama"), Sampling(12, 0.9), range(len(SHARED))
    copied = NativeEngine(model, ENDS, 0).generate(SHARED, sampling, seeds)
    monkeypatch.setattr(llama, "fused", lambda _: True)
    engine = NativeEngine(model, ENDS, 0, token_budget=64 * 7)
    refilled = engine.generate(SHARED, sampling, seeds)
    assert engine.session is not None
    assert not (engine.session.step(sampling).state.prefix_ends > 0).any()
    assert refilled.responses == copied.responses


def test_prompts_of_one_token_share_nothing_and_need_nothing(small):
    engine = NativeEngine(small("llama"), ENDS, 0)
    plain = PlainEngine(engine.model, ENDS, 0)
    prompts = [[5], [5], [6], [5, 6], [5, 6]]
    shared, prefilled = counted_prefills(engine, prompts, Sampling(6), range(5))
    assert shared.responses == plain.generate(prompts, Sampling(6), range(5)).responses
    assert prefilled == 1


@pytest.mark.parametrize("samples", [2, 3, 4, 9])
def test_slots_of_one_prompt_stay_neighbours(small, samples, monkeypatch):
    """Also when others have ended, so that they can be read together where they are enough."""
    model = small("llama")
    prompts = [[7 + i, 5, 6, *range(11, 20)] for i in range(6) for _ in range(samples)]
    seeds, sampling = range(len(prompts)), Sampling(24, 0.9)
    ends = [*range(1, 8)]
    wanted = NativeEngine(model, ends, 0).generate(prompts, sampling, seeds)
    monkeypatch.setattr(llama, "fused", lambda _: True)  # as on a GPU
    seen = []
    step = continuous.DecodeStep.__call__

    def recorded(self, slots, reach, **how):
        if how:
            seen.append((slots, how))
            rows = self.state.prefix_rows[:slots][self.state.running[:slots]].tolist()
            assert [row for row, before in zip(rows, [-1, *rows]) if row != before] == sorted(
                set(rows), reverse=rows[0] > rows[-1]
            )
        step(self, slots, reach, **how)

    monkeypatch.setattr(continuous.DecodeStep, "__call__", recorded)
    found = NativeEngine(model, ends, 0).generate(prompts, sampling, seeds)
    assert found.responses == wanted.responses
    assert {slots for slots, _ in seen} > {len(prompts)}  # some have ended before others
    assert all(how["borrow"] for _, how in seen)
    assert seen[0][1]["together"] == (samples >= 4)


@gpu
@on_gpu
def test_graphs_sample_the_same_where_slots_read_together(small, monkeypatch):
    from marlhf.rollout import triton_shared

    monkeypatch.setattr(triton_shared, "MIN_PROGRAMS", 1)
    model, sampling = small("llama", head_dim=16).cuda(), Sampling(20, 0.9)
    prompts = [[7 + i, 5, 6, *range(11, 20 + i)] for i in range(16) for _ in range(4)]
    options = {"precision": "float32", "token_budget": 64 * 64}
    for ends in ([], [*range(1, 8)]):
        alone = NativeEngine(model, ends, 0, share_prefixes=False, **options)
        shared = NativeEngine(model, ends, 0, **options)
        for _ in range(2):  # the second time from recorded graphs
            wanted = alone.generate(prompts, sampling, range(64))
            got = shared.generate(prompts, sampling, range(64))
            assert got.responses == wanted.responses
            torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
        assert shared.session is not None
        assert any(together for *_, together in shared.session.step(sampling).graphs)


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
