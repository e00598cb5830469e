"""What a critic is taught beside PPO's own update: before the first step, and by replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from marlhf.runtime.stage import Example
from marlhf.train.credit_choice import CriticWatch
from marlhf.train.critic_pretraining import forget_pretraining, pretrain_critic
from marlhf.train.critic_quality import explained_by_thirds
from marlhf.train.critic_replay import CriticReplay
from marlhf.train.critic_samples import Returns, Shape
from marlhf.train.experience import Credit, Experience
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_run import RLRun


class CriticTraining:
    """Pretraining, replay, and how much the critic explains; nothing without a critic.

    `watch` warns where it misleads.

    `shape` and `returns_of` are PPO's own: token rewards with macro actions, and the returns of
    lambda 1 that a critic regresses on.
    """

    def __init__(self, config: PPOConfig, shape: Shape, returns_of: Returns) -> None:
        self.config, self.shape, self.returns_of = config, shape, returns_of
        self.replay = CriticReplay(config)
        self.watch = CriticWatch(config)

    @property
    def checkpointed(self) -> Mapping[str, Any]:
        return self.replay.checkpointed

    def begin(self, step: int, rl: RLRun) -> None:
        """Pretrain before the first step."""
        if step == 1:
            pretrain_critic(rl, self.config, self.shape, self.returns_of)

    def learn(
        self,
        step: int,
        batch: Sequence[Example],
        experience: Experience,
        credit: Credit,
        config: PPOConfig,
        rl: RLRun,
        learning_rates: Mapping[str, float],
    ) -> dict[str, Tensor]:
        """Take in a batch after PPO's update: metrics of what the critic knew, and its replay.

        `config` has the settings that credited this batch, with `credit: auto` a candidate's.
        """
        if not config.has_critic:
            return {}
        returns = self.returns_of(credit.rewards, credit.segments, config)
        metrics = explained_by_thirds(credit.values, returns, credit.segments.mask)
        rate = learning_rates["critic"]
        return metrics | self.replay.learn(
            step, batch, experience, credit.segments, returns, rl.learner, rate
        )

    def close(self, rl: RLRun) -> None:
        """Once the trained critic is saved, nothing of the pretraining is needed."""
        forget_pretraining(rl)
