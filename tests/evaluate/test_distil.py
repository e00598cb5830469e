"""`marlhf distil`: rounds of block decisions and SFT, which resume to the same end."""

import json
from pathlib import Path

import pytest

from marlhf import distil as module
from marlhf.core import NGram
from marlhf.distil import distil
from marlhf.evaluate.blocks import BlockOptions
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
from marlhf.runs.layout import RunError
from marlhf.train import sft

OPTIONS = EvaluationOptions(prompts=12, max_new_tokens=40, train=True, device="cpu")
BLOCKS = BlockOptions(NGram(10), "ngram n=10", (2,))
SFT = """
model: tiny
batch_size: 2
num_steps: 3
learning_rate: 1.0e-3
eval_every: 0
save_every: 1
device: cpu
output_dir: unused
"""


@pytest.fixture(autouse=True)
def _responses_end(monkeypatch):
    """Models of random weights hardly ever end a response: here one token in sixteen does."""
    ends = list(range(1, 512, 16))
    monkeypatch.setattr("marlhf.evaluate.sampling.end_tokens", lambda model, tokenizer: ends)


def run(finished: Path, output: Path, **changes):
    recipe = finished / "sft.yaml"
    recipe.write_text(SFT)
    settings = {"rounds": 2, **changes}
    return distil(finished / "ppo", recipe, output, OPTIONS, BLOCKS, **settings)


def weights(output: Path) -> list[bytes]:
    files = [output / f"round-{n}" / "model" / "model.safetensors" for n in (1, 2)]
    return [file.read_bytes() for file in files]


def test_each_round_learns_from_the_model_before(finished, tmp_path):
    done = run(finished, tmp_path / "out")
    assert [each.folder.name for each in done] == ["round-1", "round-2"]
    assert [each.point.label for each in done] == ["round 1", "round 2"]
    first, second = weights(tmp_path / "out")
    start = (finished / "ppo/model/model.safetensors").read_bytes()
    assert len({start, first, second}) == 3
    config = (tmp_path / "out/round-2/config.yaml").read_text()
    assert "round-1/model" in config
    rows = [json.loads(x) for x in (tmp_path / "out/round-2.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["prompt"] and row["chosen"] for row in rows)
    # The second round samples from the first one's model, into its folder.
    assert list((tmp_path / "out/round-1/blocks").iterdir())


@pytest.mark.parametrize("stop", ["sampling", "training"])
def test_a_stopped_distillation_resumes_to_the_same_models(finished, tmp_path, monkeypatch, stop):
    run(finished, tmp_path / "whole")
    calls = []
    name, real = ("decide_blocks", module.decide_blocks) if stop == "sampling" else ("sft", sft)

    def stopped(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args) if stop == "sampling" else real.train(*args)

    with monkeypatch.context() as patched:
        if stop == "sampling":
            patched.setattr(module, name, stopped)
        else:
            patched.setattr(module, name, type("stopping", (), {"train": staticmethod(stopped)}))
        with pytest.raises(KeyboardInterrupt):
            run(finished, tmp_path / "parts")
    assert not (tmp_path / "parts/round-2/model").exists()
    run(finished, tmp_path / "parts")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_other_settings_in_the_same_folder_are_refused(finished, tmp_path):
    run(finished, tmp_path / "out", rounds=1)
    finer = BlockOptions(NGram(5), "ngram n=5", (2,))
    with pytest.raises(RunError, match=r"round-1\.jsonl has changed"):
        distil(finished / "ppo", finished / "sft.yaml", tmp_path / "out", OPTIONS, finer, rounds=1)


def test_nonsense_is_a_sentence(finished, tmp_path):
    with pytest.raises(EvaluationError, match="--rounds must be at least 1; got 0"):
        run(finished, tmp_path, rounds=0)
    several = BlockOptions(NGram(4), "ngram n=4", (2, 4))
    with pytest.raises(EvaluationError, match="Give one --k to distil"):
        distil(finished / "ppo", "toy-distil", tmp_path, OPTIONS, several)
