"""It learns: each stage moves its own metric well clear of where it began, on three seeds.

The offline task's own recipes with fewer steps. The bounds are far from what a model that learns
nothing would give and leave room for seeds: they are no benchmark.
"""

import pytest

from conftest import read_lines
from marlhf.config import load_recipe
from marlhf.data.encode import decode
from marlhf.data.toy import gold_score
from marlhf.models.load import end_tokens, load_policy, load_tokenizer
from marlhf.rollout import NativeEngine, Sampling
from marlhf.train import dpo, ppo, reward, rloo, sft
from marlhf.train.stage import load_examples

pytestmark = pytest.mark.slow
SHORTER = [
    "sft.num_steps=150",
    "reward.num_steps=150",
    "ppo.num_steps=16",
    "ppo.batch_size=48",
    "rloo.num_steps=16",
    "rloo.batch_size=12",
    "dpo.num_steps=60",
    "eval_every=0",
    "save_every=0",
    "keep_best=false",
]


# A seed's tests go to one process, where tests run on several: they share its models.
SEEDS = [pytest.param(n, marks=pytest.mark.xdist_group(f"seed {n}")) for n in range(3)]


@pytest.fixture(scope="module", params=SEEDS, ids="seed {}".format)
def stages(request, tmp_path_factory):
    """The recipe's stages of one seed, SFT and reward model trained."""
    root = tmp_path_factory.mktemp(f"seed-{request.param}")
    overrides = [*SHORTER, f"seed={request.param}", f"output_dir={root}"]
    found = {stage.name: stage.config for stage in load_recipe("toy-baselines", overrides)}
    sft.train(found["sft"])
    reward.train(found["reward"])
    return found


def evals(folder: str) -> tuple[dict, dict]:
    found = [line for line in read_lines(folder) if line["kind"] == "eval"]
    return found[0], found[-1]


def test_sft_and_reward_learn(stages):
    start, end = evals(stages["sft"].output_dir)
    assert start["eval/loss"] > 5.5  # about log of the vocabulary
    assert end["eval/loss"] < 1.0
    start, end = evals(stages["reward"].output_dir)
    assert start["eval/accuracy"] < 0.65  # 128 pairs: half right, give or take 0.09
    assert end["eval/accuracy"] > 0.67


@pytest.mark.parametrize("name", ["ppo", "macro-ppo"])
def test_ppo_learns(stages, name):
    ppo.train(stages[name])
    start, end = evals(stages[name].output_dir)
    assert abs(start["eval/score"]) < 1e-4  # normalised on these very responses
    assert end["eval/score"] > 0.6  # in deviations of the starting policy's scores
    assert end["eval/win_rate"] > 0.6
    assert end["eval/gold"] > start["eval/gold"] + 0.3  # and people would agree
    assert end["eval/kl"] < 15


@pytest.mark.parametrize("name", ["rloo", "macro-rloo", "grpo"])
def test_methods_without_a_critic_learn(stages, name):
    rloo.train(stages[name])
    start, end = evals(stages[name].output_dir)
    assert abs(start["eval/score"]) < 1e-4
    assert end["eval/score"] > 0.4
    assert end["eval/win_rate"] > 0.57
    assert end["eval/gold"] > start["eval/gold"] + 0.1
    assert end["eval/kl"] < 15


def test_dpo_learns(stages):
    """Not only to tell the pairs apart: it writes what people prefer."""
    dpo.train(stages["dpo"])
    start, end = evals(stages["dpo"].output_dir)
    assert start["eval/accuracy"] == 0.5
    assert end["eval/margin"] > 0.03
    assert end["eval/loss"] < start["eval/loss"] - 0.005
    assert gold(stages["dpo"]) > gold(stages["sft"]) + 0.3


def gold(config: sft.SFTConfig | dpo.DPOConfig) -> float:
    """Mean true score of what a run's model writes to held-out prompts."""
    tokenizer, model = load_tokenizer("tiny"), load_policy(f"{config.output_dir}/model")
    needs = ("prompt", "chosen", "rejected")
    rows = load_examples(config, "reward", tokenizer, needs=needs)[1][:64]
    engine = NativeEngine(model, end_tokens(model, tokenizer), tokenizer.pad_token_id)
    sampling = Sampling(max_new_tokens=96)
    rollout = engine.generate([e.prompt for e in rows], sampling, range(len(rows)))
    texts = [decode(tokenizer, response) for response in rollout.responses]
    return sum(gold_score(str(e.row.prompt), t) for e, t in zip(rows, texts)) / len(rows)
