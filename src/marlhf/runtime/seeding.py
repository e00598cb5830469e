"""Where a run's random numbers begin, and which kernels may give other bits the next time."""

from __future__ import annotations

import os

import torch
import torch._inductor.config as inductor_config

from marlhf.config.stage import StageConfig


def seed_run(config: StageConfig) -> None:
    """Seed torch; with `deterministic`, keep to kernels that give the same bits every time.

    On a GPU sums are added up in whatever order threads finish: in the backward pass of attention,
    in products that are split up, in scatters. The compiler times several kernels and takes the
    fastest, which may be another one the next day. Both stay off for the rest of the process.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as it starts
        torch.use_deterministic_algorithms(True)
        # Guards against reading what was never written, at three times the cost of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(inductor_config, "deterministic"):  # not before torch 2.9
            inductor_config.deterministic = True
    torch.manual_seed(config.seed)
