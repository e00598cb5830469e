"""What a critic explains, by thirds of a response, and what is said where it is nothing."""

import re

import pytest
import torch

from marlhf.core import Lines, NGram
from marlhf.train import credit_choice, critic_quality, critic_training, ppo
from marlhf.train.credit_choice import CreditChooser
from marlhf.train.critic_quality import (
    THIRDS,
    WATCHED,
    KnowledgeWatch,
    explained_by_thirds,
    knows_nothing,
)
from marlhf.train.experience import explained_variance
from marlhf.train.ppo_config import CriticPretraining
from small_runs import read_lines


def test_thirds_by_a_loop():
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 4, 7, 1, 12]
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    values, returns = torch.randn(2, 5, 12, generator=generator)
    explained = explained_by_thirds(values, returns, mask)
    for third, name in enumerate(THIRDS):
        pairs = [
            (float(values[row, t]), float(returns[row, t]))
            for row, length in enumerate(lengths)
            for t in range(length)
            if t * 3 // length == third
        ]
        v, r = torch.tensor(pairs, dtype=torch.float64).T
        expected = 1 - (r - v).var(correction=0) / r.var(correction=0)
        assert float(explained[name]) == pytest.approx(float(expected), abs=1e-5)


def test_thirds_count_sampled_tokens_alone():
    """What the environment said inside a response is no part of it."""
    generator = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 4, 6, generator=generator)
    holes = torch.tensor([[True, True, False, False, True, False]]).expand(4, 6)
    dense = [x[:, [0, 1, 4]] for x in (values, returns)]
    one = explained_by_thirds(values, returns, holes)
    other = explained_by_thirds(*dense, torch.ones(4, 3).bool())
    assert [float(x) for x in one.values()] == pytest.approx([float(x) for x in other.values()])


def test_responses_of_one_token_have_no_last_third():
    values, returns = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])
    explained = explained_by_thirds(values, returns, torch.ones(2, 1).bool())
    assert [float(x) for x in explained.values()] == [1.0, 0.0, 0.0]


def test_equal_returns_leave_nothing_to_explain():
    values, mask = torch.randn(4, 6), torch.ones(4, 6).bool()
    explained = explained_by_thirds(values, torch.full((4, 6), 0.7), mask)
    assert [float(x) for x in explained.values()] == [0.0, 0.0, 0.0]


def test_runs_log_it_against_the_rewards_that_came(ppo_config, monkeypatch):
    """Whatever lambda the critic learns with: returns of lambda 0 are its own values."""
    seen = []
    real = critic_training.explained_by_thirds
    monkeypatch.setattr(
        critic_training, "explained_by_thirds", lambda *x: seen.append(x) or real(*x)
    )
    ppo.train(ppo_config(lam=0.0, segmenter=NGram(1), num_steps=1, save_every=0))
    [(values, returns, mask)] = seen
    line = read_lines(ppo_config().output_dir)[1]
    assert {*THIRDS} <= line.keys()
    # A token's return includes its own reward: the sum from there to the end.
    assert returns[mask].std() > 0
    assert float(explained_variance(values, returns, mask)) < line["rl/explained_variance"]


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"lam": 0.95, "segmenter": NGram(1)}, r"critic_pretraining.*trust it less \(lam: 1\)"),
        ({"lam": 0.8, "segmenter": Lines()}, r"critic_pretraining.*\(lam nearer 1\); or use RLOO"),
        ({"lam": 1.0}, r"responses: 20000\}\); or use RLOO"),
        ({"lam": "adaptive", "segmenter": Lines()}, r"trust it less \(lam: 1\); or use RLOO"),
        ({"critic_pretraining": CriticPretraining()}, "pretrain it on more responses"),
    ],
    ids=str,
)
def test_a_critic_that_explains_nothing_is_told_once(ppo_config, monkeypatch, change, advice):
    said = []
    monkeypatch.setattr(critic_quality, "warn", said.append)
    watch = KnowledgeWatch(ppo_config(**change))
    for step in range(1, 60):
        watch(step, dict(zip(THIRDS, (-0.02, 0.01, 0.03))))
        assert len(said) == (step >= WATCHED)
    assert "-0.02, 0.01, 0.03 in the first, second and last third" in said[0]
    assert re.search(advice, said[0])


def test_a_critic_that_knows_the_end_of_responses_is_left_alone(ppo_config, monkeypatch):
    said = []
    monkeypatch.setattr(critic_quality, "warn", said.append)
    watch = KnowledgeWatch(ppo_config())
    for step in range(1, 60):
        watch(step, dict(zip(THIRDS, (-0.1, 0.0, 0.2))))
    assert not said


def test_training_says_so(ppo_config, monkeypatch):
    said = []
    monkeypatch.setattr(critic_quality, "warn", said.append)
    monkeypatch.setattr(critic_quality, "NOTHING", 2.0)  # even a perfect one explains too little
    monkeypatch.setattr(critic_quality, "WATCHED", 2)
    ppo.train(ppo_config(num_steps=3, save_every=0))
    assert [line.partition(":")[0] for line in said] == ["step 2"]


def test_auto_asks_for_reaches_only_where_the_critic_explains_nothing(ppo_config):
    auto = {"credit": "auto", "num_steps": 3, "save_every": 0, "eval_every": 0}
    config = ppo_config(**auto, segmenter=NGram(1), lam=0.95)
    chooser = CreditChooser(config)
    chooser.note(dict(zip(THIRDS, (0.0, 0.1, 0.4))))
    assert list(chooser.explained) == [0.4]
    assert chooser.state()["explained"] == [0.4]
    again = CreditChooser(config)
    again.load_state(chooser.state())
    assert list(again.explained) == [0.4]
    assert not knows_nothing(again.explained)
    ppo.train(config)
    assert "credit/reach" in read_lines(config.output_dir)[1]


def test_reaches_are_shares_of_a_response(ppo_config, monkeypatch):
    """12 tokens: lambda .75 over tokens reaches 4 of them, over blocks of five all."""
    seen = []
    real = credit_choice.reach_of_each

    def spy(*args):
        shares = real(*args)
        seen.append((args[0], args[2], shares))
        return shares

    monkeypatch.setattr(credit_choice, "reach_of_each", spy)
    monkeypatch.setattr(credit_choice, "knows_nothing", lambda _: True)
    names = ("token lam=1", "ngram n=5 lam=0.75")
    config = ppo_config(
        credit="auto",
        credit_candidates=names,
        segmenter=NGram(1),
        lam=0.75,
        num_steps=1,
        save_every=0,
        eval_every=0,
    )
    ppo.train(config)
    [(experience, configs, shares)] = seen
    assert [c.lam for c in configs] == [0.75, 1.0, 0.75]
    length = float(experience.mask.sum()) / len(experience.mask)
    assert shares == pytest.approx([4 / length, 1.0, 1.0])
