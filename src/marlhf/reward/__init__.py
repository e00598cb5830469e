"""Rewards for responses: reward models, Python functions, and weighted sums of them."""

from marlhf.reward.functions import (
    RewardError,
    RewardFunction,
    Scorer,
    import_function,
    reward_function,
)
from marlhf.reward.model import RewardModel
from marlhf.reward.weighted_sum import Rewards

# fmt: off
__all__ = [
    "RewardError", "RewardFunction", "RewardModel", "Rewards", "Scorer", "import_function",
    "reward_function",
]
# fmt: on
