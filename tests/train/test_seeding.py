"""Runs that repeat: the same seed gives the same numbers, with `deterministic` to the bit."""

import subprocess
import sys

import pytest
import torch

from conftest import read_lines
from marlhf.train import ppo
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.seeding import seed_run

SEEDED = """
import os, torch, torch._inductor.config as inductor
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.seeding import seed_run
seed_run(PPOConfig(model="x", reward_model="x", output_dir="x", deterministic={deterministic}))
print(
    torch.are_deterministic_algorithms_enabled(),
    "CUBLAS_WORKSPACE_CONFIG" in os.environ,
    getattr(inductor, "deterministic", {deterministic}),
)
"""


@pytest.mark.parametrize("deterministic", [True, False])
def test_only_deterministic_runs_restrict_the_kernels(deterministic):
    code = SEEDED.format(deterministic=deterministic)
    words = [sys.executable, "-c", code]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [str(deterministic)] * 3


def test_the_seed_decides_what_is_drawn():
    def draw(seed: int) -> float:
        seed_run(PPOConfig(model="x", reward_model="x", output_dir="x", seed=seed))
        return torch.rand(()).item()

    assert draw(3) == draw(3) != draw(4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", [{}, {"compile": False}, {"packed": True}])
def test_two_runs_on_a_gpu_are_the_same_to_the_bit(ppo_config, change, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = {"device": "cuda", "precision": "bfloat16", "deterministic": True} | change
    try:
        first, second = (ppo_config(name, **settings) for name in ("first", "second"))
        ppo.train(first)
        ppo.train(second)
    finally:
        torch.use_deterministic_algorithms(False)
    assert read_lines(first.output_dir) == read_lines(second.output_dir)
