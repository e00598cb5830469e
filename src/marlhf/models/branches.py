"""Log-probs of texts that branch off a row at several places: the row itself is read once.

A row and its branches follow each other in one sequence. A branch sees the row up to its own place,
and itself, and its positions count from there.

Axes: B rows, W tokens of a row with its branches, S branches, N tokens that are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from marlhf.data.collate import pad_right
from marlhf.models.compile import uncompiled
from marlhf.models.forward import cast_dtype, hidden_at, is_plain_head
from marlhf.models.logprobs import chosen_logprobs
from marlhf.models.sequences import send


@dataclass(frozen=True)
class Branch:
    """Tokens that follow the first `place` tokens of a row; those from `first` on are scored."""

    place: int
    tokens: list[int]
    first: int


def branch_logprobs(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    branches: Sequence[Sequence[Branch]],
    temperature: float = 1.0,
) -> Tensor | None:
    """The sum of log-probs of each branch's scored tokens, row by row, [S], without gradients.

    None where it is not known what the model makes of its head's output.
    """
    head = cast(Any, model).get_output_embeddings()
    if not is_plain_head(head):
        return None
    device = head.weight.device
    joined = [[*row, *chain(*(b.tokens for b in of_row))] for row, of_row in zip(rows, branches)]
    ids, _ = pad_right(joined, 0)
    shape = ids.shape
    # Of each token: its branch (0 is the row itself, -1 padding), how much of the row it sees, and
    # its position.
    owner, reach, position = (np.full(shape, fill, dtype=np.int64) for fill in (-1, 0, 0))
    before: list[int] = []  # the flat place before each scored token
    scored: list[int] = []
    counts: list[int] = []
    for i, (row, of_row) in enumerate(zip(rows, branches)):
        end = len(row)
        owner[i, :end], reach[i, :end], position[i, :end] = 0, end, np.arange(end)
        for number, branch in enumerate(of_row, start=1):
            begin, end = end, end + len(branch.tokens)
            owner[i, begin:end], reach[i, begin:end] = number, branch.place
            position[i, begin:end] = branch.place + np.arange(end - begin)
            places = [branch.place - 1, *range(begin, end - 1)][branch.first :]
            before += [i * shape[1] + place for place in places]
            scored += branch.tokens[branch.first :]
            counts.append(len(places))
    of, sees, positions = (send(torch.from_numpy(x), device) for x in (owner, reach, position))
    column = torch.arange(shape[1], device=device)
    own = of[:, :, None] == of[:, None]
    shared = (of[:, None] == 0) & (column < sees[:, :, None])
    visible = (column <= column[:, None]) & (own | shared)  # [B, W, W]
    dtype = cast_dtype(head.weight)
    bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    where, tokens, sizes = (send(torch.tensor(x), device) for x in (before, scored, counts))
    with torch.no_grad(), uncompiled():
        hidden, rule = hidden_at(
            model,
            send(ids, device),
            where,
            attention_mask=bias[:, None],
            position_ids=positions,
        )
        if rule is None:
            return None
        logprobs, _ = chosen_logprobs(
            hidden,
            head.weight,
            head.bias,
            tokens,
            rule=rule,
            temperature=temperature,
            dtype=cast_dtype(hidden),
        )
    branch = torch.arange(len(counts), device=device).repeat_interleave(
        sizes, output_size=len(scored)
    )
    return logprobs.new_zeros(len(counts)).index_add_(0, branch, logprobs)
