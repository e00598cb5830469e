"""Runs that repeat: the same seed gives the same numbers, with `deterministic` to the bit."""

import pytest
import torch

from marlhf.runtime.stage import seed_run
from marlhf.train import ppo
from small_runs import read_lines

SEEDED = """
import os, torch, torch._inductor.config as inductor
from marlhf.runtime.stage import seed_run
seed_run(0, {deterministic})
print(
    torch.are_deterministic_algorithms_enabled(),
    "CUBLAS_WORKSPACE_CONFIG" in os.environ,
    getattr(inductor, "deterministic", {deterministic}),
)
"""


@pytest.mark.xdist_group("forked")
@pytest.mark.parametrize("deterministic", [True, False])
def test_only_deterministic_runs_restrict_the_kernels(deterministic, tmp_path, fork_server):
    script = tmp_path / "seeded.py"
    script.write_text(SEEDED.format(deterministic=deterministic))
    process = fork_server.start(str(script))
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert printed.split() == [str(deterministic)] * 3


def test_the_seed_decides_what_is_drawn():
    def draw(seed: int) -> float:
        seed_run(seed)
        return torch.rand(()).item()

    assert draw(3) == draw(3) != draw(4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", [{}, {"compile": False}])
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
