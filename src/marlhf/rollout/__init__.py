"""Engines that sample responses."""

from marlhf.config.stage import Sampling

__all__ = ["Sampling"]
