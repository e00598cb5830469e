"""VAPO's loss on positive examples: correct responses are imitated as well (arXiv 2504.05118).

Axes: B rows, b rows of a micro-batch, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf.core import sft_loss
from marlhf.models.sequences import send
from marlhf.train.experience import Experience, MicroBatch
from marlhf.train.ppo_config import PPOConfig


@dataclass(frozen=True)
class PositiveExamples:
    """The tokens of the responses that scored well, of the rows of one update."""

    mask: Tensor  # [B, T] bool
    num_tokens: Tensor  # [], of those rows
    coef: float

    @classmethod
    def of(
        cls, experience: Experience, rows: list[int], config: PPOConfig
    ) -> PositiveExamples | None:
        if not config.positive_lm_coef:
            return None
        mask = experience.mask & (experience.raw_scores > config.positive_score)[:, None]
        num_tokens = mask[send(torch.tensor(rows), mask.device)].sum().clamp(min=1)
        return cls(mask, num_tokens, config.positive_lm_coef)

    def loss(self, logprobs: Tensor, micro: MicroBatch) -> Tensor:
        """The part of a micro-batch in the mean negative log-likelihood of all of them."""
        return self.coef * sft_loss(logprobs, micro.take(self.mask), num_tokens=self.num_tokens)
