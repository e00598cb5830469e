"""A process reward model: a reward for each step of a response, at the token that ends it.

Axes: B rows, S steps, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from marlhf.data import Row
from marlhf.models.forward import token_scores
from marlhf.models.sequences import Sequences, send
from marlhf.reward.functions import RewardError
from marlhf.reward.model import RewardModel
from marlhf.reward.steps import StepEnds

Pooling = Literal["sum", "min", "last"]
TEMPERATURE = 0.1
"""Of the softmax that stands for the minimum, as in PURE (arXiv 2504.15275)."""


class ProcessModel(RewardModel):
    """Rewards of steps: 2p - 1, where p is the probability that the step is good.

    So a step that is surely wrong costs 1, and one of which the model knows nothing earns nothing.
    Steps are cut from the response by the separator that the model was trained with.

    >>> from marlhf.models.load import load_scalar
    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> model = ProcessModel(load_scalar("tiny"), tokenizer, tokenizer, separator="\\n")
    >>> model([[5, 6]], [tokenizer.encode("1+1=2\\n2+1=3")]).nonzero().tolist()
    [[0, 5], [0, 10]]
    """

    def __init__(self, *given: Any, separator: str, pooling: Pooling = "sum", **options: Any):
        super().__init__(*given, **options)
        self.pooling: Pooling = pooling
        self.ends = StepEnds(self.policy_tokenizer, separator)
        self.own_ends = StepEnds(self.tokenizer, separator) if self.foreign else self.ends

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        rows: Sequence[Row] = (),
    ) -> Tensor:
        """Rewards at the tokens that end steps: [B, T], float32."""
        ends = self.ends(responses)
        logits = self.step_logits(prompts, responses, ends)  # [B, S]
        mask = send(_padded([torch.ones(len(row)) for row in ends]).bool(), logits.device)
        rewards = pool(2 * logits.sigmoid() - 1, mask, self.pooling)
        columns = send(_padded([torch.tensor(row) for row in ends]).long(), logits.device)
        width = max(map(len, responses), default=0)
        return rewards.new_zeros(len(responses), width).scatter_add(1, columns, rewards)

    @torch.no_grad()
    def step_logits(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        ends: Sequence[Sequence[int]],
    ) -> Tensor:
        """The logit that each step is good, 0 where a row has no more steps: [B, S]."""
        if self.foreign:
            prompts, translated = self._translate(prompts, responses)
            eos = cast(int, self.tokenizer.eos_token_id)
            responses = [ids or [eos] for ids in translated]
            own = self.own_ends(responses)
            for row, (theirs, mine) in enumerate(zip(ends, own)):
                if len(theirs) != len(mine):
                    raise RewardError(
                        f"The tokenizer of the process model cuts response {row} into {len(mine)} "
                        f"steps, that of the policy into {len(theirs)}. Train the process model "
                        "from a model with the policy's tokenizer."
                    )
            ends = own
        columns = _padded([torch.tensor(row) for row in ends]).long()
        real = _padded([torch.ones(len(row)) for row in ends])

        def at_ends(sequences: Sequences, index: Sequence[int]) -> Tensor:
            where = send(columns[list(index)], sequences.mask.device)
            return token_scores(self.model, sequences).gather(1, where)

        logits = self._passes(prompts, responses, at_ends, columns.shape[1:])
        return logits * send(real, logits.device)


def pool(rewards: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """What each step earns, of rewards [B, S]; `mask` is True on real steps.

    `min` is PURE's: each reward is weighted by a softmax over the negative rewards of its response,
    so that the return is near the minimum and most of it is earned where that is.

    >>> rewards, mask = torch.tensor([[1.0, -1.0, 1.0]]), torch.ones(1, 3).bool()
    >>> pool(rewards, mask, "min")
    tensor([[ 2.0612e-09, -1.0000e+00,  2.0612e-09]])
    >>> pool(rewards, mask, "last")
    tensor([[0., -0., 1.]])
    """
    if how == "min":
        weights = (-rewards / TEMPERATURE).masked_fill(~mask, -torch.inf).softmax(dim=1)
        return rewards * weights
    if how == "last":
        mask = mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
    return rewards * mask


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)
