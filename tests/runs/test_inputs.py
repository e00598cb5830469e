"""A stage is finished only for the inputs it had, and its folder says what was damaged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from marlhf.data import DataConfig
from marlhf.runs.layout import RunError, input_digests, read_state, weights_digest
from marlhf.runs.read import read_run
from marlhf.runs.write import RunFolder, is_finished
from marlhf.train import reward, sft

LINES = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": " no"} for n in range(20)]
SHORT = {"batch_size": 4, "num_steps": 2, "save_every": 1, "eval_every": 0}


@pytest.fixture
def data(tmp_path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


@pytest.fixture
def config(tmp_path, data):
    rows = DataConfig(path=str(data), parts={}, eval_size=4)
    return sft.SFTConfig(model="tiny", output_dir=str(tmp_path / "sft"), data=rows, **SHORT)


@pytest.fixture
def later(config, tmp_path):
    """A reward model that started from an SFT model; both are finished."""
    sft.train(config)
    start = str(tmp_path / "sft" / "model")
    later = reward.RewardConfig(
        model=start, output_dir=str(tmp_path / "reward"), data=config.data, **SHORT
    )
    reward.train(later)
    assert is_finished(tmp_path / "reward")
    return later


def test_a_stage_whose_model_was_trained_again_is_not_finished(later, config, tmp_path, capsys):
    shutil.rmtree(tmp_path / "sft")
    sft.train(config)  # the same seed gives the same weights: nothing has changed
    assert reward.train(later) == tmp_path / "reward" / "model"
    assert "is finished" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "sft")
    sft.train(replace(config, seed=1))
    assert not is_finished(tmp_path / "reward")
    with pytest.raises(RunError, match=r"finished, but for other inputs.*\n  model: .*has changed"):
        reward.train(later)


def test_a_stage_whose_model_is_gone_is_not_finished(later, tmp_path):
    shutil.rmtree(tmp_path / "sft")
    assert not is_finished(tmp_path / "reward")
    with pytest.raises(RunError, match=r"delete that folder.*\n  model: .*is gone"):
        reward.train(later)


def test_data_edited_between_kill_and_resume_is_refused(config, data, monkeypatch):
    def killed(self, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_model", killed)
        with pytest.raises(KeyboardInterrupt):
            sft.train(config)
    before = data.read_text()
    data.write_text(before.replace("no", "NO"))  # of the same length
    with pytest.raises(RunError, match=r"began with other inputs.*\n  data.path: .*has changed"):
        sft.train(config)
    data.write_text(before)
    sft.train(config)


def test_a_run_without_progress_takes_the_data_there_are(config, data):
    RunFolder(config.output_dir, "sft", config).release()
    data.write_text(data.read_text() + json.dumps(LINES[0] | {"prompt": "one more"}) + "\n")
    sft.train(config)
    assert read_state(Path(config.output_dir))["inputs"] == input_digests({"data.path": str(data)})


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_model_that_is_not_complete_is_saved_again(config, capsys, damage):
    model = sft.train(config)
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[: len(whole) // 2])
    else:
        weights.unlink()
    assert not is_finished(Path(config.output_dir))
    sft.train(config)
    assert "is not complete, so the end of the run is repeated" in _flat(capsys.readouterr().err)
    assert weights.read_bytes() == whole
    assert is_finished(Path(config.output_dir))


def test_lost_or_garbled_metrics_are_said(config, capsys):
    sft.train(config)
    metrics = Path(config.output_dir) / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text("garbage\n" + text)
    capsys.readouterr()
    sft.train(config)
    assert "metrics.jsonl is damaged: what is not JSON is left out (lines 1)" in _flat(
        capsys.readouterr().err
    )
    metrics.unlink()
    sft.train(config)
    assert "metrics.jsonl is missing or empty" in _flat(capsys.readouterr().err)
    assert (
        "metrics.jsonl is missing or empty: there are no curves"
        in read_run(config.output_dir).problems
    )


def test_digests_are_of_contents_not_places(tmp_path, save_model):
    one, two = save_model(tmp_path / "one"), save_model(tmp_path / "two")
    other = save_model(tmp_path / "other", noise=0.1)
    assert weights_digest(one) == weights_digest(two) != weights_digest(other)
    found = input_digests({"model": one, "reward_funcs": [two, "math:sqrt"], "ref_model": None})
    assert found == {"model": weights_digest(one), "reward_funcs.0": weights_digest(one)}


def _flat(text: str) -> str:
    return " ".join(text.split())
