"""Python trainers in TRL's manner."""

from marlhf.trainers.methods import (
    DPOTrainer,
    GRPOTrainer,
    MacroPPOTrainer,
    PPOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTTrainer,
)

__all__ = [
    "DPOTrainer",
    "GRPOTrainer",
    "MacroPPOTrainer",
    "PPOTrainer",
    "RLOOTrainer",
    "RewardTrainer",
    "SFTTrainer",
]
