"""The settings of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf.config.stage import StageConfig
from marlhf.fields import setting


@dataclass(frozen=True, kw_only=True)
class SFTConfig(StageConfig):
    """Settings of supervised fine-tuning. The paper, Gemma-2B: batch 512, 3 epochs, 5e-5.

    >>> SFTConfig(model="tiny", output_dir="runs/sft", num_steps=100).learning_rate
    5e-05
    """

    learning_rate: float = 5e-5
    """Peak learning rate of AdamW. The paper: 5e-5 for 2B, 2e-5 for 7B, 5e-6 for 27B."""
    max_response_tokens: int = setting(512, above=0)
    """Rows with longer responses are left out: cut short they would teach never to end."""
