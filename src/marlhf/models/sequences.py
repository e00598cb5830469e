"""Prompts with their responses as tensors, as forward passes take them.

Axes: B rows, W tokens of prompt and response, R response tokens, N response tokens without padding.
Rows begin in the first column and are padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from marlhf.data.collate import pad_flat
from marlhf.errors import SettingError


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses. Masks come from lengths: pad may be eos.

    Where a response is a conversation, `mask` has holes: what the world said is read by every pass,
    but nobody sampled it, so it has no log-prob and no value.
    """

    ids: Tensor  # [B, W]
    responses: Tensor  # [B, R]
    mask: Tensor  # [B, R] bool, True on tokens that were sampled
    present: Tensor  # [B, R] bool, True on all tokens of a response; `mask` itself without holes
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
        sampled: Tensor | None = None,
    ) -> Sequences:
        """`sampled`, [B, R] bool, is False on the tokens of a response that came from elsewhere."""
        if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
            raise SettingError(
                f"Rows {empty} have no prompt, so nothing comes before the first response token. "
                "Begin each prompt with BOS, or with EOS where the tokenizer has no BOS."
            )
        lengths = tuple(map(len, prompts)), tuple(map(len, responses))
        # Not joined row by row first: the host copies each token once.
        pieces = chain.from_iterable(zip(prompts, responses))
        ids, _ = pad_flat(pieces, [p + r for p, r in zip(*lengths)], pad_id)
        # In numpy: torch would wake a pool of threads for a few thousand numbers.
        first, count = (np.array(x, dtype=np.int64)[:, None] for x in lengths)
        place = np.arange(max(lengths[1], default=0))
        mask = place < count
        before = np.where(mask, first - 1 + place, 0)
        right = np.take_along_axis(ids, np.where(mask, first + place, 0), axis=1)
        arrays = (ids, np.where(mask, right, pad_id), mask, before)
        ids, right, present, before = (send(torch.from_numpy(x), device) for x in arrays)
        mask = present if sampled is None else present & sampled[:, : present.shape[1]].to(device)
        return cls(ids, right, mask, present, before, *lengths)

    def rows(self, index: Sequence[int]) -> Sequences:
        """Some of the rows, without the padding that only the others needed."""
        prompt_lengths = tuple(self.prompt_lengths[i] for i in index)
        lengths = tuple(self.lengths[i] for i in index)
        where = send(torch.tensor(index), self.ids.device)
        whole = max(p + r for p, r in zip(prompt_lengths, lengths))
        width = max(lengths)
        present = self.present[where, :width]
        return Sequences(
            self.ids[where, :whole],
            self.responses[where, :width],
            present if self.mask is self.present else self.mask[where, :width],
            present,
            self.before[where, :width],
            prompt_lengths,
            lengths,
        )

    @property
    def total_lengths(self) -> list[int]:
        return [p + r for p, r in zip(self.prompt_lengths, self.lengths)]

    def before_responses(self) -> list[tuple[int, int]]:
        """The tokens before the response tokens of each row, as (first column, count)."""
        return [(p - 1, r) for p, r in zip(self.prompt_lengths, self.lengths)]

    def last_tokens(self) -> list[tuple[int, int]]:
        """The last token of each row, as (column, 1)."""
        return [(length - 1, 1) for length in self.total_lengths]

    def real_tokens(self) -> Tensor:
        """Flat indices of the response tokens that are not padding, [N]."""
        # As nonzero(), but the size comes from the host, so nothing waits for the device.
        mask, count = self.present.flatten(), sum(self.lengths)
        place = torch.where(mask, mask.cumsum(dim=0) - 1, count)  # padding: to a last, extra place
        index = place.new_empty(count + 1)
        return index.scatter_(0, place, torch.arange(len(mask), device=mask.device))[:count]

    def spread(self, flat: Tensor) -> Tensor:
        """A number for each response token, row after row, [N], as [B, R] with 0 where masked."""
        whole = torch.zeros(self.mask.numel(), device=flat.device)
        spread = whole.index_copy(0, self.real_tokens(), flat.float()).view_as(self.mask)
        return spread if self.mask is self.present else torch.where(self.mask, spread, 0.0)


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device without waiting for the device.

    A copy from pageable memory waits until everything launched before it is done, and the device
    then idles until the host launches the next pass. A copy from pinned memory does not wait.
    """
    if torch.device(device).type != "cuda":
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    pinned.numpy()[...] = x.numpy()  # `pin_memory()` would wake a pool of threads for it
    return pinned.to(device, non_blocking=True)


def receive(*tensors: Tensor) -> list[np.ndarray]:
    """Copy tensors from their device to the host, waiting for it once."""
    if not tensors[0].is_cuda:
        return [x.cpu().numpy() for x in tensors]
    pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
    for target, x in zip(pinned, tensors):
        target.copy_(x, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [x.numpy() for x in pinned]
