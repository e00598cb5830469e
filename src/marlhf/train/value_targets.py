"""Responses with the return of every state, and updates of the critic that regress on them.

The returns are those of lambda 1: rewards that really came, with no value of a critic in them. They
stay right targets when the critic changes, and nearly right ones while the policy changes slowly.

Axes: N stored rows, B rows of an update, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from marlhf.core import Segments, ppo_value_loss
from marlhf.models.sequences import Sequences, send
from marlhf.runtime.optim import Update, apply_updates
from marlhf.train.experience import Experience, count_terms, micro_batches
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models


@dataclass(frozen=True)
class ValueTargets:
    """Rows to regress on, on the host."""

    prompts: list[list[int]]
    responses: list[list[int]]
    mask: Tensor  # [N, T] bool, True on tokens that were sampled
    ids: Tensor  # [N, T] int32, the macro action of each token
    returns: Tensor  # [N, T], of lambda 1

    @classmethod
    def of(
        cls,
        prompts: list[list[int]],
        experience: Experience,
        segments: Segments,
        returns: Tensor,  # [B, T]
    ) -> ValueTargets:
        """Those of a batch."""
        host = [x.cpu() for x in (segments.mask, segments.ids.int(), returns.float())]
        return cls(prompts, experience.response_tokens(), *host)

    @classmethod
    def join(cls, parts: Sequence[ValueTargets]) -> ValueTargets:
        """All rows of several."""
        width = max(part.mask.shape[1] for part in parts)

        def padded(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, width - x.shape[1]))

        return cls(
            list(chain.from_iterable(part.prompts for part in parts)),
            list(chain.from_iterable(part.responses for part in parts)),
            torch.cat([padded(part.mask) for part in parts]),
            torch.cat([padded(part.ids) for part in parts]),
            torch.cat([padded(part.returns) for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: Sequence[int], models: Models) -> tuple[Sequences, Segments, Tensor]:
        """Some rows on the device, without the padding that only the others needed."""
        prompts, responses = [self.prompts[i] for i in index], [self.responses[i] for i in index]
        where, width = torch.tensor(index), max(map(len, responses))
        mask, ids, returns = (x[where, :width] for x in (self.mask, self.ids, self.returns))
        pad, device = models.tokenizer.pad_token_id, models.world.device
        sequences = Sequences.from_lists(prompts, responses, pad, device, sampled=mask)
        segments = Segments(send(ids.long(), device), sequences.mask)
        return sequences, segments, send(returns.contiguous(), device)


def regress(
    targets: ValueTargets,
    index: Sequence[int],
    models: Models,
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    config: PPOConfig,
) -> float:
    """One update of the critic towards the returns of some rows, by squared error: the loss."""
    sequences, segments, returns = targets.rows(index, models)
    counts = count_terms(segments)

    def backward() -> Tensor:
        total = torch.zeros((), device=returns.device)
        for micro in micro_batches(sequences, models.pass_tokens, models.world):
            values, own = models.values(micro.sequences), micro.segments(segments)
            loss = ppo_value_loss(
                values,
                values.detach(),
                micro.take(returns),
                own.mask,
                clip=None,
                level=config.value_level,
                sigma=config.sigma,
                segments=own,
                num_tokens=counts[config.value_level],
            )
            (loss * micro.weight).backward()
            total += loss.detach() * micro.weight
        return total

    loss = models.world.sum(models.fit_memory(backward, models.critic))
    finite = [("the returns", returns), ("the critic's loss", loss)]
    update = Update(models.critic, optimizer, learning_rate)
    apply_updates([update], config.max_grad_norm, models.world, finite)
    return float(loss)
