"""It learns: each stage moves its own metric well clear of where it began, on three seeds.

The offline task's own recipes with fewer steps, half the rows and a layer less: half the time, and
every stage learns as much. The bounds are far from what a model that learns nothing would give and
leave room for seeds: they are no benchmark.
"""

from collections.abc import Callable
from typing import Any

import pytest

from marlhf.data import Row, fit_prompts, load_data
from marlhf.data.encode import decode
from marlhf.data.toy import gold_score
from marlhf.models.load import end_tokens, load_policy, load_tokenizer
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine
from marlhf.train import dpo, ppo, reward, rloo, sft
from marlhf.train.recipe import load_recipe
from small_runs import read_lines, save_one_layer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
SEEDS = [
    pytest.param(seed, id=f"seed{seed}", marks=pytest.mark.xdist_group(f"learning {seed}"))
    for seed in (0, 1, 2)
]
"""All that starts from one SFT and reward model runs in one process, where these are trained."""
SHORTER = [
    "data.limit=4096",
    "sft.num_steps=150",
    "reward.num_steps=200",  # a weaker one is gamed within these few steps, on some seeds
    "ppo.num_steps=12",
    "ppo.batch_size=48",
    "rloo.num_steps=12",
    "rloo.batch_size=12",
    "dpo.num_steps=40",
    "eval_prompts=128",  # true scores have a deviation of one: 64 would leave much to chance
    "eval_every=0",
    "save_every=0",
    "keep_best=false",
]


def evals(folder: str) -> tuple[dict, dict]:
    found = [line for line in read_lines(folder) if line["kind"] == "eval"]
    return found[0], found[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[int], dict[str, Any]]:
    """A recipe's stages by seed, with the SFT and reward model that the others start from."""
    done: dict[int, dict[str, Any]] = {}

    def train(seed: int) -> dict[str, Any]:
        if seed not in done:
            folder = tmp_path_factory.mktemp(f"seed-{seed}")
            start = save_one_layer(folder / "start", seed)
            overrides = [*SHORTER, f"sft.model={start}", f"seed={seed}", f"output_dir={folder}"]
            stages = {stage.name: stage.config for stage in load_recipe("toy-baselines", overrides)}
            sft.train(stages["sft"])
            reward.train(stages["reward"])
            done[seed] = stages
        return done[seed]

    return train


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_and_reward_model_learn(seed, trained):
    stages = trained(seed)
    start, end = evals(stages["sft"].output_dir)
    assert start["eval/loss"] > 5.5  # about log of the vocabulary
    assert end["eval/loss"] < 1.0
    start, end = evals(stages["reward"].output_dir)
    assert start["eval/accuracy"] < 0.65  # 128 pairs: half right, give or take 0.09
    assert end["eval/accuracy"] > 0.67


@pytest.mark.parametrize("name", ["ppo", "macro-ppo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_learns(seed, name, trained):
    config = trained(seed)[name]
    ppo.train(config)
    start, end = evals(config.output_dir)
    assert abs(start["eval/score"]) < 1e-4  # normalised on these very responses
    assert end["eval/score"] > 0.6  # in deviations of the starting policy's scores
    assert end["eval/win_rate"] > 0.6
    assert end["eval/gold"] > start["eval/gold"] + 0.3  # and people would agree
    assert end["eval/kl"] < 15


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        *(
            pytest.param(*seed.values, "rloo", marks=seed.marks, id=f"{seed.id}-rloo")
            for seed in SEEDS
        ),
        *(pytest.param(0, name, marks=SEEDS[0].marks) for name in ("macro-rloo", "grpo")),
    ],
)
def test_methods_without_a_critic_learn(seed, name, trained):
    config = trained(seed)[name]
    rloo.train(config)
    start, end = evals(config.output_dir)
    assert abs(start["eval/score"]) < 1e-4
    assert end["eval/score"] > 0.4
    assert end["eval/win_rate"] > 0.57
    assert end["eval/gold"] > start["eval/gold"] + 0.1
    assert end["eval/kl"] < 15


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_learns(seed, trained):
    """Not only to tell the pairs apart: it writes what people prefer."""
    stages = trained(seed)
    dpo.train(stages["dpo"])
    start, end = evals(stages["dpo"].output_dir)
    assert start["eval/accuracy"] == 0.5
    assert end["eval/margin"] > 0.03
    assert end["eval/loss"] < start["eval/loss"] - 0.005
    rows = load_data(stages["dpo"].data, "reward").eval[:64]
    assert gold(stages["dpo"], rows) > gold(stages["sft"], rows) + 0.3


def gold(config: sft.SFTConfig | dpo.DPOConfig, rows: list[Row]) -> float:
    """Mean true score of what a run's model writes to held-out prompts."""
    tokenizer, model = load_tokenizer("tiny"), load_policy(f"{config.output_dir}/model")
    engine = NativeEngine(model, end_tokens(model, tokenizer), tokenizer.pad_token_id)
    sampling = Sampling(max_new_tokens=96)
    prompts = [encoded.prompt_ids for encoded in fit_prompts(rows, tokenizer, 512)[0]]
    rollout = engine.generate(prompts, sampling, range(len(rows)))
    texts = [decode(tokenizer, response) for response in rollout.responses]
    return sum(gold_score(str(row.prompt), t) for row, t in zip(rows, texts)) / len(rows)
