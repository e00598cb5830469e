"""What the next step of PPO or RLOO depends on besides weights: checkpoints keep it."""

from __future__ import annotations

from typing import Any

import torch

from marlhf.configs.rl import RLConfig
from marlhf.errors import SettingError
from marlhf.train.checkpoint import generator_state, set_generator_state
from marlhf.train.held_out import HeldOutEvaluation
from marlhf.train.loop import Loop


class RLState:
    """Random generators, the weight of the KL penalty, and what evaluations have measured."""

    def __init__(self, config: RLConfig, evaluation: HeldOutEvaluation) -> None:
        self.sampler = torch.Generator().manual_seed(config.seed)  # a seed for each response
        self.shuffler = torch.Generator().manual_seed(config.seed + 1)  # mini-batches, segments
        self.kl = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        self.evaluation = evaluation

    def response_seeds(self, count: int) -> list[int]:
        return torch.randint(2**62, (count,), generator=self.sampler).tolist()

    def resume(self, loop: Loop) -> None:
        """Load the last checkpoint, if there is one."""
        if saved := loop.resume():
            set_generator_state(self.sampler, saved["sampler"])
            set_generator_state(self.shuffler, saved["shuffler"])
            self.kl.coef = saved["kl_coef"]
            self.evaluation.load_state(saved["probe"])

    def to_json(self) -> dict[str, Any]:
        return {
            "sampler": generator_state(self.sampler),
            "shuffler": generator_state(self.shuffler),
            "kl_coef": self.kl.coef,
            "probe": self.evaluation.state(),  # named in checkpoints of version 0.1
        }


class KLController:
    """Raise the coefficient while the KL is above its target, lower it while below.

    Proportional control with the error held to 20% (Ziegler et al., 2019). Without a target the
    coefficient stays.

    >>> controller = KLController(0.1, target=6.0, horizon=100)
    >>> controller.update(kl=12.0, responses=50)
    >>> round(controller.coef, 4)
    0.11
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10000) -> None:
        if target is not None and (target <= 0 or horizon < 1):
            raise SettingError(
                f"kl_target and kl_horizon must be positive; got {target}, {horizon}."
            )
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, responses: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * responses / self.horizon
