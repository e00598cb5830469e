"""Ensembles of reward heads, the length head, and what is known of pairs beside their texts."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from marlhf.config.rl import Guards, parse_combine
from marlhf.config.stage import LoRA
from marlhf.core import reward_loss
from marlhf.data import DataConfig, DataError, Row
from marlhf.errors import SettingError
from marlhf.judge.local import RewardJudge
from marlhf.judge.pairs import Pair, Response
from marlhf.models.adapter_files import WEIGHTS, member_folder
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.base import ModelError
from marlhf.models.heads import average_heads
from marlhf.models.load import load_policy, load_scalar, load_tokenizer
from marlhf.reward import RewardModel
from marlhf.runs.layout import RunError
from marlhf.runtime.stage import Example
from marlhf.train import ppo, reward
from marlhf.train.reward import Labels, Objective, draw_counts
from small_runs import TOY, read_lines, wait_for_step

SHORT = {"data": TOY, "batch_size": 8, "num_steps": 3, "eval_every": 3, "save_every": 0}


def train_reward(parents: Path, folder: Path, **changes) -> Path:
    start = str(parents / "sft" / "model")
    settings = {"model": start, "output_dir": str(folder), "learning_rate": 1e-3, **SHORT}
    return reward.train(reward.RewardConfig(**{**settings, **changes}))


@pytest.fixture(scope="session")
def ensemble(parents, tmp_path_factory) -> Path:
    return train_reward(parents, tmp_path_factory.mktemp("ensemble") / "reward", members=3)


def frozen_trunk(load):
    """Only heads learn, so that members share nothing."""

    def load_frozen(*args):
        model = load(*args)
        model.base_model.requires_grad_(False)
        return model

    return load_frozen


def test_members_equal_single_trainings_on_the_same_pairs(parents, tmp_path, monkeypatch):
    """Over a frozen trunk member m is the head that training alone on its pairs gives."""
    monkeypatch.setattr(reward, "load_with_heads", frozen_trunk(reward.load_with_heads))
    options = {"max_grad_norm": 1e9, "center_coef": 0.01, "num_steps": 4}
    together = train_reward(parents, tmp_path / "all", members=3, seed=5, **options)
    heads = load_scalar(str(together)).score.weight
    batches = reward.SupervisedRun.row_numbers  # the order of pairs is the ensemble's
    monkeypatch.setattr(
        reward.SupervisedRun, "row_numbers", lambda self, step: batches(_seeded(self, 5), step)
    )
    for member in range(3):
        monkeypatch.setattr(
            reward, "draw_counts", lambda n, k, seed, m=member: draw_counts(n, 3, 5)[m : m + 1]
        )
        alone = train_reward(parents, tmp_path / str(member), seed=5 + member, **options)
        head = load_scalar(str(alone)).score.weight
        torch.testing.assert_close(heads[member : member + 1], head, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(heads[0], heads[1])


def _seeded(run, seed):
    run.config = replace(run.config, seed=seed)
    return run


def test_counts_are_a_bootstrap_by_seed():
    counts = draw_counts(50, 3, seed=7)
    assert counts.sum(dim=1).tolist() == [50, 50, 50]
    assert torch.equal(counts[1], draw_counts(50, 2, seed=8)[0])  # member m has seed + m
    assert not torch.equal(counts[0], counts[1])
    assert torch.equal(draw_counts(50, 1, seed=7), torch.ones(1, 50, dtype=torch.int64))


def test_the_loss_counts_a_pair_as_often_as_it_was_drawn():
    scores = torch.randn(2, 3, 2, dtype=torch.float64)
    counts = torch.tensor([[2, 0, 1], [0, 3, 0]])
    labels = Labels(torch.tensor([0.5, 0.0, 0.0]), torch.tensor([0.0, 0.1, 0.5]), torch.ones(2, 3))
    loss = Objective(labels, counts, center_coef=0.1)(scores, [0, 1, 2])
    total = 0.0
    for member in range(2):
        for pair in range(3):
            c, r = scores[:, pair, member].tolist()
            p = 1 / (1 + math.exp(-(c - r - float(labels.margin[pair]))))
            flip = float(labels.flipped[pair])
            each = -(1 - flip) * math.log(p) - flip * math.log(1 - p) + 0.1 * (c + r) ** 2
            total += int(counts[member, pair]) * each
    assert float(loss) == pytest.approx(total / 3 / 2)


def test_an_ensemble_loads_in_plain_transformers_and_combines(ensemble):
    plain = AutoModelForSequenceClassification.from_pretrained(ensemble)
    assert plain.config.num_labels == 3
    assert plain.score.weight.shape[0] == 3
    tokenizer = load_tokenizer(str(ensemble))
    prompts, responses = [[5, 6], [5, 7], [9]], [[8], [9, 1], [4, 4, 4]]

    def scorer(combine):
        return RewardModel(load_scalar(str(ensemble)), tokenizer, tokenizer, combine=combine)

    model = scorer("mean - 2 std")
    members = model.member_scores(prompts, responses)  # [3, 3]
    ids = torch.tensor([[*prompts[1], *responses[1]]])
    logits = plain.score(plain.base_model(ids).last_hidden_state[:, -1])
    torch.testing.assert_close(members[1:2], logits, rtol=1e-4, atol=1e-5)
    spread = members.std(dim=1, correction=0)
    torch.testing.assert_close(model(prompts, responses), members.mean(1) - 2 * spread)
    torch.testing.assert_close(model.disagreement, spread.mean())
    assert torch.equal(scorer("min")(prompts, responses), members.min(1).values)
    assert torch.equal(scorer("mean")(prompts, responses), members.mean(1))


def test_the_minimum_of_one_member_is_that_member(parents):
    folder = str(parents / "reward" / "model")
    tokenizer = load_tokenizer(folder)
    rows = [[5, 6], [5, 7]], [[8], [9, 1]]
    one, low = (
        RewardModel(load_scalar(folder), tokenizer, tokenizer, combine=how)(*rows)
        for how in ("mean", "min")
    )
    assert torch.equal(one, low)


def test_a_critic_starts_from_the_mean_of_an_ensemble(ensemble):
    model = load_scalar(str(ensemble))
    mean = model.score.weight.mean(dim=0)
    torch.testing.assert_close(average_heads(model).score.weight[0], mean)
    assert model.config.num_labels == 1
    assert not hasattr(model.config, "reward_members")


def test_ppo_logs_the_disagreement_of_an_ensemble(ensemble, ppo_config):
    config = ppo_config(reward_model=str(ensemble), reward_combine="mean - 2 std", num_steps=2)
    ppo.train(config)
    rows = read_lines(config.output_dir)
    assert all(
        row[f"{'rl' if row['kind'] == 'train' else 'eval'}/disagreement"] > 0 for row in rows
    )
    critic = AutoModelForSequenceClassification.from_pretrained(f"{config.output_dir}/critic")
    assert critic.config.num_labels == 1


@pytest.mark.xdist_group("forked")
@pytest.mark.parametrize(
    "options",
    [{"members": 2}, {"length_head": True}, {"members": 2, "lora": LoRA(r=2, merge=False)}],
)
def test_killed_training_of_several_heads_resumes_identically(parents, tmp_path, start, options):
    options = {**options, "save_every": 1, "num_steps": 6}
    train_reward(parents, tmp_path / "unbroken", **options)
    settings = {"model": str(parents / "sft" / "model"), "learning_rate": 1e-3, **SHORT, **options}
    broken = reward.RewardConfig(output_dir=str(tmp_path / "broken"), **settings)
    process = start(broken, "reward")
    wait_for_step(broken.output_dir, 2, process)
    process.kill()
    process.communicate()
    reward.train(broken)
    files = [
        [p.read_bytes() for p in sorted((tmp_path / name / "model").rglob("*.safetensors"))]
        for name in ("unbroken", "broken")
    ]
    assert files[0] == files[1]
    assert files[0]
    assert read_lines(tmp_path / "unbroken") == read_lines(broken.output_dir)


def test_micro_batches_add_up_with_a_length_head(parents, tmp_path):
    """The correlation is one of the whole batch, however it is cut into passes."""
    whole = train_reward(parents, tmp_path / "whole", length_head=True)
    cut = train_reward(parents, tmp_path / "cut", length_head=True, token_budget=300)
    a, b = load_scalar(str(whole)), load_scalar(str(cut))
    for (name, one), other in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5, msg=name)
    assert a.config.num_labels == 1  # the length head is gone
    assert a.score.weight.shape[0] == 1


def adapters(parents, folder, **changes) -> Path:
    options = {"members": 3, "lora": LoRA(r=2, merge=False), **changes}
    return train_reward(parents, folder, **options)


@pytest.fixture(scope="session")
def adapter_ensemble(parents, tmp_path_factory) -> Path:
    return adapters(parents, tmp_path_factory.mktemp("adapters") / "reward")


def test_adapters_equal_single_trainings_on_the_same_pairs(parents, tmp_path, monkeypatch):
    options = {"max_grad_norm": 0.5, "center_coef": 0.01, "num_steps": 4}
    together = adapters(parents, tmp_path / "all", seed=5, **options)
    batches = reward.SupervisedRun.row_numbers  # the order of pairs is the ensemble's
    monkeypatch.setattr(
        reward.SupervisedRun, "row_numbers", lambda self, step: batches(_seeded(self, 5), step)
    )
    for member in range(3):
        monkeypatch.setattr(
            reward, "draw_counts", lambda n, k, seed, m=member: draw_counts(n, 3, 5)[m : m + 1]
        )
        alone = adapters(parents, tmp_path / str(member), members=1, seed=5 + member, **options)
        own = load_file(member_folder(together, member) / WEIGHTS)
        single = load_file(alone / WEIGHTS)
        assert own.keys() == single.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, single[name], rtol=1e-4, atol=1e-6)
    first = load_file(together / WEIGHTS)
    assert all(not torch.allclose(x, first[name]) for name, x in own.items())


def test_adapters_load_whole_on_a_shared_base_and_one_by_one(parents, adapter_ensemble):
    """What an ensemble gives is what peft gives for each adapter, however it is loaded."""
    start = str(parents / "sft" / "model")
    whole = load_scalar(str(adapter_ensemble))
    base = FrozenBaseModel(load_policy(start), start)
    shared = base.ensemble(adapter_ensemble, members=3, trainable=False)
    assert base.module is shared.members[0].base.module is shared.members[2].base.module
    tokenizer = load_tokenizer(str(adapter_ensemble))
    rows = [[5, 6], [5, 7]], [[8], [9, 1]]
    scores = RewardModel(whole, tokenizer, tokenizer).member_scores(*rows)  # [2, 3]
    torch.testing.assert_close(
        scores, RewardModel(shared, tokenizer, tokenizer).member_scores(*rows)
    )
    ids = torch.tensor([[5, 6, 8]])
    for member in range(3):
        plain = PeftModel.from_pretrained(
            load_scalar(start), str(member_folder(adapter_ensemble, member))
        )
        torch.testing.assert_close(plain(ids).logits[0], scores[:1, member], rtol=1e-4, atol=1e-5)
    assert len({round(float(x), 4) for x in scores[0]}) == 3


@pytest.mark.parametrize("lora", [None, LoRA(r=2), LoRA(r=2, shared_base=True)])
def test_ppo_takes_adapters_as_it_takes_heads(adapter_ensemble, ppo_config, lora):
    """The critic starts from the first member."""
    config = ppo_config(
        reward_model=str(adapter_ensemble),
        gold_model=str(adapter_ensemble),
        reward_combine="mean - 2 std",
        num_steps=2,
        lora=lora,
    )
    ppo.train(config)
    rows = read_lines(config.output_dir)
    assert all(
        row[f"{'rl' if row['kind'] == 'train' else 'eval'}/disagreement"] > 0 for row in rows
    )


def test_judges_ask_each_adapter(adapter_ensemble):
    [margins] = np.transpose(
        RewardJudge(str(adapter_ensemble), "cpu").member_margins(
            [Pair("Why?", Response("Because."), Response("No."))]
        )
    )
    assert len({round(x, 4) for x in margins}) == 3


def test_adapters_are_trained_further(adapter_ensemble, parents, tmp_path):
    further = adapters(parents, tmp_path / "further", model=str(adapter_ensemble), num_steps=1)
    for member in range(3):
        before, after = (
            load_file(member_folder(x, member) / WEIGHTS) for x in (adapter_ensemble, further)
        )
        change = max(float((after[name] - x).abs().max()) for name, x in before.items())
        assert 0 < change < 2e-3  # of a single step
    with pytest.raises(RunError, match="set members: 3 and lora"):
        adapters(parents, tmp_path / "two", model=str(adapter_ensemble), members=2)
    with pytest.raises(RunError, match="set members: 3 and lora"):
        train_reward(parents, tmp_path / "whole", model=str(adapter_ensemble), members=3)
    with pytest.raises(SettingError, match=r"merged in\. Set lora\.merge: false"):
        reward.RewardConfig(members=2, lora=LoRA())


def test_rising_disagreement_with_a_rising_score_warns():
    start = {"eval/kl": 0, "eval/repetition": 0, "eval/length": 9, "eval/ended": 1}
    start |= {"eval/score": 0.0, "eval/disagreement": 0.1}
    now = start | {"eval/score": 1.0, "eval/disagreement": 0.2}
    [line], verdict = Guards().judge(now, start)
    assert "disagreement by a factor of 2" in line
    assert not verdict
    assert Guards().judge(now | {"eval/score": -1.0}, start) == ([], "")
    assert "factor of 2, past the limit" in Guards(max_disagreement=1.8).judge(now, start)[1]


def test_bad_settings_are_sentences(parents, ppo_config, ensemble, tmp_path):
    with pytest.raises(SettingError, match="members must be at least 1"):
        reward.RewardConfig(members=0)
    with pytest.raises(SettingError, match="Leave out one of them"):
        reward.RewardConfig(members=2, length_head=True)
    with pytest.raises(SettingError, match=r"K not negative.*got 'mean - -1 std'"):
        ppo_config(reward_combine="mean - -1 std")
    with pytest.raises(RunError, match="needs an ensemble, and there is none"):
        ppo.train(ppo_config(reward_combine="min"))
    with pytest.raises(RunError, match="an ensemble of 3 members"):
        train_reward(parents, tmp_path / "more", model=str(ensemble), members=2)
    with pytest.raises(SettingError, match="label_smoothing must be below"):
        reward.RewardConfig(label_smoothing=0.5)
    assert parse_combine("mean") == 0.0
    assert parse_combine("mean-1.5std") == 1.5


def test_a_classifier_is_no_ensemble(ensemble, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(ensemble)
    del model.config.reward_members
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="classifies into 3 labels"):
        load_scalar(str(tmp_path))


def test_margins_and_ties_come_from_the_data(tmp_path, parents):
    def example(**columns):
        return Example(Row("?", "a", "b", columns, "mine.jsonl:3"), [1], [2, 3], [4])

    labels = Labels.of([example(), example(margin=2), example(tie=True)], label_smoothing=0.1)
    assert labels.margin.tolist() == [0, 2, 0]
    assert labels.flipped.tolist() == pytest.approx([0.1, 0.1, 0.5])
    assert labels.lengths.tolist() == [[2, 2, 2], [1, 1, 1]]
    for wrong in ("wide", math.nan, True):
        with pytest.raises(DataError, match=r"mine\.jsonl:3: `margin` is"):
            Labels.of([example(margin=wrong)])
    # In a CSV file all values are text.
    read = (
        {"margin": "0.5", "tie": "False"},
        {"margin": "", "tie": ""},
        {"tie": "true"},
        {"tie": "0"},
    )
    labels = Labels.of([example(**columns) for columns in read])
    assert labels.margin.tolist() == [0.5, 0, 0, 0]
    assert labels.flipped.tolist() == [0, 0, 0.5, 0]
    with pytest.raises(DataError, match=r"mine\.jsonl:3: `tie` is 'maybe'"):
        Labels.of([example(tie="maybe")])
    # A tie is a cross-entropy at a half: lowest where both score alike.
    chosen = torch.tensor([0.7], requires_grad=True)
    reward_loss(chosen, torch.tensor([0.2]), label_smoothing=torch.tensor([0.5])).backward()
    assert float(chosen.grad) == pytest.approx(torch.tensor(0.5).sigmoid() - 0.5)
    rows = [
        {"prompt": f"Say {i}.", "chosen": " yes" * (1 + i % 3), "rejected": " no", "margin": 0.5}
        for i in range(40)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(file), eval_size=8, parts={})
    train_reward(parents, tmp_path / "margin", data=data, num_steps=2)
    train_reward(parents, tmp_path / "none", data=data, num_steps=2, label_smoothing=0.2)
    losses = [read_lines(tmp_path / n)[1]["reward/loss"] for n in ("margin", "none")]
    assert losses[0] != losses[1]


def test_given_objects_may_be_ensembles(ensemble):
    model = AutoModelForSequenceClassification.from_pretrained(ensemble)
    assert load_scalar(model).score.out_features == 3


def story(rng: random.Random, is_kind: bool, length: int) -> str:
    deeds = [" The fox laughed."] * length
    deeds[rng.randrange(length)] = " The fox smiled." if is_kind else " The fox cried."
    return "".join(deeds)


def write_pairs(file: Path, pairs: list[tuple[str, str]]) -> str:
    rows = [
        {"prompt": f"Tell {file.stem} {i}.", "chosen": chosen, "rejected": rejected}
        for i, (chosen, rejected) in enumerate(pairs)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("scale", [10.0, 1.0, 0.01])
def test_a_length_penalty_pulls_no_harder_than_preferences(scale):
    """By one score at most a standardised length over their number, however small scores are."""
    lengths = torch.arange(1.0, 17.0).view(2, 8)
    nothing = torch.zeros(8)
    objective = reward.Objective(
        reward.Labels(nothing, nothing, lengths), torch.ones(1, 8, dtype=torch.long)
    )
    standard = (lengths - lengths.mean()) / lengths.std()

    def pull(quality):
        scores = torch.stack([quality, lengths], dim=-1).requires_grad_()
        penalty = objective.length_penalty(scores)
        (by_scores,) = torch.autograd.grad(penalty, scores)
        return penalty + 1, by_scores[..., 0]  # the length head is perfect: -1

    worst, by_scores = pull(scale * standard)
    assert worst > 0
    assert (by_scores.abs() <= standard.abs() / 16 + 1e-6).all()
    nothing_left, by_scores = pull(scale * standard.flip(0, 1).abs())  # uncorrelated
    assert nothing_left.item() == pytest.approx(0, abs=1e-5)
    assert by_scores.abs().max() < 1e-5


def test_a_length_head_takes_up_what_length_explains(parents, tmp_path):
    """People like kind stories and long ones. Plain scores follow length; with the head they do
    not, and tell kindness as well. Held out is every pair of lengths, where kindness wins."""
    rng = random.Random(0)
    pairs = []
    while len(pairs) < 640:
        (a, first), (b, second) = (
            (2.0 * kind + 0.5 * length, story(rng, kind, length))
            for kind, length in ((rng.random() < 0.5, rng.randrange(1, 9)) for _ in range(2))
        )
        if first != second:
            wins = rng.random() < 1 / (1 + math.exp(b - a))
            pairs.append((first, second) if wins else (second, first))
    grid = [(story(rng, True, i), story(rng, False, j)) for i in range(1, 9) for j in range(1, 9)]
    files = {
        "path": write_pairs(tmp_path / "train.jsonl", pairs),
        "eval_path": write_pairs(tmp_path / "eval.jsonl", grid),
    }
    data = DataConfig(**files, parts={})
    ends = {}
    for length_head in (False, True):
        folder = tmp_path / f"head-{length_head}"
        train_reward(
            parents,
            folder,
            data=data,
            length_head=length_head,
            batch_size=64,
            num_steps=40,
            num_epochs=4,
            eval_every=0,
            learning_rate=3e-3,
        )
        ends[length_head] = read_lines(folder)[-1]
    plain, odin = ends[False], ends[True]
    assert plain["eval/length_correlation"] > 0.3
    assert abs(odin["eval/length_correlation"]) < 0.1
    assert odin["eval/accuracy"] > plain["eval/accuracy"] - 0.02
    assert odin["eval/accuracy_short"] > plain["eval/accuracy_short"]
