"""Conversations: turns of the model with the world's tokens between them, by every engine."""

import platform
import threading
import time
from random import Random
from types import SimpleNamespace

import pytest
import torch

from marlhf.kernels.attention import SlotPositions, attend, attend_to_text
from marlhf.models.compile import compile_blocks
from marlhf.models.forward import Sequences, token_stats
from marlhf.rollout import Sampling, conversations, native
from marlhf.rollout.continuous import CHECK_EVERY, sample
from marlhf.rollout.conversations import ConversationSchedule
from marlhf.rollout.engine import MultiTurnResponses, draws
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.native import NativeEngine, decoder_error
from marlhf.rollout.plain import PlainEngine
from marlhf.rollout.slots import CompiledDecoder, ModuleDecoder
from marlhf.rollout.state import DecodeState

PROMPTS = [[5 + i % 7, 2 + i, *range(3, 3 + i % 5 * 4)] for i in range(13)]
LIMITS = [24 + i for i in range(13)]
ENDS = [1, 7, 9]
TURN = Sampling(6, 0.9)
both = pytest.mark.parametrize("kind", [NativeEngine, PlainEngine])
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def world(row, tokens):
    """A reply of up to five tokens that depends on all of the turn, or the end."""
    number = (row + sum(tokens)) % 7
    return None if number == 6 else [(3 * t + row) % 40 + 2 for t in range(number)]


def converse(engine, reply=world, rows=range(13), prompts=PROMPTS, limits=LIMITS, sampling=TURN):
    chosen = [prompts[row] for row in rows], sampling, list(rows), [limits[row] for row in rows]
    return engine.generate(*chosen, lambda i, tokens: reply(rows[i], tokens))


def assert_same(found, expected, atol=1e-5):
    assert found.responses == expected.responses
    assert found.ended.equal(expected.ended)
    assert found.sampled.equal(expected.sampled)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=atol, rtol=0)


def assert_same_bits(found, expected):
    """To the last bit, where products do not depend on the number of rows."""
    assert_same(found, expected, atol=4e-6)
    if platform.machine() == "aarch64":
        assert found.logprobs.equal(expected.logprobs)


def pick_rows(rollout, rows):
    """Some rows of a rollout, as wide as they need."""
    width = max(len(rollout.responses[row]) for row in rows)
    return SimpleNamespace(
        responses=[rollout.responses[row] for row in rows],
        logprobs=rollout.logprobs[rows, :width],
        ended=rollout.ended[rows],
        sampled=rollout.sampled[rows, :width],
    )


@pytest.mark.parametrize("budget", [1 << 17, 64 * 3])
def test_slots_converse_as_the_plain_loop_does(small, family, budget):
    """Windows, soft caps and learned positions; slots refilled, moved and shared on the way."""
    model = small(family)
    engine = NativeEngine(model, ENDS, 0, token_budget=budget)
    assert_same(converse(engine), converse(PlainEngine(model, ENDS, 0)))
    assert engine.decoder_class in (LlamaDecoder, ModuleDecoder)  # and so no fallback


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_logprobs_are_those_of_the_training_pass(small, name):
    model = small(name)
    rollout = converse(NativeEngine(model, ENDS, 0))
    sequences = Sequences.from_lists(PROMPTS, rollout.responses, 0)
    expected = token_stats(model, sequences, 0.9).logprobs.masked_fill(~rollout.sampled, 0)
    torch.testing.assert_close(rollout.logprobs, expected, atol=1e-5, rtol=0)
    assert (rollout.logprobs[rollout.sampled] < 0).all()


@both
def test_turns_and_replies_are_where_the_rollout_says(kind, small):
    turns = [[] for _ in PROMPTS]
    lock = threading.Lock()

    def reply(row, tokens):
        answer = world(row, tokens)
        with lock:
            turns[row].append((tokens, answer))
        return answer

    rollout = converse(kind(small("llama"), ENDS, 0), reply)
    assert rollout.sampled.shape == rollout.logprobs.shape
    for row, (response, sampled) in enumerate(zip(rollout.responses, rollout.sampled)):
        text, marks = [], []
        for tokens, answer in turns[row]:
            assert len(tokens) == 6 or tokens[-1] in ENDS
            assert not any(token in ENDS for token in tokens[:-1])
            room = len(text) + len(tokens) + len(answer or []) < LIMITS[row]
            world_says = answer if answer and room else []
            text += [*tokens, *world_says]
            marks += [True] * len(tokens) + [False] * len(world_says)
        last = response[len(text) :]  # nobody is asked once a response is full
        assert response[: len(text)] == text
        assert not last or len(response) == LIMITS[row]
        marks += [True] * len(last)
        assert sampled[: len(response)].tolist() == marks
        assert not sampled[len(response) :].any()
        assert bool(rollout.ended[row]) == (response[-1] in ENDS)


@both
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_an_empty_reply_only_cuts_a_response_in_two(kind, small, name):
    """To the last bit, tokens and log-probs: each turn of four tokens goes on where it was."""
    model = small(name)
    whole = kind(model, [], 0).generate(PROMPTS, Sampling(16, 0.9), range(13))
    asked = []

    def nothing(row, tokens):
        asked.append(row)
        return []

    cut = kind(model, [], 0).generate(PROMPTS, Sampling(4, 0.9), range(13), [16] * 13, nothing)
    assert len(asked) == 3 * 13  # a full response has no use for an answer
    assert cut.responses == whole.responses
    assert cut.sampled.all()
    if kind is NativeEngine:
        assert cut.logprobs.equal(whole.logprobs)
    else:  # which computes the text anew for each turn
        torch.testing.assert_close(cut.logprobs, whole.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("fixed", [True, False])
def test_batch_order_and_slow_replies_change_nothing(small, name, fixed, monkeypatch):
    model, random = small(name), Random(0)
    if not fixed:
        monkeypatch.setattr(native, "ConversationSchedule", AnyOrder)
    whole = converse(NativeEngine(model, ENDS, 0))

    def slowly(row, tokens):
        time.sleep(random.random() * 0.01)
        return world(row, tokens)

    order = random.sample(range(13), 13)
    for rows, slots in ((order, 2), (order, 5), (order[:4], 64)):
        engine = NativeEngine(model, ENDS, 0, token_budget=64 * slots)
        assert_same_bits(converse(engine, slowly, rows), pick_rows(whole, rows))


class AnyOrder(ConversationSchedule):
    """Goes on with whoever has a reply, as on a GPU."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options, fixed_order=False)


def test_in_a_fixed_order_time_changes_no_batch(small, monkeypatch):
    """Seen from outside: which texts are extended together, and how far."""
    extended, random = [], Random(1)
    extend = LlamaDecoder.extend

    def seen(self, ids, *arguments):
        extended.append(ids.tolist())
        extend(self, ids, *arguments)

    def slowly(row, tokens):
        time.sleep(random.random() * 0.01)
        return world(row, tokens)

    engine = NativeEngine(small("llama"), ENDS, 0)
    converse(engine)
    monkeypatch.setattr(LlamaDecoder, "extend", seen)
    batches = []
    for reply in (world, slowly):
        extended.clear()
        converse(engine, reply)
        batches.append(list(extended))
    assert batches[0] == batches[1]
    assert len(batches[0]) > 2


@pytest.mark.parametrize("fixed", [True, False])
def test_others_are_sampled_while_the_world_thinks(small, monkeypatch, fixed):
    """One row ends a turn early. Its reply comes once the others have had five more tokens."""
    if not fixed:
        monkeypatch.setattr(native, "ConversationSchedule", AnyOrder)
    model = small("llama")
    whole = NativeEngine(model, [], 0).generate(PROMPTS, Sampling(12, 0.9), range(13)).responses
    row, end = next(
        (row, token)
        for row, response in enumerate(whole)
        for token in response[:3]
        if not any(token in other for other in whole[:row] + whole[row + 1 :])
    )
    steps, step = threading.Semaphore(0), LlamaDecoder.step

    def counted(self, *arguments):
        steps.release()
        return step(self, *arguments)

    engine = NativeEngine(model, [end], 0)
    engine.generate([[5, 6]], Sampling(2), [0], [2], world)  # which checks the decoder
    monkeypatch.setattr(LlamaDecoder, "step", counted)

    def reply(asked, tokens):
        if asked != row or tokens[-1] != end:
            return None
        while steps.acquire(blocking=False):
            pass
        assert all(steps.acquire(timeout=20) for _ in range(5))
        return [8]

    rollout = engine.generate(PROMPTS, Sampling(12, 0.9), range(13), [20] * 13, reply)
    assert not rollout.sampled[row].all()


@both
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_long_replies_fit_in_one_go(kind, small, length):
    model = small("llama", max_position_embeddings=256)
    limits = [20 + 2 * length + row for row in range(13)]
    talk = lambda row, tokens: [(7 * i + row) % 48 for i in range(length + row % 2)]  # noqa: E731
    rollout = converse(kind(model, ENDS, 0), talk, limits=limits)
    expected = converse(PlainEngine(model, ENDS, 0, token_budget=1), talk, limits=limits)
    assert_same(rollout, expected)
    assert max(map(len, rollout.responses)) > 2 * length


@both
def test_a_reply_without_room_for_a_turn_ends_the_conversation(kind, small):
    engine = kind(small("llama"), [], 0)
    for length, kept in ((6, 6), (7, 0)):  # 4 sampled, and 11 in all: one more has to fit
        reply = lambda row, tokens, n=length: [5] * n  # noqa: E731
        rollout = engine.generate([[3, 4]], Sampling(4), [0], [11], reply)
        expected = [True] * 4 + [False] * kept + [True] * (kept > 0)
        assert rollout.sampled.tolist() == [expected]
        assert len(rollout.responses[0]) == len(expected)


@both
def test_a_turn_stops_at_its_limit_and_at_the_conversations(kind, small):
    turns = []

    def reply(row, tokens):
        turns.append(len(tokens))
        return [5]

    rollout = kind(small("llama"), [], 0).generate([[3, 4]], Sampling(4), [0], [12], reply)
    assert turns == [4, 4]
    assert rollout.sampled.tolist() == [[*[True] * 4, False] * 2 + [True] * 2]
    assert rollout.ended.tolist() == [False]


@both
def test_the_end_token_of_a_turn_stays_in_the_text(kind, small):
    """And `ended` tells of the last turn alone."""
    model = small("llama")
    whole = kind(model, [], 0).generate([[3, 4]], Sampling(8), [0])
    [tokens] = whole.responses
    end = tokens[2]
    assert end not in tokens[:2]
    answers = iter([[], None])
    engine = kind(model, [end], 0)
    two = engine.generate([[3, 4]], Sampling(4), [0], [8], lambda *_: next(answers))
    stop = next((i + 1 for i in range(3, 7) if tokens[i] == end), 7)
    assert two.responses == [tokens[:stop]]
    assert two.ended.tolist() == [tokens[stop - 1] == end]


@both
def test_an_error_of_the_world_is_raised_and_the_engine_still_works(kind, small):
    engine = kind(small("llama"), ENDS, 0)
    expected = converse(engine)

    def broken(row, tokens):
        if row == 4:
            raise LookupError("the world is gone")
        return world(row, tokens)

    with pytest.raises(LookupError, match="the world is gone"):
        converse(engine, broken)
    assert not [t for t in threading.enumerate() if t.name.startswith("reply")]
    assert_same_bits(converse(engine), expected)
    single = engine.generate(PROMPTS, Sampling(8), range(13))
    assert single.sampled is None
    other = PlainEngine(engine.model, ENDS, 0).generate(PROMPTS, Sampling(8), range(13))
    assert single.responses == other.responses


@both
def test_one_turn_is_a_response(kind, small):
    engine = kind(small("llama"), ENDS, 0)
    one = engine.generate(PROMPTS, Sampling(9), range(13), reply=lambda *_: None)
    expected = engine.generate(PROMPTS, Sampling(9), range(13))
    assert one.responses == expected.responses
    assert one.ended.equal(expected.ended)
    torch.testing.assert_close(one.logprobs, expected.logprobs, atol=4e-6, rtol=0)
    assert one.sampled.sum(dim=1).tolist() == [len(response) for response in one.responses]


def test_a_turn_prefills_no_more_than_its_new_tokens(small, monkeypatch):
    fed, extend, prefill = [], LlamaDecoder.extend, LlamaDecoder.prefill
    engine = NativeEngine(small("llama"), ENDS, 0)
    converse(engine)

    def seen(self, ids, *arguments):
        fed.append(ids.shape[1])
        extend(self, ids, *arguments)

    def once(self, ids, slots):
        fed.append(-len(ids))
        prefill(self, ids, slots)

    monkeypatch.setattr(LlamaDecoder, "extend", seen)
    monkeypatch.setattr(LlamaDecoder, "prefill", once)
    converse(engine)
    assert sum(number < 0 for number in fed) == 1  # all prompts at once
    assert max(fed) == 5  # and then an end token and up to five more, but for the last


def test_paused_slots_give_their_prefix_to_later_rows(small):
    """Rows of one prompt, in fewer slots than rows, most of which wait for the world."""
    prompts = [[5, 6, 7, 8, 9, 3 + row // 7] for row in range(13)]
    model = small("llama")
    alone = NativeEngine(model, ENDS, 0, share_prefixes=False)
    expected = converse(alone, prompts=prompts)
    for slots in (2, 3, 6):
        engine = NativeEngine(model, ENDS, 0, token_budget=64 * slots)
        assert_same_bits(converse(engine, prompts=prompts), expected)


class IndexedDecoder(LlamaDecoder):
    """Reads keys and values by an index, as on a GPU, in the plain form."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.indexed = True


def test_slots_that_were_moved_are_extended_where_their_keys_are(small, monkeypatch):
    model = small("llama")
    expected = converse(NativeEngine(model, ENDS, 0))
    monkeypatch.setattr(native, "LlamaDecoder", IndexedDecoder)
    for slots in (4, 13):
        engine = NativeEngine(model, ENDS, 0, token_budget=64 * slots)
        for _ in range(2):
            assert_same_bits(converse(engine), expected)


class SeveralSteps(AnyOrder):
    """Several steps before it is noticed what has ended, as on a GPU, and the last one after."""

    def _advance(self):
        left = [self.limits[row] - self.age[slot] for slot, row in self._unfinished()]
        flags = []
        for _ in range(min(CHECK_EVERY, max(left))):
            flags.append(super()._advance())
        return flags[max(len(flags) - 2, 0)]


@pytest.mark.parametrize("slots", [3, 13])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_paused_slots_keep_their_text_while_others_take_several_steps(
    small, monkeypatch, name, slots
):
    model = small(name)
    monkeypatch.setattr(native, "ConversationSchedule", SeveralSteps)
    monkeypatch.setattr(native, "LlamaDecoder", IndexedDecoder)
    engine = NativeEngine(model, ENDS, 0, token_budget=64 * slots)
    assert_same(converse(engine), converse(PlainEngine(model, ENDS, 0)))


@torch.no_grad()
@pytest.mark.parametrize("kind", [LlamaDecoder, ModuleDecoder])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_text_in_two_parts_is_the_text(small, kind, name):
    for length in (6, 20):
        assert decoder_error(kind, small(name), None, length, extends=True) < 1e-5


def test_a_decoder_that_extends_wrongly_is_not_used(small, monkeypatch):
    monkeypatch.setattr(LlamaDecoder, "extend", lambda *_: None)
    model = small("llama")
    engine = NativeEngine(model, ENDS, 0)
    engine.generate(PROMPTS, TURN, range(13))
    assert engine.decoder_class is LlamaDecoder
    assert_same(converse(engine), converse(PlainEngine(model, ENDS, 0)))
    assert engine.decoder_class is ModuleDecoder


def test_a_model_without_a_working_decoder_converses_plainly(small, monkeypatch):
    for kind in (LlamaDecoder, ModuleDecoder):
        monkeypatch.setattr(kind, "extend", lambda *_: None)
    model = small("llama")
    with pytest.warns(UserWarning, match="plain loop"):
        found = converse(NativeEngine(model, ENDS, 0))
    assert_same(found, converse(PlainEngine(model, ENDS, 0)))


def test_compiled_layers_converse_as_plain_ones(small):
    torch._dynamo.reset()
    compiled = small("gpt-neox")
    compile_blocks(compiled, backend="eager")
    engine = NativeEngine(compiled, ENDS, 0, token_budget=64 * 6)
    engine._choose = lambda _: CompiledDecoder
    assert_same(converse(engine), converse(PlainEngine(small("gpt-neox"), ENDS, 0)))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0), (4, 5.0)])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_of_several_tokens_is_that_of_each(window, softcap, heads):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, heads, 4, 16), *torch.randn(2, 3, 2, 9, 16)
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8], [2, 3, 4, 8]])
    found = attend_to_text(query, key, value, SlotPositions(positions), 0.3, window, softcap)
    for i in range(4):
        at = SlotPositions(positions[:, i])
        expected = attend(query[:, :, i], key, value, at, None, 0.3, window, softcap)
        torch.testing.assert_close(found[:, :, i], expected)


@pytest.mark.parametrize("holds", [False, True])
def test_only_slots_that_hold_nothing_go_back_to_the_first_position(holds):
    """Slot 0 draws an end token, slot 1 goes on, slot 2 is idle."""
    state = DecodeState.empty(3, 5, torch.device("cpu"))
    state.positions[:] = torch.tensor([4, 6, 8])
    state.running[:2] = True
    logits = torch.full((3, 9), -100.0)
    logits[[0, 1, 2], [1, 2, 3]] = 0
    sample(logits, TURN, state, torch.tensor([1]), holds=holds)
    assert state.positions.tolist() == ([5, 7, 8] if holds else [0, 7, 0])
    assert state.running.tolist() == [False, True, False]


def test_random_numbers_are_those_of_the_position_in_the_response():
    state = DecodeState.empty(2, 3, torch.device("cpu"))
    table = draws([8, 9], 10)
    slots, before, limits = torch.tensor([1, 0]), torch.tensor([0, 8]), torch.tensor([3, 2])
    state.begin(slots, slots, slots, table, before, limits)
    assert state.uniform[1, :3].equal(table[0, :3])
    assert state.uniform[0, 1:3].equal(table[1, 8:10])  # two tokens, the last columns


def test_extensions_are_split_where_their_masks_would_be_large(small, monkeypatch):
    model = small("llama")
    expected = converse(NativeEngine(model, ENDS, 0))
    monkeypatch.setattr(conversations, "SCORES", 64)
    assert_same_bits(converse(NativeEngine(model, ENDS, 0)), expected)


def test_nothing_of_the_world_is_seen_by_random_numbers_of_others():
    talk = MultiTurnResponses([[5], [6]], [9, 9], 4)
    assert [talk.turn_limit(row) for row in (0, 1)] == [4, 4]
    assert talk.add_turn(1, [7, 1], [-1.0, -2.0])
    assert talk.add_reply(1, [8] * 5)
    assert (talk.used(0), talk.used(1), talk.turn_limit(1)) == (0, 7, 2)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("slots", [64, 5])
def test_graphs_converse_as_the_plain_loop_does(small, name, slots):
    """With indexed slots, graphs and idle slots that stay where they are."""
    model = small(name, **({} if name == "gpt2" else {"head_dim": 16})).cuda()
    options = {"precision": "float32"}
    engine = NativeEngine(model, ENDS, 0, token_budget=64 * slots, **options)
    expected = converse(PlainEngine(model, ENDS, 0, **options))
    for _ in range(3):  # the first steps of each size run without a graph
        assert_same(converse(engine), expected, atol=1e-4)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("name", "compiled"), [("llama", False), ("qwen3", False), ("gemma2", False), ("gemma2", True)]
)
@torch.no_grad()
def test_conversations_in_bfloat16_have_the_logprobs_of_float32(small, name, compiled):
    model = small(name, head_dim=16, initializer_range=0.1).cuda()
    if compiled:
        compile_blocks(model)
    engine = NativeEngine(model, ENDS, 0, precision="bfloat16")
    for _ in range(2):
        rollout = converse(engine)
    sequences = Sequences.from_lists(PROMPTS, rollout.responses, 0, "cuda")
    expected = token_stats(model, sequences, 0.9).logprobs.masked_fill(~rollout.sampled, 0)
    assert float((rollout.logprobs - expected).abs().max()) < 0.1


@pytest.mark.gpu
@on_gpu
@pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning")
def test_deterministic_batches_do_not_depend_on_slow_replies(small):
    model, random = small("llama", head_dim=16).cuda(), Random(2)

    def slowly(row, tokens):
        time.sleep(random.random() * 0.01)
        return world(row, tokens)

    engine = NativeEngine(model, ENDS, 0, precision="bfloat16")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):  # after which all graphs are recorded
            converse(engine)
        found = [converse(engine, reply) for reply in (world, slowly, world)]
    finally:
        torch.use_deterministic_algorithms(False)
    for each in found[1:]:
        assert each.responses == found[0].responses
        assert each.logprobs.equal(found[0].logprobs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("holds", [False, True])
def test_the_kernel_moves_slots_as_the_plain_form_does(holds, monkeypatch):
    def state_after():
        state = DecodeState.empty(40, 5, torch.device("cuda"))
        state.positions[:] = torch.arange(40, device="cuda") + 3
        state.running[::2] = True
        state.uniform[:, :5] = draws(range(40), 5, "cuda")
        torch.manual_seed(0)
        ends = torch.arange(30, device="cuda")
        for _ in range(3):
            sample(torch.randn(40, 60, device="cuda"), TURN, state, ends, holds=holds)
        return state

    kernel = state_after()
    monkeypatch.setattr("marlhf.rollout.continuous.fused", lambda _: False)
    plain = state_after()
    assert kernel.positions.equal(plain.positions)
    assert kernel.running.equal(plain.running)
