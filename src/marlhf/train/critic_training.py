"""What a critic is taught beside PPO's own update: before the first step, and by replay.

The first update of a step is PPO's. Those of replay regress on the returns of lambda 1 of rows that
are drawn from the present batch and from `critic_replay` batches before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marlhf.core import Segments
from marlhf.runtime.checkpoint import decode, encode
from marlhf.runtime.stage import Example
from marlhf.train.critic_pretraining import forget_pretraining, pretrain_critic
from marlhf.train.critic_quality import CriticWatch, explained_by_thirds
from marlhf.train.critic_samples import Returns, Shape, ValueTargets, regress
from marlhf.train.experience import Credit, Experience
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_run import Learner, RLRun


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


class CriticReplay:
    """The last batches, of which a checkpoint keeps `critic_replay`."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.batches: deque[ValueTargets] = deque(maxlen=config.critic_replay + 1)
        """The present batch last."""
        self.checkpointed = {"critic_replay": self} if config.critic_replay else {}

    def learn(
        self,
        step: int,
        examples: Sequence[Example],
        experience: Experience,
        segments: Segments,
        returns: Tensor,
        learner: Learner,
        learning_rate: float,
    ) -> dict[str, Tensor]:
        """Take in a batch, and take the updates of the critic that are left in its step."""
        config = self.config
        passes = config.num_ppo_epochs * config.num_mini_batches
        if not config.extra_critic_updates:
            return {}
        prompts = [e.prompt for e in examples]
        self.batches.append(ValueTargets.of(prompts, experience, segments, returns))
        pool = ValueTargets.join(self.batches)
        size = math.ceil(len(prompts) / config.num_mini_batches)
        losses: list[float] = []
        for update in range(config.extra_critic_updates * passes):
            # By step and update alone, so that a resumed run draws the same rows.
            seed = (config.seed * 1_000_003 + step) * 1_009 + update
            generator = torch.Generator().manual_seed(seed % 2**63)
            rows = torch.randperm(len(pool), generator=generator)[:size].tolist()
            optimizer = learner.optimizers["critic"]
            losses.append(regress(pool, rows, learner.models, optimizer, learning_rate, config))
        return {"rl/replay_loss": torch.tensor(sum(losses) / len(losses))}

    def state(self) -> list[Any]:
        """The batches that the next step learns from again."""
        kept = list(self.batches)[-self.config.critic_replay :]
        return [
            {"prompts": x.prompts, "responses": x.responses}
            | {name: encode(getattr(x, name)) for name in ("mask", "ids", "returns")}
            for x in kept
        ]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        for x in state:
            tensors = (decode(x[name]) for name in ("mask", "ids", "returns"))
            self.batches.append(ValueTargets(x["prompts"], x["responses"], *tensors))
