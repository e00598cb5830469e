"""Reinforcement learning from human feedback with macro actions, for Hugging Face models."""

__version__ = "0.1.0"
