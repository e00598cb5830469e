"""It learns: each stage moves its own metric well clear of where it began, on three seeds.

The offline task's own recipe with fewer steps. The bounds are far from what a model that learns
nothing would give and leave room for seeds: they are no benchmark.
"""

import pytest

from conftest import read_lines
from marlhf.config import load_recipe
from marlhf.train import ppo, reward, sft

SHORTER = [
    "sft.num_steps=150",
    "reward.num_steps=150",
    "ppo.num_steps=16",
    "ppo.batch_size=48",
    "ppo.eval_every=0",
    "eval_every=0",
    "save_every=0",
    "ppo.keep_best=false",
]


def evals(folder: str) -> tuple[dict, dict]:
    found = [line for line in read_lines(folder) if line["kind"] == "eval"]
    return found[0], found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_stage_learns(tmp_path, seed):
    overrides = [*SHORTER, f"seed={seed}", f"output_dir={tmp_path}"]
    stages = {stage.name: stage.config for stage in load_recipe("toy", overrides)}

    sft.train(stages["sft"])
    start, end = evals(stages["sft"].output_dir)
    assert start["eval/loss"] > 5.5  # about log of the vocabulary
    assert end["eval/loss"] < 1.0

    reward.train(stages["reward"])
    start, end = evals(stages["reward"].output_dir)
    assert start["eval/accuracy"] < 0.65  # 128 pairs: half right, give or take 0.09
    assert end["eval/accuracy"] > 0.67

    for name in ("ppo", "macro-ppo"):
        ppo.train(stages[name])
        start, end = evals(stages[name].output_dir)
        assert abs(start["eval/score"]) < 1e-4  # normalised on these very responses
        assert end["eval/score"] > 0.6  # in deviations of the starting policy's scores
        assert end["eval/win_rate"] > 0.6
        assert end["eval/gold"] > start["eval/gold"] + 0.3  # and people would agree
        assert end["eval/kl"] < 15
