"""Rules by the policy's entropy and by the critic's values, and lambdas of rows, in training."""

import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import log_softmax

from marlhf.config.candidates import Candidate
from marlhf.core import Entropy, NGram, ValueChange, segment
from marlhf.credit.measure import measure
from marlhf.credit.state import open_state
from marlhf.credit.true_credit import locate
from marlhf.errors import SettingError
from marlhf.rollout import Sampling
from marlhf.runtime.distributed import start
from marlhf.runtime.stage import NO_OBJECTS
from marlhf.spans.show import cut_text
from marlhf.train import ppo, rloo
from marlhf.train.experience import RolloutScorer
from marlhf.train.rl_models import load_models, load_prompts
from marlhf.train.sampling import sample_responses
from marlhf.train.state_values import StateValues, chosen_boundaries
from small_runs import TOY, read_lines


def steps(config) -> list[dict]:
    ppo.train(config)
    return [line for line in read_lines(config.output_dir) if line["kind"] == "train"]


@pytest.fixture
def scored(ppo_config):
    """An experience of a config's scorer, with what it was computed from."""

    def make(**changes):
        config = ppo_config(save_every=0, **changes)
        models = load_models(config, NO_OBJECTS, start("cpu", "auto"), critic=True)
        examples = load_prompts(config, models, NO_OBJECTS)[0][:4]
        rollout = sample_responses([e.prompt for e in examples], models, [1, 2, 3, 4])
        score = RolloutScorer(models, config)
        return config, models, examples, rollout, score

    return make


def test_entropy_is_exact_and_at_the_sampling_temperature(scored):
    sampling = Sampling(max_new_tokens=6, temperature=0.7)
    config, models, examples, rollout, score = scored(segmenter=Entropy(0.5), sampling=sampling)
    found = score(examples, rollout)
    for i, (example, response) in enumerate(zip(examples, rollout.responses)):
        ids = torch.tensor([[*example.prompt, *response]])
        with torch.no_grad():
            logits = models.policy(ids).logits[0, len(example.prompt) - 1 : -1] / 0.7
        logs = log_softmax(logits.double(), dim=-1)
        exact = -(logs.exp() * logs).sum(dim=-1)
        torch.testing.assert_close(
            found.entropy[i, : len(response)].double(), exact, rtol=1e-4, atol=1e-4
        )
    assert found.values is None
    segments = segment(config.segmenter, found.responses(models.vocabulary, torch.Generator()))
    assert int(segments.macro_mask.sum()) > 4


def test_values_are_the_critics(scored):
    _, models, examples, rollout, score = scored(segmenter=ValueChange(0.5))
    found = score(examples, rollout)
    torch.testing.assert_close(found.values, found.critic_values(models))
    assert found.entropy is None
    plain = scored(segmenter=NGram(5))[-1](examples, rollout)
    assert plain.entropy is None
    assert plain.values is None


@pytest.mark.parametrize(
    "changes",
    [
        {"segmenter": Entropy(0.7)},
        {"segmenter": Entropy(0.5, max_length=4), "num_ppo_epochs": 2, "num_mini_batches": 2},
        {"segmenter": ValueChange(0.7)},
        {"segmenter": ValueChange(0.7), "credit": "boundary", "lam": "adaptive", "lam_value": 1.0},
    ],
    ids=str,
)
def test_training_by_entropy_and_by_changes_of_value(ppo_config, changes):
    lines = steps(ppo_config(num_steps=2, save_every=0, **changes))
    assert all(1 < line["rl/macro_length"] < line["rl/length"] for line in lines)


def test_adaptive_lambda_in_training(ppo_config):
    """One update per batch takes the returns in micro-batches, several take them at once."""
    options = {"lam": "adaptive", "lam_alpha": 0.5, "num_steps": 2, "save_every": 0}
    adaptive = steps(ppo_config("adaptive", **options))
    fixed = steps(ppo_config("fixed", **{**options, "lam": 0.95}))
    assert adaptive[0]["rl/advantage_norm"] != fixed[0]["rl/advantage_norm"]
    small = steps(ppo_config("small", token_budget=50, **options))
    for a, b in zip(adaptive, small):
        assert a["rl/value_loss"] == pytest.approx(b["rl/value_loss"], rel=2e-4)


def test_positive_examples_are_imitated(ppo_config):
    options = {"num_steps": 2, "save_every": 0, "num_ppo_epochs": 2, "num_mini_batches": 2}
    plain = steps(ppo_config("plain", **options))
    every = {"positive_lm_coef": 0.5, "positive_score": -1e9}
    imitating = steps(ppo_config("imitating", **every, **options))
    # At first the loss is the advantages' mean, about 0, plus half the mean of -log p.
    extra = imitating[0]["rl/policy_loss"] - plain[0]["rl/policy_loss"]
    assert extra == pytest.approx(0.5 * plain[0]["rl/entropy"], rel=0.1)
    none = steps(ppo_config("none", positive_lm_coef=0.5, positive_score=1e9, **options))
    assert none == plain
    small = steps(ppo_config("small", token_budget=50, **every, **options))
    assert small[0]["rl/policy_loss"] == pytest.approx(imitating[0]["rl/policy_loss"], rel=2e-4)


def test_continuations_at_few_boundaries_of_high_entropy(ppo_config, scored, monkeypatch):
    config, models, examples, rollout, score = scored(values="monte_carlo", segmenter=NGram(2))
    score.reads_entropy = True
    found = score(examples, rollout)
    segments = segment(NGram(2), found.responses(models.vocabulary, torch.Generator()))
    assert chosen_boundaries(segments, found, config) is segments
    few = chosen_boundaries(segments, found, ppo_config(values="monte_carlo", boundaries=2))
    for row, entropy, kept in zip(segments.starts, found.entropy, few.starts):
        places = [t for t, start in enumerate(row.tolist()) if start]
        highest = sorted(places[1:], key=lambda t: -float(entropy[t]))[:2]
        assert [t for t, start in enumerate(kept.tolist()) if start] == sorted([0, *highest])

    counts = []
    real = StateValues.__call__

    def watched(self, *given):
        segments, values = real(self, *given)
        counts.append(segments.macro_mask.sum(dim=1).max())
        return segments, values

    monkeypatch.setattr(StateValues, "__call__", watched)
    options = {"values": "monte_carlo", "continuations": 2, "boundaries": 1}
    steps(ppo_config("few", num_steps=1, save_every=0, segmenter=NGram(2), **options))
    assert [int(count) for count in counts] == [2]


def test_trees_branch_at_high_entropy(parents, tmp_path):
    config = rloo.RLOOConfig(
        model=str(parents / "sft/model"),
        reward_model=str(parents / "reward/model"),
        output_dir=str(tmp_path / "tree"),
        data=TOY,
        batch_size=2,
        num_steps=1,
        tree=(2, 2),
        segmenter=Entropy(threshold=0.5),
        eval_every=0,
        eval_prompts=2,
        save_every=0,
        sampling=Sampling(max_new_tokens=12),
    )
    rloo.train(config)
    line = next(x for x in read_lines(config.output_dir) if x["kind"] == "train")
    assert line["rl/macro_length"] < line["rl/length"]


def test_credit_compares_them(ppo_config):
    config = ppo_config(num_steps=1, save_every=1, batch_size=4, lam="adaptive")
    ppo.train(config)
    state = open_state(Path(config.output_dir), device="cpu")
    rules = ("entropy quantile=0.7 lam=0.9", "value_change lam=adaptive", "token lam=1")
    measured = measure(state, rules, batches=3)
    assert [o.name for o in measured.options][:3] == [
        "ngram n=5 lam=adaptive",
        "entropy quantile=0.7 lam=0.9",
        "value_change lam=adaptive",
    ]
    where = locate(state, rules[:2], responses=2, continuations=2)
    assert len(where["rules"]) == 3


def test_adaptive_lambda_as_text():
    candidate = Candidate.parse("lines lam=adaptive")
    assert candidate.name == "lines lam=adaptive"
    assert candidate.recipe == "segmenter: {type: lines}, lam: adaptive, sigma: start"
    with pytest.raises(SettingError, match="between 0 and 1, or be adaptive"):
        Candidate.parse("lines lam=some")


def test_a_text_is_cut_by_entropy(tmp_path):
    whole = cut_text(
        "The shy fox ran.", Entropy(threshold=99.0), tokenizer="", model="tiny", seed=0
    )
    every = cut_text("The shy fox ran.", Entropy(threshold=0.0), tokenizer="", model="tiny", seed=0)
    assert len(whole) == 1
    assert len(every) > 4
    with pytest.raises(ValueError, match="give --model"):
        cut_text("The fox.", Entropy(), tokenizer="tiny", model=None, seed=0)
    with pytest.raises(ValueError, match="no text shows them"):
        cut_text("The fox.", ValueChange(), tokenizer="tiny", model=None, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundaries": 2}, "values: critic has one per token"),
        ({"values": "monte_carlo", "segmenter": ValueChange()}, "values: monte_carlo has none"),
        ({"lam": "long"}, "lam must be a number or adaptive"),
        ({"lam_alpha": 0.0}, "lam_alpha must be positive"),
        ({"positive_lm_coef": -1.0}, "positive_lm_coef must be at least 0"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(ppo_config, changes, message):
    with pytest.raises(SettingError, match=message):
        ppo_config(**changes)


def test_rloo_has_no_critic_to_read():
    with pytest.raises(SettingError, match="reads the values of a critic, and this method has"):
        rloo.RLOOConfig(model="tiny", output_dir="x", segmenter=ValueChange())
    assert math.isinf(rloo.RLOOConfig(model="tiny", output_dir="x").segmenter.n)
