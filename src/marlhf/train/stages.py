"""The one table of methods: which settings each takes, and which loop it runs.

A new method is a file with its loop, a file with its config, and one line here; the command line,
recipes, model cards and Python trainers read this table. It loads without torch: a loop is imported
when it is about to run.
"""

from __future__ import annotations

import importlib
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from marlhf.config.stage import StageConfig
from marlhf.train.dpo_config import DPOConfig, LabelConfig, OnlineDPOConfig
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rloo_config import GRPOConfig, RLOOConfig
from marlhf.train.supervised_config import PRMConfig, RewardConfig, SFTConfig

Loop = Callable[..., Path]
"""`train(config, objects)`: trains, or resumes, and returns the folder of the model."""


@dataclass(frozen=True)
class Method:
    """A way to train."""

    config: type[StageConfig]
    loop: Callable[[], Loop]
    """Imports the loop."""
    help: str
    """What `marlhf --help` says about it."""

    def train(self, config: Any, *objects: Any) -> Path:
        """Train by a config, with Python objects where a trainer was given them."""
        loop = self.loop()
        from marlhf.runtime.memory import (
            explain_out_of_memory,  # it imports torch, as the loop does
        )

        with explain_out_of_memory(config):
            return loop(config, *objects)


def _loop(file: str, **options: str) -> Callable[[], Loop]:
    """What imports the loop of a file of this folder, and torch with it."""
    return lambda: partial(importlib.import_module(f"marlhf.train.{file}").train, **options)


METHODS = {
    "sft": Method(SFTConfig, _loop("sft"), "Supervised fine-tuning on chosen responses."),
    "reward": Method(RewardConfig, _loop("reward"), "Train a reward model on pairs of responses."),
    "prm": Method(PRMConfig, _loop("prm"), "Train a process reward model on labelled steps."),
    "ppo": Method(PPOConfig, _loop("ppo"), "PPO over macro actions."),
    "rloo": Method(RLOOConfig, _loop("rloo"), "RLOO: several responses per prompt, no critic."),
    "grpo": Method(
        GRPOConfig,
        _loop("rloo", stage="grpo"),
        "GRPO: responses in units of their group's deviation.",
    ),
    "dpo": Method(
        DPOConfig, _loop("dpo"), "Direct preference optimisation, without a reward model."
    ),
    "online-dpo": Method(
        OnlineDPOConfig, _loop("online_dpo"), "DPO on pairs that the policy samples."
    ),
}
_LABEL = Method(LabelConfig, _loop("label"), "Sample pairs and have them labelled, as data.")
STAGES: Mapping[str, Method] = ChainMap({"label": _LABEL}, METHODS)
"""What a recipe may have: the methods, and what makes data for them."""
