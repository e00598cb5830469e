"""Engines that sample responses."""

from marlhf.rollout.settings import Sampling

__all__ = ["Sampling"]
