"""What the models say of prompts and responses: log-probs, values, scores.

Axes: B rows, W tokens of prompt and response, R response tokens. Rows begin in the first column
and are padded on the right. Under causal attention no real token ever sees that padding, so no
mask is needed: attention takes its fastest path, and there are no rows without anything to attend
to, whose gradients some GPU kernels get wrong.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from marlhf.data.collate import pad_right


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses. Masks come from lengths: pad may be eos."""

    ids: Tensor  # [B, W]
    responses: Tensor  # [B, R]
    mask: Tensor  # [B, R] bool
    before: Tensor  # [B, R], the column of the token before each response token
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
        ids, _ = pad_right([[*p, *r] for p, r in zip(prompts, responses)], pad_id)
        right, mask = pad_right(responses, pad_id)
        first = torch.tensor([len(p) - 1 for p in prompts], dtype=torch.int64)
        before = torch.where(mask, first[:, None] + torch.arange(mask.shape[1]), 0)
        tensors = (ids, right, mask, before)
        ids, right, mask, before = (x.to(device, non_blocking=True) for x in tensors)
        lengths = tuple(map(len, prompts)), tuple(map(len, responses))
        return cls(ids, right, mask, before, *lengths)

    def rows(self, index: Sequence[int]) -> Sequences:
        """Some of the rows, without the padding that only the others needed."""
        prompt_lengths = tuple(self.prompt_lengths[i] for i in index)
        lengths = tuple(self.lengths[i] for i in index)
        where = torch.tensor(index, device=self.ids.device)
        whole = max(p + r for p, r in zip(prompt_lengths, lengths))
        width = max(lengths)
        return Sequences(
            self.ids[where, :whole],
            self.responses[where, :width],
            self.mask[where, :width],
            self.before[where, :width],
            prompt_lengths,
            lengths,
        )

    @property
    def total_lengths(self) -> list[int]:
        return [p + r for p, r in zip(self.prompt_lengths, self.lengths)]


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
    with _head_at(model, sequences.before):
        logits = model(input_ids=sequences.ids, use_cache=False).logits  # [B, R, V]
    logits = logits.float() / temperature
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
    return torch.where(sequences.mask, _scalar(model, sequences.ids, sequences.before), 0.0)


def final_scores(model: nn.Module, sequences: Sequences) -> Tensor:
    """The scalar at each row's last real token, float32: [B]."""
    prompts = torch.tensor(sequences.prompt_lengths, device=sequences.ids.device)
    last = prompts + sequences.mask.sum(dim=1) - 1
    return _scalar(model, sequences.ids, last[:, None]).squeeze(1)


def position_ids(attention: Tensor) -> Tensor:
    """Positions that count real tokens, so that padding on the left moves nothing."""
    return (attention.long().cumsum(dim=1) - 1).clamp(min=0)


@contextlib.contextmanager
def _head_at(model: nn.Module, columns: Tensor) -> Iterator[None]:
    """Let the language model's head see only some columns of each row, [B, R].

    The head is most of the arithmetic of a small model and most of its memory. Going through the
    model's own forward keeps whatever it does to logits afterwards, such as soft caps.
    """

    def pick(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_at(args[0], columns), *args[1:])

    head = cast(Any, model).get_output_embeddings()
    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def _scalar(model: nn.Module, ids: Tensor, columns: Tensor) -> Tensor:
    """The scalar head at some columns of each row, in float32 even under autocast: [B, R]."""
    backbone, head = cast(nn.Module, model.base_model), cast(nn.Module, model.score)
    hidden = _at(backbone(input_ids=ids, use_cache=False).last_hidden_state, columns)
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.float()).squeeze(2)


def _at(hidden: Tensor, columns: Tensor) -> Tensor:
    """[B, W, H] at columns [B, R]: [B, R, H]."""
    return hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2]))


@cache
def keeps_logits(cls: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(cls.forward).parameters
