"""Engines that sample responses."""

from marlhf.config.sampling import Sampling

__all__ = ["Sampling"]
