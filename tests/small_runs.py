"""Small training runs for tests: fixtures, and what reads the folders they leave."""

import json
import os
import platform
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from forked import ForkedProcess
from marlhf.config.settings import to_raw
from marlhf.data import DataConfig
from marlhf.models.tiny import tiny_config, tiny_tokenizer
from marlhf.rollout import Sampling
from marlhf.runs.write import RunFolder
from marlhf.train import ppo, reward, sft

TOY = DataConfig(source="toy", limit=300, eval_size=24)


def save_one_layer(folder: Path, seed: int = 0) -> Path:
    """The tiny model with one layer, untrained."""
    torch.manual_seed(seed)
    LlamaForCausalLM(tiny_config(num_hidden_layers=1)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def parents(tmp_path_factory) -> Path:
    """A folder with a barely trained `sft` and `reward` of one layer, for tests of plumbing."""
    root = tmp_path_factory.mktemp("parents")
    common = {"data": TOY, "batch_size": 16, "num_steps": 2, "eval_every": 0, "save_every": 0}
    start = str(save_one_layer(root / "start"))
    model = str(sft.train(sft.SFTConfig(model=start, output_dir=str(root / "sft"), **common)))
    reward.train(reward.RewardConfig(model=model, output_dir=str(root / "reward"), **common))
    return root


def small_ppo(parents: Path, folder: Path, **changes) -> ppo.PPOConfig:
    """A PPO run of a few seconds."""
    settings = {
        "model": str(parents / "sft" / "model"),
        "reward_model": str(parents / "reward" / "model"),
        "output_dir": str(folder),
        "data": TOY,
        "batch_size": 8,
        "num_steps": 3,
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "schedule": "constant",
        "warmup_steps": 0,
        "eval_every": 2,
        "eval_prompts": 6,
        "log_samples": 2,
        "save_every": 1,
        "sampling": Sampling(max_new_tokens=12),
    }
    return ppo.PPOConfig(**{**settings, **changes})


@pytest.fixture
def ppo_config(parents, tmp_path):
    """A PPO run of a few seconds; keywords change it."""

    def make(name: str = "ppo", **changes) -> ppo.PPOConfig:
        return small_ppo(parents, tmp_path / name, **changes)

    return make


@pytest.fixture
def start(fork_server):
    """`start(config)`: the real command line, in a process of its own, or in two ranks."""

    def start(config, kind: str = "ppo", *, ranks: bool = False) -> ForkedProcess:
        recipe = Path(config.output_dir).parent / f"{Path(config.output_dir).name}.yaml"
        recipe.write_text(yaml.safe_dump(to_raw(config)))
        begin = fork_server.start_ranks if ranks else fork_server.start
        return begin("-m", "marlhf", kind, str(recipe))

    return start


def read_lines(folder: Path | str, name: str = "metrics.jsonl") -> list[dict]:
    """What a run logged, without what depends on the clock."""
    lines = [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith("time/") and k != "seconds"}
        for line in lines
    ]


def assert_close(a: list[dict], b: list[dict], tolerance: float) -> None:
    assert [(x["kind"], x["step"]) for x in a] == [(x["kind"], x["step"]) for x in b]
    for left, right in zip(a, b):
        assert left.keys() == right.keys()
        for key in left.keys() - {"kind"}:
            torch.testing.assert_close(
                torch.tensor(float(left[key])),
                torch.tensor(float(right[key])),
                rtol=tolerance,
                atol=tolerance,
                msg=f"{key} at step {left['step']}: {left[key]} against {right[key]}",
            )


def weights(folder: str) -> bytes:
    return (Path(folder) / "model" / "model.safetensors").read_bytes()


def wait_for_step(folder: str, step: int, process: ForkedProcess) -> None:
    path = Path(folder) / "metrics.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if path.is_file() and f'"kind": "train", "step": {step},' in path.read_text():
            return
        time.sleep(0.02)


def everything(folder: str) -> dict[str, list[dict]]:
    return {name: read_lines(folder, name) for name in ("metrics.jsonl", "eval.jsonl")} | {
        "samples": read_lines(folder, "samples.jsonl")
    }


def stop_after(step: int, monkeypatch, module) -> None:
    """Ask for an end after so many steps, as Ctrl-C would."""
    real = RunFolder.log

    def log(self, kind, at, metrics):
        real(self, kind, at, metrics)
        if kind == "train" and at == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunFolder, "log", log)


def assert_alike(ours, theirs):
    """Equal, where products do not depend on the number of rows; else but for rounding."""
    if platform.machine() == "aarch64":
        assert ours == theirs
    assert rounded(ours) == rounded(theirs)


def rounded(x):
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return pytest.approx(x, abs=1e-5) if isinstance(x, float) else x
