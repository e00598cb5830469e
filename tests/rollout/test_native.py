import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, MambaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from marlhf.models.forward import Sequences, keeps_logits, token_stats
from marlhf.models.load import load_policy
from marlhf.rollout import Sampling, native
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.plain import CHECK_EVERY, PlainEngine

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [0, 3], [20], [1, 1, 4]]
SEEDS = [11, 12, 13, 14]
GREEDY = Sampling(max_new_tokens=12, temperature=0)
both = pytest.mark.parametrize("kind", [NativeEngine, PlainEngine])
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Chain(torch.nn.Module):
    """After each token comes a fixed one; no attention, no cache, no `logits_to_keep`."""

    def __init__(self, follows):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.eye(len(follows))[follows] * 50)
        self.device = torch.device("cpu")
        self.config = LlamaConfig(vocab_size=len(follows))

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
    ):
        return CausalLMOutput(logits=self.logits[input_ids])


def generated(model, prompt, max_new_tokens, ends):
    """What transformers' own greedy search gives for one prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options
    )
    return found[0, len(prompt) :].tolist()


def test_greedy_is_generates_token_for_token(small, family):
    # Mistral and the Gemmas have a window of 4 here, so that it slides through all of this.
    model = small(family)
    rollout = NativeEngine(model, [1], pad_id=0).generate(PROMPTS, GREEDY, SEEDS)
    assert rollout.responses == [generated(model, p, 12, [1]) for p in PROMPTS]
    ended = [response[-1] == 1 for response in rollout.responses]
    assert rollout.ended.tolist() == ended


@torch.no_grad()
def test_logprobs_are_those_of_the_training_pass(small, family):
    model, sampling = small(family), Sampling(9, temperature=0.7)
    rollout = NativeEngine(model, [1, 7, 9], pad_id=1).generate(PROMPTS * 2, sampling, range(8))
    sequences = Sequences.from_lists(PROMPTS * 2, rollout.responses, pad_id=1)
    expected = token_stats(model, sequences, 0.7).logprobs
    torch.testing.assert_close(rollout.logprobs, expected, atol=1e-5, rtol=0)


def chi_square(counts, probabilities):
    """The statistic over those outcomes that are expected at least five times."""
    expected = probabilities * counts.sum()
    often = expected >= 5
    return float(((counts - expected)[often] ** 2 / expected[often]).sum()), int(often.sum()) - 1


def test_sampled_responses_follow_the_models_distribution(small):
    model = small("llama", initializer_range=0.1, vocab_size=6)
    prompts = [[5, 2]] * 4000
    rollout = NativeEngine(model, [1], 0).generate(prompts, Sampling(2, 0.8), range(4000))
    first, second = torch.zeros(6), torch.zeros(6)
    for response in rollout.responses:
        first[response[0]] += 1
        if response[0] == 3:
            second[response[1]] += 1
    with torch.no_grad():
        exact = (model(torch.tensor([[5, 2, 3]])).logits[0] / 0.8).softmax(dim=1)
    assert chi_square(first, exact[1])[0] < 30
    assert chi_square(second, exact[2])[0] < 30


@both
def test_a_response_ends_at_the_first_eos_and_keeps_it(kind):
    # 2 -> 3 -> 4 -> 5 -> 5 ...; 6 -> 4; 1 -> 1
    engine = kind(Chain([1, 1, 3, 4, 5, 5, 4]), end_tokens=[1, 4], pad_id=1)
    rollout = engine.generate([[2], [1], [5], [6]], Sampling(10, 0), SEEDS)
    assert rollout.responses == [[3, 4], [1], [5] * 10, [4]]
    assert rollout.ended.tolist() == [True, True, False, True]
    assert (rollout.logprobs != 0).sum(dim=1).le(torch.tensor([2, 1, 10, 1])).all()
    assert rollout.logprobs.shape == (4, 10)


@both
@pytest.mark.parametrize("length", [1, 2, CHECK_EVERY, CHECK_EVERY + 1])
def test_an_eos_at_the_very_last_token_ended_the_response(kind, length):
    chain = [*range(1, 12), 11]
    engine = kind(Chain(chain), end_tokens=[length], pad_id=0)
    [response] = engine.generate([[0]], Sampling(length, 0), [0]).responses
    assert response == list(range(1, length + 1))
    assert engine.generate([[0]], Sampling(length, 0), [0]).ended.tolist() == [True]
    if length > 1:
        assert engine.generate([[0]], Sampling(length - 1, 0), [0]).ended.tolist() == [False]


@both
@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_limit_only_cuts_a_response(kind, budget, device, small):
    """Slots are refilled, shared and moved meanwhile; the random numbers stay those of the row."""
    model = small("llama", head_dim=16).to(device)
    engine = kind(model, [1, 9], 0, token_budget=budget, precision="float32")
    prompts = [*PROMPTS, [5, 6, 7, 8], *PROMPTS]
    whole = engine.generate(prompts, Sampling(12), range(9))
    limits = [12, 3, 1, 7, 12, 5, 2, 11, 4]
    cut = engine.generate(prompts, Sampling(12), range(9), limits)
    expected = [row[:n] for row, n in zip(whole.responses, limits)]
    assert cut.responses == expected
    for row, response in enumerate(expected):
        torch.testing.assert_close(
            cut.logprobs[row, : len(response)], whole.logprobs[row, : len(response)]
        )
        assert not cut.logprobs[row, len(response) :].any()
        assert bool(cut.ended[row]) == (response[-1] in (1, 9))
    again = engine.generate(prompts, Sampling(12), range(9))  # nothing is left of the limits
    assert again.responses == whole.responses


def test_limits_need_no_more_positions_than_each_row_has(small):
    """A prompt with most of its response behind it fits where a whole response would not."""
    model = small("llama", max_position_embeddings=64)
    engine = NativeEngine(model, [1], 0)
    engine.generate([[5] * 60, [6] * 20], Sampling(40), [0, 1], [4, 40])
    assert engine.session is not None
    assert engine.session.capacity == 64


def test_sampling_stops_once_all_have_ended():
    model = Chain([1, 1])
    steps = []
    model.register_forward_hook(lambda *_: steps.append(1))
    rollout = PlainEngine(model, [1], 0).generate([[0], [0]], Sampling(1000, 0), [1, 2])
    assert len(steps) == CHECK_EVERY
    assert rollout.logprobs.shape == (2, 1)


def test_the_seed_decides_the_rollout(small):
    engine = NativeEngine(small("llama"), [1], 0)
    runs = [engine.generate(PROMPTS, Sampling(8), [seed] * 4) for seed in (3, 3, 4)]
    assert runs[0].responses == runs[1].responses
    assert torch.equal(runs[0].logprobs, runs[1].logprobs)
    assert runs[0].responses != runs[2].responses


def test_the_token_budget_moves_no_row(small):
    model = small("gpt2")
    prompts = [[*PROMPTS[i % 4], 5 + i] for i in range(7)]
    alone = [PlainEngine(model, [1, 8], 0).generate([p], Sampling(9, 0), [0]) for p in prompts]
    for budget in (1, 45, 10_000):
        engine = NativeEngine(model, [1, 8], pad_id=1, token_budget=budget)
        rollout = engine.generate(prompts, Sampling(9, 0), [0] * 7)
        assert rollout.responses == [single.responses[0] for single in alone]
        assert rollout.ended.tolist() == [bool(single.ended) for single in alone]
        for row, single in zip(rollout.logprobs, alone):
            expected = torch.zeros_like(row)
            expected[: single.logprobs.shape[1]] = single.logprobs[0]
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


@both
def test_a_model_without_logits_to_keep_answers(kind):
    assert not keeps_logits(Chain)
    rollout = kind(Chain([0, 2, 0]), [0], 0).generate([[1, 1, 1], [2]], Sampling(5, 0), [1, 2])
    assert rollout.responses == [[2, 0], [0]]


def test_gradient_checkpointing_does_not_cost_the_cache(tmp_path, small):
    model = small("llama")
    model.save_pretrained(tmp_path)
    saving = load_policy(str(tmp_path), checkpointing=True)
    rollout = NativeEngine(saving, [1], 0).generate(PROMPTS, GREEDY, SEEDS)
    assert rollout.responses == [generated(model, p, 12, [1]) for p in PROMPTS]
    assert saving.training  # as before


def test_sampling_neither_trains_nor_changes_the_model(small):
    model = small("llama").train()
    before = copy.deepcopy(model.state_dict())
    rollout = NativeEngine(model, [1], 0).generate(PROMPTS, Sampling(4), SEEDS)
    assert not rollout.logprobs.requires_grad
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_nothing_to_answer_is_a_sentence(small):
    engine = NativeEngine(small("llama"), [1], 0)
    with pytest.raises(ValueError, match="no prompts to answer"):
        engine.generate([], GREEDY, [])
    with pytest.raises(ValueError, match=r"prompts \[1, 2\] have no tokens.*Begin each with BOS"):
        engine.generate([[5], [], []], GREEDY, [1, 2, 3])
    with pytest.raises(ValueError, match="4 prompts but 2 seeds"):
        engine.generate(PROMPTS, GREEDY, [1, 2])


def test_a_state_space_model_is_refused_and_not_sampled_wrongly():
    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"MambaForCausalLM keeps a state .* with attention"):
        NativeEngine(model, [1], 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("budget", "slots"), [("auto", 128), (64 * 8, 8)])
def test_small_caches_get_more_slots_unless_told(small, monkeypatch, budget, slots):
    model = small("llama").cuda()
    size = native.token_bytes(model.config, torch.float32)
    monkeypatch.setattr(native, "AUTO_TOKENS", 64 * 8)
    # Room for 128 slots of 64 tokens in the share of the memory that a cache may have.
    memory = int(64 * 128 * size / native.KEPT_CACHE_SHARE) + size
    monkeypatch.setattr(native, "total_memory", lambda _: memory)
    engine = NativeEngine(model, [1], 0, token_budget=budget, precision="float32")
    engine.generate([[5, 6, 7]] * 200, Sampling(max_new_tokens=4), range(200))
    assert engine.session.slots == slots


@pytest.mark.parametrize(("free", "tokens"), [(10**9, 5000), (8000, 4000), (100, 1000)])
def test_more_slots_take_no_more_than_half_of_what_is_free(small, monkeypatch, free, tokens):
    model = small("llama")
    size = native.token_bytes(model.config, torch.float32)
    monkeypatch.setattr(native, "AUTO_TOKENS", 1000)
    monkeypatch.setattr(native, "total_memory", lambda _: size * 5000.5 / native.KEPT_CACHE_SHARE)
    monkeypatch.setattr(native, "free_bytes", lambda _: size * free)
    engine = NativeEngine(model, [1], 0)
    engine.model = SimpleNamespace(
        device=torch.device("cuda"), config=model.config, parameters=model.parameters
    )
    assert engine._cache_tokens(900) == 1000
    assert engine._cache_tokens(10**6) == tokens
    monkeypatch.setattr(native, "free_bytes", lambda _: 0)
    assert engine._cache_tokens(10**6) == tokens  # found once
