"""A process reward model: a reward for each step of a response, at the token that ends it.

Steps are parts of a text between separators.

Axes: B rows, S steps, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from marlhf.data import Row
from marlhf.data.collate import TokenRows
from marlhf.models.forward import token_scores
from marlhf.models.sequences import Sequences, send
from marlhf.reward.functions import RewardError
from marlhf.reward.model import RewardModel
from marlhf.spans.align import TokenBytes

Pooling = Literal["sum", "min", "last"]
TEMPERATURE = 0.1
"""Of the softmax that stands for the minimum, as in PURE (arXiv 2504.15275)."""


def cut_steps(text: str, separator: str) -> list[str]:
    """The steps of a text, without separators; blank ones belong to the step before.

    >>> cut_steps("2 + 2 = 4\\n\\nSo 4.\\n", "\\n")
    ['2 + 2 = 4', 'So 4.']
    """
    return [step for step in text.split(separator) if step.strip()]


class StepEnds:
    """The token at which each step of a response ends, the separator after it included.

    Where a token holds the end of the separator and the beginning of the next step, as ` So` does
    after `. `, the step ends before it. The last step ends at the last token, with or without a
    separator or an end token before it. So every response has a step, and one without separators is
    a single step.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> ends = StepEnds(tokenizer, "\\n")
    >>> ends([[*tokenizer.encode("1+1=2\\n2+1=3"), tokenizer.eos_token_id]])
    [[5, 11]]
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
        self.separator = separator.encode()
        self.bytes = TokenBytes.of(tokenizer).table

    def __call__(self, responses: TokenRows) -> list[list[int]]:
        return [self._ends(response) for response in responses]

    def _ends(self, response: Sequence[int]) -> list[int]:
        known = len(self.bytes)  # a model may embed more tokens than its tokenizer has
        pieces = [self.bytes[i] if i < known else b"" for i in response]
        steps, width = b"".join(pieces).split(self.separator), len(self.separator)
        # In bytes, up to the end of each step's separator.
        ends = accumulate(len(step) + width for step in steps)
        full = [end for end, step in zip(ends, steps) if step.decode(errors="replace").strip()]
        if not response:
            return []
        written = np.array([0, *accumulate(map(len, pieces))])  # before each token, and at the end
        full = np.array(full[:-1], dtype=np.int64)
        before = written[np.searchsorted(written, full, side="right") - 1]
        whole = np.where(before >= full - width, before, full)  # else a token has both steps
        return [*(np.searchsorted(written, whole) - 1).tolist(), len(response) - 1]


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
        self, prompts: TokenRows, responses: TokenRows, rows: Sequence[Row] = ()
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
    def step_logits(self, prompts: TokenRows, responses: TokenRows, ends: TokenRows) -> Tensor:
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
        return torch.where(mask, rewards * weights, 0.0)  # a row without steps has no minimum
    if how == "last":
        mask = mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
    return rewards * mask


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)
