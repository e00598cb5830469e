"""The settings of reward modelling."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf.config.stage import StageConfig
from marlhf.fields import setting


@dataclass(frozen=True, kw_only=True)
class RewardConfig(StageConfig):
    """Settings of the reward model. The paper, Gemma-2B: batch 64, 1 epoch, 1e-5.

    >>> RewardConfig(model="tiny", output_dir="runs/reward").batch_size
    64
    """

    max_response_tokens: int = setting(512, above=0)
    """Pairs with a longer response are left out."""
    center_coef: float = setting(0.0, least=0)
    """Pull scores towards zero, which the loss itself leaves free; 0.01 is usual."""

    columns = ("prompt", "chosen", "rejected")
