"""What the models say of prompts and responses: log-probs, values, scores.

Axes: B rows, P prompt tokens (padded on the left), R response tokens (padded on the right).
Responses of a batch then begin in the same column, so the language model's head runs on response
positions only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from marlhf.data.collate import pad_left, pad_right


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses side by side. Masks come from lengths: pad may be eos."""

    prompts: Tensor  # [B, P]
    prompt_mask: Tensor  # [B, P] bool
    responses: Tensor  # [B, R]
    mask: Tensor  # [B, R] bool
    prompt_lengths: tuple[int, ...]  # on the host, for cutting micro-batches
    lengths: tuple[int, ...]

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        pad_id: int,
        device: torch.device | str = "cpu",
    ) -> Sequences:
        if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(
                f"Rows {empty} have no prompt, so nothing comes before the first response token. "
                "Begin each prompt with BOS, or with EOS where the tokenizer has no BOS."
            )
        tensors = *pad_left(prompts, pad_id), *pad_right(responses, pad_id)
        left, left_mask, right, mask = (x.to(device, non_blocking=True) for x in tensors)
        lengths = tuple(map(len, prompts)), tuple(map(len, responses))
        return cls(left, left_mask, right, mask, *lengths)

    def rows(self, index: Sequence[int]) -> Sequences:
        """Some of the rows, without the padding that only the others needed."""
        prompt_lengths = tuple(self.prompt_lengths[i] for i in index)
        lengths = tuple(self.lengths[i] for i in index)
        where = torch.tensor(index, device=self.prompts.device)
        left = slice(self.prompts.shape[1] - max(prompt_lengths), None)
        right = slice(0, max(lengths))
        return Sequences(
            self.prompts[where][:, left],
            self.prompt_mask[where][:, left],
            self.responses[where][:, right],
            self.mask[where][:, right],
            prompt_lengths,
            lengths,
        )

    @property
    def total_lengths(self) -> list[int]:
        return [p + r for p, r in zip(self.prompt_lengths, self.lengths)]

    def inputs(self) -> dict[str, Tensor]:
        """What a Hugging Face model takes. Positions count real tokens only."""
        attention = torch.cat((self.prompt_mask, self.mask), dim=1)
        return {
            "input_ids": torch.cat((self.prompts, self.responses), dim=1),
            "attention_mask": attention.long(),
            "position_ids": position_ids(attention),
        }


class TokenStats(NamedTuple):
    logprobs: Tensor  # [B, R]
    entropy: Tensor | None  # [B, R]


def token_stats(
    model: nn.Module, sequences: Sequences, temperature: float = 1.0, *, entropy: bool = False
) -> TokenStats:
    """Log-probs of the response tokens at a temperature, float32: [B, R]. 0 at padding.

    The temperature must be the one sampled at: otherwise the ratio of new to old policy is that
    of two policies that nobody sampled from.
    """
    width = sequences.responses.shape[1]
    keep = {"logits_to_keep": width + 1} if keeps_logits(type(model)) else {}
    logits = model(**sequences.inputs(), use_cache=False, **keep).logits
    logits = logits[:, -width - 1 : -1].float() / temperature  # of the token that comes next
    chosen = logits.gather(2, sequences.responses[:, :, None]).squeeze(2)
    normaliser = logits.logsumexp(dim=2)
    logprobs = torch.where(sequences.mask, chosen - normaliser, 0.0)
    if not entropy:
        return TokenStats(logprobs, None)
    with torch.no_grad():
        spread = normaliser - ((logits - normaliser[:, :, None]).exp() * logits).sum(dim=2)
    return TokenStats(logprobs, torch.where(sequences.mask, spread, 0.0))


def token_values(model: nn.Module, sequences: Sequences) -> Tensor:
    """The value of the state before each response token, float32: [B, R]. 0 at padding."""
    values = _scalar(model, sequences)
    width = sequences.responses.shape[1]
    return torch.where(sequences.mask, values[:, -width - 1 : -1], 0.0)


def final_scores(model: nn.Module, sequences: Sequences) -> Tensor:
    """The scalar at each row's last real token, float32: [B]."""
    values = _scalar(model, sequences)
    last = sequences.prompts.shape[1] - 1 + sequences.mask.sum(dim=1, keepdim=True)
    return values.gather(1, last).squeeze(1)


def position_ids(attention: Tensor) -> Tensor:
    """Positions count real tokens, so that padding on the left moves nothing."""
    return (attention.long().cumsum(dim=1) - 1).clamp(min=0)


def _scalar(model: nn.Module, sequences: Sequences) -> Tensor:
    """The scalar head on every position: [B, P + R]. The language model's head never runs."""
    backbone, head = cast(nn.Module, model.base_model), cast(nn.Module, model.score)
    hidden = backbone(**sequences.inputs(), use_cache=False).last_hidden_state
    return head(hidden).squeeze(2).float()


@cache
def keeps_logits(cls: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(cls.forward).parameters
