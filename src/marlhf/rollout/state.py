"""Where each slot of the cache is in its response. Axes: S slots, R response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeState:
    """One entry per slot, on the device.

    CUDA graphs replay on fixed addresses, so the tensors are only ever written in place.
    """

    # Column R is a dummy: idle slots read and write there, so a step needs no branches. A
    # response whose limit is below R begins in a later column, so that all are over at column R.
    uniform: Tensor  # [S, R + 1], float64, the random number of each response token
    tokens: Tensor  # [S], the next to feed
    positions: Tensor  # [S], its position in prompt and response
    steps: Tensor  # [S], the column of the next response token
    running: Tensor  # [S], bool
    out_tokens: Tensor  # [S, R + 1]
    out_logprobs: Tensor  # [S, R + 1]
    cache_rows: Tensor  # [S], where a slot's keys and values are, if it is not moved with them

    @classmethod
    def empty(cls, slots: int, length: int, device: torch.device) -> DecodeState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            uniform=zeros(slots, length + 1, dtype=torch.float64),
            tokens=zeros(slots),
            positions=zeros(slots),
            steps=zeros(slots),
            running=zeros(slots, dtype=torch.bool),
            out_tokens=zeros(slots, length + 1),
            out_logprobs=zeros(slots, length + 1, dtype=torch.float32),
            cache_rows=torch.arange(slots, device=device),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())

    @property
    def slots(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """The longest response."""
        return self.uniform.shape[1] - 1

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def first(self, slots: int) -> DecodeState:
        """A view of the first slots."""
        if slots == self.slots:
            return self
        return DecodeState(**{name: tensor[:slots] for name, tensor in vars(self).items()})

    def begin(
        self,
        slots: Tensor,
        tokens: Tensor,
        positions: Tensor,
        uniform: Tensor,
        before: Tensor,
        limits: Tensor,
    ) -> None:
        """Start new responses, or turns, in some slots: all arguments have one entry per slot.

        `before`: tokens of the response before this turn. Its random numbers are the next ones.
        """
        first = self.length - limits
        columns = torch.arange(self.length, device=self.device) + (before - first)[:, None]
        self.tokens[slots] = tokens
        self.positions[slots] = positions
        self.steps[slots] = first
        self.running.index_fill_(0, slots, True)  # `[slots] = True` would wait for a GPU
        self.uniform[slots, : self.length] = uniform.gather(
            1, columns.clamp(0, uniform.shape[1] - 1)
        )

    def responses(self, slots: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and log-probs from the first on, [n, R], junk after the end; and lengths, [n]."""
        first = self.length - limits
        columns = torch.arange(self.length, device=self.device) + first[:, None]
        columns = columns.clamp(max=self.length)
        tokens, logprobs = self.out_tokens[slots], self.out_logprobs[slots]
        lengths = self.steps[slots] - first
        return tokens.gather(1, columns), logprobs.gather(1, columns), lengths

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy some slots onto others, and put the first to rest."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]
        self.running.index_fill_(0, source, False)
        self.positions.index_fill_(0, source, 0)

    def reorder(self, slots: Tensor) -> None:
        """Put the first slots into another order, in which each comes once."""
        for tensor in self.tensors:
            tensor[: len(slots)] = tensor[slots]
