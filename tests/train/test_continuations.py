from dataclasses import replace

import pytest
import torch

from marlhf.core import NGram, Segments
from marlhf.models.forward import Sequences, token_stats
from marlhf.rollout import Sampling
from marlhf.runtime.distributed import start
from marlhf.runtime.stage import GivenObjects
from marlhf.train import experience, ppo, state_values
from marlhf.train.experience import RolloutScorer
from marlhf.train.rl_models import load_models, load_prompts
from marlhf.train.state_values import State, continuation_returns, states_of, values_at_starts
from small_runs import read_lines

MC = {"values": "monte_carlo", "sigma": "start", "continuations": 2}


def length(completions, **_):
    return [len(text) / 10 for text in completions]


@pytest.fixture
def loaded(ppo_config):
    config = ppo_config(
        reward_model="", ref_model="tiny", sampling=Sampling(max_new_tokens=2), kl_coef=0.1
    )
    objects = GivenObjects(reward_funcs=[length])
    models = load_models(config, objects, start("cpu", "auto"), critic=False)
    return config, models, load_prompts(config, models, objects)[0]


def test_the_mean_return_is_that_of_all_continuations(loaded):
    """After one of two tokens there are as many continuations as tokens: all are enumerated."""
    config, models, examples = loaded
    state = State(0, 1, examples[0], [7])
    tokens = list(range(models.policy.config.vocab_size))
    sequences = Sequences.from_lists([state.prompt] * len(tokens), [[t] for t in tokens], 0)
    with torch.no_grad():
        logprobs = token_stats(models.policy, sequences).logprobs[:, 0]
        ref_logprobs = token_stats(models.reference, sequences).logprobs[:, 0]
    scores = models.reward(
        [examples[0].prompt] * len(tokens),
        [[7, t] for t in tokens],
        [examples[0].row] * len(tokens),
    )
    returns = scores - config.kl_coef * (logprobs - ref_logprobs)
    exact = float((logprobs.exp() * returns).sum())
    deviation = float((logprobs.exp() * (returns - exact).square()).sum().sqrt())

    score = RolloutScorer(models, config)
    sampled = continuation_returns([state], score, 600, list(range(600)), config.kl_coef, "k1")
    assert sampled.shape == (1, 600)
    assert abs(float(sampled.mean()) - exact) < 4 * deviation / 600**0.5
    assert float((logprobs - ref_logprobs).abs().max()) > 0.01  # the penalty was not 0


def test_limits_are_of_whole_responses(loaded, monkeypatch):
    """A prefix leaves fewer tokens, and no more positions are needed than for whole responses."""
    config, models, examples = loaded
    score = RolloutScorer(replace(models, sampling=Sampling(max_new_tokens=8)), config)
    states = [State(0, n, examples[0], [7] * n) for n in (0, 3, 7)]
    calls = []
    sample = state_values.sample_responses

    def watched(prompts, models, seeds, limits):
        rollout = sample(prompts, models, seeds, limits)
        calls.append((limits, [len(row) <= n for row, n in zip(rollout.responses, limits)]))
        return rollout

    monkeypatch.setattr(state_values, "sample_responses", watched)
    positions = len(examples[0].prompt) + 8
    monkeypatch.setattr(models.policy.config, "max_position_embeddings", positions)
    returns = continuation_returns(states, score, 2, list(range(6)), 0.1, "k1")
    assert calls == [([8, 8, 5, 5, 1, 1], [True] * 6)]
    assert returns.shape == (3, 2)


def test_states_are_the_starts_of_macro_actions(loaded):
    _, _, examples = loaded
    sequences = Sequences.from_lists([e.prompt for e in examples[:2]], [[5, 6, 7], [8]], 0)
    segments = Segments.from_starts(
        torch.tensor([[True, False, True], [True, False, False]]), sequences.mask
    )

    class Sampled:
        pass

    Sampled.sequences = sequences
    found = states_of(examples, segments, Sampled)
    assert [(s.row, s.column, s.prefix) for s in found] == [(0, 0, []), (0, 2, [5, 6]), (1, 0, [])]


def test_without_their_kl_continuations_take_no_pass_of_the_reference(loaded, monkeypatch):
    config, models, examples = loaded
    score = RolloutScorer(models, config)
    states = [State(0, n, examples[0], [7] * n) for n in (0, 1)]
    exact = continuation_returns(states, score, 3, list(range(6)), 0.0, "k1")
    charged = continuation_returns(states, score, 3, list(range(6)), 0.1, "k1")
    assert not torch.equal(exact, charged)
    monkeypatch.setattr(experience, "all_logprobs", None)
    free = continuation_returns(states, score, 3, list(range(6)), 0.0, "k1")
    assert torch.equal(free, exact)
    assert free.unique().numel() > 1


def test_the_other_responses_to_a_prompt_give_the_value_of_its_start(ppo_config):
    config = ppo_config(**MC, num_samples=2)
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True], [True] * 3])
    segments = Segments.from_starts(torch.tensor([[True, False, True]] * 4), mask)
    rewards = torch.zeros(4, 3)
    rewards[:, 1] = torch.tensor([1.0, 0.0, 0.5, 0.25])
    rewards[0, 2] = 3.0
    sequences = Sequences.from_lists([[1]] * 4, [[5, 6, 7], [5, 6], [5, 6, 7], [5, 6, 7]], 0)
    asked = []

    def of_states(states):
        asked.extend((s.row, s.column) for s in states)
        return torch.tensor([10.0, 20.0, 30.0])

    class Sampled:
        pass

    Sampled.sequences = sequences
    values = values_at_starts(of_states, [None] * 4, Sampled, segments, rewards, config.num_samples)
    assert asked == [(0, 2), (2, 2), (3, 2)]  # the start itself is continued nowhere
    expected = [[0.0, 0, 10], [4.0, 0, 0], [0.25, 0, 20], [0.5, 0, 30]]
    torch.testing.assert_close(values, torch.tensor(expected))


def test_training_with_several_responses_to_a_prompt(ppo_config):
    config = ppo_config("many", **MC, num_samples=2, batch_size=4, num_steps=1, boundaries=1)
    ppo.train(replace(config, continuation_kl=False))
    [step] = [x for x in read_lines(config.output_dir) if x["kind"] == "train"]
    assert step["rl/policy_grad_norm"] > 0


def test_training_without_a_critic(ppo_config, tmp_path):
    whole = ppo_config("whole", **MC)
    ppo.train(whole)
    lines = read_lines(whole.output_dir)
    assert not (tmp_path / "whole" / "critic").exists()
    steps = [x for x in lines if x["kind"] == "train"]
    assert all("rl/value_loss" not in x and x["rl/policy_grad_norm"] > 0 for x in steps)


def test_lambda_zero_is_one_step_of_value_differences(ppo_config):
    """With a value for every token and lambda 0, advantages are differences of values."""
    config = ppo_config(**MC, segmenter=NGram(1), lam=0.0)
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    mask = torch.ones(1, 3).bool()
    segments = Segments.from_starts(mask, mask)
    values = torch.tensor([[0.2, 0.5, 0.4]])
    credit = ppo.assign_credit(rewards, values, segments, config)
    torch.testing.assert_close(credit.advantages, torch.tensor([[0.3, -0.1, 0.6]]))
