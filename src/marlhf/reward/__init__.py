"""What scores a response: reward models, and later functions and programs."""

from marlhf.reward.model import RewardModel

__all__ = ["RewardModel"]
