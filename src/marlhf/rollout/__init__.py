"""Engines that sample responses."""

from marlhf.configs.sampling import Sampling

__all__ = ["Sampling"]
