"""Lists of token ids as padded tensors, and rows as batches of bounded size.

Axes: B rows, P padded length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from marlhf.errors import MarlhfError, SettingError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
TokenRows = Sequence[Sequence[int]]
"""Token ids of some rows: of their prompts, or of their responses."""


def pad_left(rows: TokenRows, pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, both [B, P], padded on the left, as generation needs it.

    The mask comes from lengths and not from ids, since pad is often EOS.

    >>> ids, mask = pad_left([[5, 6, 7], [8]], pad_id=0)
    >>> ids.tolist()
    [[5, 6, 7], [0, 0, 8]]
    """
    return _pad(rows, pad_id, left=True)


def pad_right(rows: TokenRows, pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, both [B, P], padded on the right, as training needs it.

    >>> ids, mask = pad_right([[5, 6, 7], [8]], pad_id=0)
    >>> mask.int().tolist()
    [[1, 1, 1], [1, 0, 0]]
    """
    return _pad(rows, pad_id, left=False)


def _pad(rows: TokenRows, pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    import torch

    lengths = [len(row) for row in rows]
    ids, mask = pad_flat(rows, lengths, pad_id, left=left)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def pad_flat(
    pieces: Iterable[Sequence[int]], lengths: Sequence[int], pad_id: int, *, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of rows of some lengths, both [B, P]; one or more pieces make a row.

    >>> pad_flat([[5, 6], [7], [8]], [3, 1], pad_id=0)[0].tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    counts = np.array(lengths, dtype=np.int64)[:, None]
    width = int(counts.max(initial=0))
    columns = np.arange(width)
    mask = columns >= width - counts if left else columns < counts  # [B, P]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)  # [B, P]
    # Packed piece by piece, which takes less time than numpy does for a list of numbers.
    packed = b"".join([struct.pack(f"{len(piece)}q", *piece) for piece in pieces])
    ids[mask] = np.frombuffer(packed, np.int64)
    return ids, mask


def token_budget_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows, batched so that rows x longest row is at most `budget` tokens.

    Rows of similar length go together, so little is padding. A row longer than
    the budget is a batch of its own.

    >>> token_budget_batches([2, 9, 3, 2], budget=6)
    [[0, 3], [2], [1]]
    """
    if budget < 1:
        raise SettingError(f"A token budget of {budget} holds no row. Set it to 1 or more.")
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * lengths[order[stop]] <= budget:
            stop += 1
        batches.append(order[start:stop])
        start = stop
    return batches


class Micro(NamedTuple):
    """A batch for one forward pass."""

    rows: list[int]
    weight: float = 1.0
    """0 for a pass that only keeps step with other processes, whose result must not count."""


class SingleProcess:
    """One process that does all the work; `runtime.distributed.World` is its kin for several."""

    def batches(self, lengths: Sequence[int], budget: int) -> list[Micro]:
        """What this process is to compute, in batches of at most `budget` tokens."""
        return [Micro(rows) for rows in token_budget_batches(lengths, budget)]

    def sum(self, x: Tensor) -> Tensor:
        """Over all processes."""
        return x

    @property
    def main(self) -> bool:
        """Whether this process speaks for all."""
        return True

    def broadcast(self, value: Any) -> Any:
        """The main process's value."""
        return value

    def on_main(self, call: Callable[[], T]) -> T:
        """What a call returns in the main process, or its error, in all processes."""
        result: T | MarlhfError | None = None
        if self.main:
            try:
                result = call()
            except MarlhfError as error:
                result = error
        result = self.broadcast(result)
        if isinstance(result, MarlhfError):
            raise result
        return cast(T, result)
