"""Iterated runs: the stages of rounds, and labels by a reward, a judge or people."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from marlhf.config.build import ConfigError
from marlhf.data import DataConfig, load_data
from marlhf.judge.annotate import open_votes
from marlhf.judge.annotate.pick import POOL
from marlhf.rollout import Sampling
from marlhf.runs.atomic import read_jsonl, write_jsonl
from marlhf.runs.layout import RunError
from marlhf.runs.write import is_finished
from marlhf.runtime.stage import GivenObjects
from marlhf.train import label
from marlhf.train.dpo_config import LabelConfig
from marlhf.train.preflight import check_stages
from marlhf.train.recipe import check_recipe, check_stage
from marlhf.train.reward import compare, retrain
from small_runs import TOY

ROUNDS = """
output_dir: runs/x
defaults: {data: {source: toy}}
rounds: 2
stages:
  sft: {model: tiny}
  reward: {model: "@sft"}
  ppo: {model: "@sft", reward_model: "@reward"}
round:
  label: {model: "@ppo", reward_model: gold, judge: ""}
  reward: {like: reward, data: {more: [own.jsonl, "@label"]}}
  ppo: {like: ppo, reward_funcs: ["@reward"]}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return path

    return write


def test_rounds_are_stages_that_point_to_the_latest(write):
    stages = {stage.name: stage for stage in check_recipe(write(ROUNDS))}
    once = ["label-{}", "reward-{}", "ppo-{}"]
    assert list(stages) == ["sft", "reward", "ppo"] + [x.format(k) for k in (1, 2) for x in once]
    configs = {name: stage.config for name, stage in stages.items()}
    assert [configs[f"label-{k}"].model for k in (1, 2)] == [
        "runs/x/ppo/model",
        "runs/x/ppo-1/model",
    ]
    assert configs["reward-1"].model == "runs/x/sft/model"  # as in the stage that it is like
    assert configs["ppo-2"].reward_model == "runs/x/reward-2/model"
    assert configs["ppo-2"].reward_funcs == ("runs/x/reward-2/model",)
    assert configs["reward-1"].data.more == ("own.jsonl", "runs/x/label-1/pairs.jsonl")
    files = ("own.jsonl", "runs/x/label-1/pairs.jsonl", "runs/x/label-2/pairs.jsonl")
    assert configs["reward-2"].data.more == files  # labels add up
    assert stages["label-2"].kind == "label"


def test_steps_of_a_round_are_labelled_by_the_latest_policy(write):
    source = '{policy: "@ppo", reward_funcs: ["marlhf.reward.sums:solved"]}'
    text = ROUNDS.replace("round:\n", f'round:\n  prm: {{model: "@sft", labels_from: {source}}}\n')
    stages = {stage.name: stage.config for stage in check_recipe(write(text))}
    policies = [stages[f"prm-{k}"].labels_from.policy for k in (1, 2)]
    assert policies == ["runs/x/ppo/model", "runs/x/ppo-1/model"]


def test_overrides_reach_all_rounds_or_one(write):
    overrides = ["ppo.kl_coef=0.2", "ppo-2.kl_coef=0.3", "label.num_samples=4"]
    stages = {stage.name: stage.config for stage in check_recipe(write(ROUNDS), overrides)}
    assert [stages[x].kl_coef for x in ("ppo", "ppo-1", "ppo-2")] == [0.2, 0.2, 0.3]
    assert [stages[f"label-{k}"].num_samples for k in (1, 2)] == [4, 4]
    one = check_stage(write(ROUNDS), "ppo", ["ppo.kl_coef=0.4"], name="ppo-2")
    assert (one.config.kl_coef, one.config.reward_model) == (0.4, "runs/x/reward-2/model")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds: 2", "rounds: 0", "rounds of .* must be a number from 1 on; got '?0"),
        ("rounds: 2\n", "", "rounds of .* must be a number from 1 on"),
        ("round:\n", "rund:\n", "repeats the stages under `round:`, and there are none"),
        ('"@ppo"', '"@pqo"', "stages.label-1.model: unknown name 'pqo'"),
        ('"@label"]}}', '"@lable"]}}', "stages.reward-1.data.more: unknown name 'lable'"),
        ("  ppo: {model", "  macro: {kind: ppo, model", "stages.ppo-1.like: unknown name 'ppo'"),
    ],
)
def test_rounds_that_make_no_sense(write, old, new, message):
    assert old in ROUNDS
    with pytest.raises(ConfigError, match=message):
        check_recipe(write(ROUNDS.replace(old, new, 1)))


def test_labels_that_do_not_exist_yet_keep_no_recipe_from_starting(write, parents, tmp_path):
    """Rows of an earlier stage are not looked for, those of the user are."""
    text = ROUNDS.replace("output_dir: runs/x", f"output_dir: {tmp_path}/x")
    text = text.replace("reward_model: gold", f"reward_model: {parents}/reward/model")
    mine = tmp_path / "own.jsonl"
    text = text.replace("own.jsonl", str(mine))
    with pytest.raises(ConfigError, match=r"There is no .*own\.jsonl"):
        check_stages(check_recipe(write(text), ["sampling.max_new_tokens=8"]))
    write_jsonl(mine, [{"prompt": "Why?", "chosen": "a", "rejected": "b"}])
    check_stages(check_recipe(write(text), ["sampling.max_new_tokens=8"]))


def test_more_rows_are_trained_on_and_never_evaluated_on(tmp_path):
    data = DataConfig(source="toy", limit=100, eval_size=10)
    before = load_data(data, "reward", needs=("chosen", "rejected"))
    prompts = ["What is new?", before.eval[0].prompt]
    file = tmp_path / "votes.jsonl"
    write_jsonl(file, [{"prompt": p, "chosen": "a", "rejected": "b"} for p in prompts])
    more = DataConfig(source="toy", limit=100, eval_size=10, more=(str(file),))
    after = load_data(more, "reward", needs=("chosen", "rejected"))
    assert after.train[:-1] == before.train
    assert after.train[-1].prompt == "What is new?"
    assert after.eval == before.eval


@pytest.fixture
def label_config(parents, tmp_path, monkeypatch):
    """A label run of seconds. The model is barely trained: what it says counts as finished."""
    real = label.sample_examples

    def sample(*args):
        examples, rollout = real(*args)
        return examples, replace(rollout, ended=torch.ones_like(rollout.ended))

    monkeypatch.setattr(label, "sample_examples", sample)

    def make(name: str = "label-1", **changes) -> LabelConfig:
        settings = {
            "model": str(parents / "sft" / "model"),
            "reward_funcs": ("few",),
            "output_dir": str(tmp_path / name),
            "data": TOY,
            "batch_size": 6,
            "num_steps": 2,
            "num_samples": 3,
            "sampling": Sampling(max_new_tokens=12),
        }
        return LabelConfig(**{**settings, **changes})

    return make


def few(completions, **_):
    """Few letters, of which many completions have the same number."""
    return [-float(len(set(text))) for text in completions]


FEW = GivenObjects(reward_funcs=[few])


def test_labels_are_the_best_and_the_worst_and_rounds_differ(label_config, monkeypatch):
    first, second = label_config(), label_config("label-2")
    pairs = label.train(first, FEW)
    rows = read_jsonl(pairs).rows
    assert rows
    for row in rows:
        assert few([row["chosen"]]) > few([row["rejected"]])
        assert row["scores"] == [*few([row["chosen"]]), *few([row["rejected"]])]
    assert is_finished(Path(first.output_dir))
    assert label.train(second, FEW).read_bytes() != pairs.read_bytes()  # other prompts

    # A run that is killed after a batch samples the other one alone, and ends with the same rows.
    stopped = label_config("again/label-1")
    real, asked = label.sample_examples, []

    def sample(*args):
        asked.append(len(args[0]))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(label, "sample_examples", sample)
    with pytest.raises(KeyboardInterrupt):
        label.train(stopped, FEW)
    assert label.train(stopped, FEW).read_bytes() == pairs.read_bytes()
    assert asked == [18] * 3


def test_people_label_between_two_runs_of_one_command(label_config):
    config = label_config(reward_funcs=(), votes=3, num_samples=2)
    with pytest.raises(RunError, match=r"pairs wait for votes: 0 of 3 have one. Run `marlhf anno"):
        label.train(config)
    files = [Path(config.output_dir) / name for name in POOL]
    with closing(open_votes(files, seed=1, database=files[0].with_name("votes.sqlite"))) as store:
        for count, pair in enumerate(store.shown[:3], start=1):
            left, right = store.sides("Ann", pair)
            store.vote("Ann", pair, "left" if len(left) < len(right) else "right")
            if count == 2:
                with pytest.raises(RunError, match="2 of 3 have one"):
                    label.train(config)
    rows = read_jsonl(label.train(config)).rows
    assert len(rows) == 3
    assert all(len(row["chosen"]) <= len(row["rejected"]) for row in rows)


def test_no_pairs_is_a_sentence(label_config):
    flat = GivenObjects(reward_funcs=[lambda completions, **_: [1.0] * len(completions)])
    with pytest.raises(RunError, match="There are no pairs: the responses to each prompt score"):
        label.train(label_config(num_steps=1), flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"votes": 5}, "votes asks people, and a judge or a reward is named as well"),
        ({"num_samples": 1}, "num_samples must be at least 2"),
        ({"environment": "guess"}, "Labels are of single responses"),
    ],
)
def test_settings_that_make_no_sense(label_config, change, message):
    with pytest.raises(ValueError, match=message):
        label_config(**change)


def test_votes_retrain_a_reward_and_are_compared_on_the_same_pairs(parents, tmp_path):
    run = tmp_path / "reward"
    run.symlink_to(parents / "reward")
    rows = load_data(TOY, "ppo", needs=("chosen", "rejected")).train[:20]
    file = tmp_path / "votes.jsonl"
    with pytest.raises(ValueError, match="There are no pairs in"):
        retrain(run, file)
    pairs = [(r.prompt, *sorted((r.chosen, r.rejected), key=len)) for r in rows]
    write_jsonl(file, [{"prompt": p, "chosen": x, "rejected": y} for p, x, y in pairs])
    after = retrain(run, file)
    assert after == tmp_path / "reward-voted"
    old, new, change = compare(run, after)
    assert change.mean == pytest.approx(new - old)
    assert change.low < change.mean < change.high or change.low == change.high
    assert compare(run, run)[2].mean == 0
    with pytest.raises(ValueError, match="is no run of `marlhf reward`"):
        retrain(parents / "sft", file)
