"""Engines that sample responses."""

from marlhf.config.model import Sampling

__all__ = ["Sampling"]
