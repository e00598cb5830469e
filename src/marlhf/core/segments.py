"""Which macro action each response token belongs to, and sums over macro actions.

Axes: B rows, T response tokens, M macro actions. M is always T, the most there can be: a tighter
bound would have to be read from the device. Macro actions that do not exist are 0 and are False
in `macro_mask`. The mask may have holes, which no macro action spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from marlhf.core.masked import (
    check_choice,
    check_shape,
    check_tokens,
    complain,
    keep,
    last_token,
    shift,
    since,
)

Sigma = Literal["equal", "unit", "position", "start"]


@dataclass(frozen=True)
class Segments:
    """A response cut into macro actions.

    >>> starts = torch.tensor([[True, False, True, False]])
    >>> segments = Segments.from_starts(starts, mask=torch.ones(1, 4).bool())
    >>> segments.ids
    tensor([[0, 0, 1, 1]])
    >>> segments.sum(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[3., 7., 0., 0.]])
    """

    ids: Tensor  # [B, T] int64, the macro action of each token, counted from 0
    mask: Tensor  # [B, T] bool, True on response tokens
    late: Tensor | None = None  # [B] bool, rows whose rule did not start at the first token

    def __post_init__(self) -> None:
        check_tokens(self.mask)
        check_shape(self.mask, ids=self.ids)
        if self.ids.dtype != torch.int64:
            raise ValueError(f"ids must be int64, got {self.ids.dtype}.")

    @classmethod
    def from_starts(cls, starts: Tensor, mask: Tensor, *, split_last: bool = False) -> Segments:
        """Number the macro actions from where they start.

        The first response token starts one whatever `starts` says, so that the device is never
        asked; `validate` tells when a rule forgot it. So does the first one after a hole in the
        mask (tool output, another speaker): a macro action never spans one. `split_last` makes
        the last token an action of its own, as the authors' code does.
        """
        check_tokens(mask)
        kind, better = getattr(starts, "dtype", None), "starts.bool()"
        if not isinstance(starts, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = f"{type(starts).__module__}.{type(starts).__name__}"
            better = "torch.as_tensor(starts, device=responses.mask.device)"
        if kind != torch.bool:
            raise ValueError(
                f"A segmenter must return a bool tensor [B, T], got {kind}. Return {better}."
            )
        check_shape(mask, starts=starts)
        late = (mask & (mask.cumsum(dim=1) == 1) & ~starts).any(dim=1)
        starts = (starts & mask) | (mask & ~shift(mask))
        if split_last:
            starts = starts | last_token(mask)
        return cls((starts.cumsum(dim=1) - 1).clamp(min=0), mask, late)

    def validate(self) -> Segments:
        """Check what only the values can tell. Waits for the device, so not for the hot path."""
        if self.late is not None:
            complain(
                self.late,
                "A macro action must begin at the first token, but it does not in",
                "Set `starts[:, 0] = True` at the end of your segmenter.",
            )
        complain(
            self.mask & (self.ids != self.starts.cumsum(dim=1) - 1),
            "Macro ids must count 0, 1, 2, ... from left to right, with a new one after each hole "
            "in the mask, but not in",
        )
        return self

    @property
    def lengths(self) -> Tensor:
        """Tokens in each macro action: [B, M] int64, 0 where there is none."""
        return torch.zeros_like(self.ids).scatter_add(1, self.ids, self.mask.long())

    @property
    def macro_mask(self) -> Tensor:
        """True where a macro action exists: [B, M] bool."""
        return self.lengths > 0

    @property
    def starts(self) -> Tensor:
        """True on the first token of each macro action: [B, T] bool."""
        return self.mask & ~(shift(self.mask) & (self.ids == self.ids.roll(1, dims=1)))

    @property
    def ends(self) -> Tensor:
        """True on the last token of each macro action: [B, T] bool."""
        return self.mask & ~(shift(self.mask, -1) & (self.ids == self.ids.roll(-1, dims=1)))

    @property
    def offsets(self) -> Tensor:
        """How far each token stands behind the start of its macro action: [B, T] int64."""
        return torch.where(self.mask, since(self.starts, self.mask), 0)

    def sum(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, M]."""
        check_tokens(self.mask, x=x)
        x = keep(x, self.mask)
        return torch.zeros_like(x).scatter_add(1, self.ids, x)

    def mean(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, M]."""
        return self.sum(x) / self.lengths.clamp(min=1)

    def first(self, x: Tensor) -> Tensor:
        """The number at the first token of each macro action: [B, T] -> [B, M]."""
        return self.sum(torch.where(self.starts, x, 0.0))

    def last(self, x: Tensor) -> Tensor:
        """The number at the last token of each macro action: [B, T] -> [B, M]."""
        return self.sum(torch.where(self.ends, x, 0.0))

    def weighted(self, x: Tensor, sigma: Sigma = "equal") -> Tensor:
        """Sum of sigma_i x_i, the sigma of each macro action summing to one: [B, T] -> [B, M].

        `equal`: 1 / |w|. `unit`: the last token. `position`: proportional to 1 / (|w| - i), so
        rising towards the last token. `start`: the first token, which for values is the state
        in which the macro action was chosen, the baseline of a semi-Markov process.
        """
        check_choice("sigma", sigma, get_args(Sigma))
        if sigma != "position":
            return {"equal": self.mean, "unit": self.last, "start": self.first}[sigma](x)
        x = keep(x, self.mask)
        to_end = self.lengths.gather(1, self.ids) - self.offsets  # |w| - i
        weights = to_end.clamp(min=1).to(x.dtype).reciprocal()
        total = self.sum(weights)  # 0 where there is no macro action
        return self.sum(weights * x) / torch.where(total > 0, total, 1.0)

    def spread(self, x: Tensor) -> Tensor:
        """Each token takes its macro action's number: [B, M] -> [B, T]."""
        if x.ndim != 2 or len(x) != len(self.ids):
            raise ValueError(f"spread takes [B, M] with B = {len(self.ids)}, got {list(x.shape)}.")
        return torch.where(self.mask, x.gather(1, self.ids), 0)
