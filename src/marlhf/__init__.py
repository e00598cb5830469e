"""Reinforcement learning from human feedback with macro actions, for Hugging Face models.

>>> from marlhf import MacroPPOTrainer, NGram, PPOConfig
>>> def brevity(completions, **columns):
...     return [-len(completion) / 100 for completion in completions]
>>> args = PPOConfig(output_dir="runs/mine", kl_coef=0.02)
>>> trainer = MacroPPOTrainer(model="tiny", reward_funcs=brevity, segmenter=NGram(5), args=args)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from marlhf._version import __version__

_WHERE = {
    "marlhf.trainers": (
        *("DPOTrainer", "GRPOTrainer", "MacroPPOTrainer", "PPOTrainer", "RLOOTrainer"),
        *("OnlineDPOTrainer", "PRMTrainer", "RewardTrainer", "SFTTrainer"),
    ),
    "marlhf.train.supervised_config": ("PRMConfig", "RewardConfig", "SFTConfig"),
    "marlhf.train.ppo_config": ("PPOConfig",),
    "marlhf.train.rloo_config": ("GRPOConfig", "RLOOConfig"),
    "marlhf.train.dpo_config": ("DPOConfig", "OnlineDPOConfig"),
    "marlhf.config.rl": ("Guards",),
    "marlhf.data": ("DataConfig",),
    "marlhf.rollout": ("Sampling",),
    "marlhf.config.stage": ("LoRA",),
    "marlhf.core": (
        *("Constituents", "Lines", "NGram", "Perplexity", "RandomNGram", "Responses", "Segments"),
        *("Sentences", "Words"),
    ),
    "marlhf.report.write": ("write_report",),
}
"""What `from marlhf import ...` finds, and where: torch loads only once something is asked for."""
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from marlhf.config.rl import Guards
    from marlhf.config.stage import LoRA
    from marlhf.core import (
        Constituents,
        Lines,
        NGram,
        Perplexity,
        RandomNGram,
        Responses,
        Segments,
        Sentences,
        Words,
    )
    from marlhf.data import DataConfig
    from marlhf.report.write import write_report
    from marlhf.rollout import Sampling
    from marlhf.train.dpo_config import DPOConfig, OnlineDPOConfig
    from marlhf.train.ppo_config import PPOConfig
    from marlhf.train.rloo_config import GRPOConfig, RLOOConfig
    from marlhf.train.supervised_config import PRMConfig, RewardConfig, SFTConfig
    from marlhf.trainers import (
        DPOTrainer,
        GRPOTrainer,
        MacroPPOTrainer,
        OnlineDPOTrainer,
        PPOTrainer,
        PRMTrainer,
        RewardTrainer,
        RLOOTrainer,
        SFTTrainer,
    )


def __getattr__(name: str) -> Any:
    if name.endswith("Trainer"):  # also that of a method which is only in the table of methods
        return getattr(importlib.import_module("marlhf.trainers"), name)
    if name not in _HOME:
        raise AttributeError(f"module 'marlhf' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
