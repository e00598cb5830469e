"""Engines that sample responses."""

from marlhf.rollout.engine import Engine, Rollout, Sampling, draws
from marlhf.rollout.native import NativeEngine

__all__ = ["Engine", "NativeEngine", "Rollout", "Sampling", "draws"]
