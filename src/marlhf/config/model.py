"""Settings of models: precision and LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf.errors import SettingError
from marlhf.fields import check_settings, setting

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class LoRA:
    """Train adapters of low rank instead of the model.

    There is no dropout: PPO compares the log-probs of two passes.

    >>> LoRA(r=8, target_modules=("q_proj", "v_proj")).alpha
    32
    """

    r: int = setting(16, least=1)
    """Rank of the adapters."""
    alpha: float = setting(32, above=0)
    """Their output is scaled by alpha / r."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Which layers have one: `all-linear`, or names such as [q_proj, v_proj]."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead, which suits high ranks."""
    shared_base: bool = False
    """PPO: one base for policy, reference, critic and an adapter-form reward model."""
    quantize: Literal["none", "4bit", "8bit"] = "none"
    """Hold the frozen base in fewer bits, by bitsandbytes (QLoRA)."""
    merge: bool = True
    """Save a plain model with the adapter merged in, and the adapter alone beside it in
    `adapter/`. Otherwise the adapter alone, which needs peft and the base to load."""

    def __post_init__(self) -> None:
        check_settings(self, "lora.")
        if not self.target_modules:
            raise SettingError("lora.target_modules names no layer. Leave it out for all-linear.")
