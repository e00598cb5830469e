"""The settings of direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf.config.stage import StageConfig
from marlhf.errors import SettingError
from marlhf.fields import setting


@dataclass(frozen=True, kw_only=True)
class DPOConfig(StageConfig):
    """Settings of direct preference optimisation. The paper: rate 2e-7, beta 0.1; HH 0.01.

    >>> DPOConfig(model="tiny", output_dir="runs/dpo", beta=0.05).learning_rate
    2e-07
    """

    ref_model: str | None = None
    """What the policy is tied to; where it started unless given."""
    beta: float = setting(0.1, above=0, on_card=True)
    """How closely: higher stays nearer to the reference. The paper: 0.1 TL;DR, 0.01 HH."""
    label_smoothing: float = 0.0
    """Share of pairs believed to be labelled the wrong way round."""
    learning_rate: float = 2e-7
    """Peak learning rate of AdamW. The paper: 2e-7."""
    max_response_tokens: int = setting(512, above=0)
    """Pairs with a longer response are left out."""
    part: Literal["reward", "ppo"] = "reward"
    """Which part of the data: the reward model's pairs, or those of PPO's prompts (the paper)."""

    columns = ("prompt", "chosen", "rejected")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise SettingError(
                "label_smoothing must be at least 0 and below 0.5, where pairs would teach "
                f"nothing; got {self.label_smoothing}."
            )
