"""The settings of reward modelling."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf.config.stage import StageConfig
from marlhf.errors import SettingError
from marlhf.fields import setting


@dataclass(frozen=True, kw_only=True)
class RewardConfig(StageConfig):
    """Settings of the reward model. The paper, Gemma-2B: batch 64, 1 epoch, 1e-5.

    >>> RewardConfig(model="tiny", output_dir="runs/reward").batch_size
    64
    """

    max_response_tokens: int = setting(512, above=0)
    """Pairs with a longer response are left out."""
    center_coef: float | None = setting(None, least=0)
    """Pull scores towards zero, which the loss itself leaves free. 0.01 is usual, and set where
    there are several `members`, whose scores are comparable only so; otherwise 0."""
    label_smoothing: float = setting(0.0, least=0)
    """Share of pairs believed to be labelled the wrong way round."""
    members: int = setting(1, least=1, on_card=True)
    """Members of an ensemble, each trained on pairs drawn anew with replacement: heads, or with
    `lora` an adapter and a head each. Where they disagree, the reward is a guess: see
    `reward_combine`."""
    length_head: bool = setting(False, on_card=True)
    """A second head takes up what length explains (ODIN), and is dropped after training."""

    columns = ("prompt", "chosen", "rejected")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing >= 0.5:
            raise SettingError(
                "label_smoothing must be below 0.5, where pairs would teach nothing; "
                f"got {self.label_smoothing}."
            )
        if self.length_head and self.members > 1:
            raise SettingError(
                "length_head trains one reward head, and members several. Leave out one of them."
            )
        if self.length_head and self.parallel == "fsdp":
            raise SettingError(
                "length_head compares its two heads, which parallel: fsdp shards. Set parallel: "
                "data, with lora where memory is short."
            )
        if self.members > 1 and self.lora is not None and self.lora.merge:
            raise SettingError(
                "With lora each of the members has an adapter, and one model cannot have them all "
                "merged in. Set lora.merge: false."
            )

    @property
    def centering(self) -> float:
        """`center_coef`, or what it is where none is set."""
        if self.center_coef is not None:
            return self.center_coef
        return 0.01 if self.members > 1 else 0.0
