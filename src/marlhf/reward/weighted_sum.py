"""Weighted sums of rewards of any kind: models and functions.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marlhf.data import Row
from marlhf.data.collate import TokenRows
from marlhf.data.encode import decode
from marlhf.reward.functions import RewardError, RewardFunction, Scorer, at_last_tokens, show_sample
from marlhf.reward.model import RewardModel


class Rewards:
    """A weighted sum of scorers, over those that apply to a row; 0 without any.

    >>> import torch
    >>> def scorer(value):
    ...     return lambda prompts, responses, rows: torch.full((len(rows),), value)
    >>> rewards = Rewards([("helpful", scorer(2.0), 1.0), ("short", scorer(-1.0), 0.5)])
    >>> rewards([[1]], [[2]], [Row("Why?")])
    tensor([1.5000])
    >>> rewards.latest["helpful"]
    tensor(2.)
    """

    def __init__(self, parts: Sequence[tuple[str, Scorer, float]]) -> None:
        self.parts: list[tuple[str, Scorer, float]] = []
        for name, scorer, weight in parts:
            names = [name, *(f"{name}-{number}" for number in range(2, len(parts) + 2))]
            taken = {each for each, _, _ in self.parts}  # two lambdas, or one with two settings
            unique = next(each for each in names if each not in taken)
            self.parts.append((unique, scorer, weight))
        self.latest: dict[str, Tensor] = {}
        """Mean of each part in the last call, over the rows that it applies to."""

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse data that a reward function cannot work with, before any training."""
        for _, scorer, _ in self.parts:
            if isinstance(scorer, RewardFunction):
                scorer.check(rows)

    @property
    def disagreement(self) -> Tensor | None:
        """Of the last call: how far the members of ensembles disagree; None without ensembles."""
        models = [(s, weight) for _, s, weight in self.parts if isinstance(s, RewardModel)]
        parts = [abs(w) * s.disagreement for s, w in models if s.disagreement is not None]
        return torch.stack(parts).sum() if parts else None

    @property
    def sandbox(self) -> dict[str, bool | str]:
        """The sandbox layers of a reward function that runs programs, empty if none does.

        Read before training, so that a machine without a sandbox is refused at the start.
        """
        functions: list[Any] = [
            scorer.function for _, scorer, _ in self.parts if isinstance(scorer, RewardFunction)
        ]
        return next((f.layers for f in functions if hasattr(type(f), "layers")), {})

    def __call__(self, prompts: TokenRows, responses: TokenRows, rows: Sequence[Row]) -> Tensor:
        """One score per row, [B], or rewards at tokens, [B, T]; float32."""
        self.latest = {}
        lengths = [len(response) for response in responses]
        total: Tensor | None = None  # zeros would be copied to a GPU, which waits for it
        applied: Tensor | None = torch.zeros(len(rows), dtype=torch.bool)
        for name, scorer, weight in self.parts:
            scores = scorer(prompts, responses, rows)
            by_row = scores if scores.ndim == 1 else scores.sum(dim=1)
            if isinstance(scorer, RewardFunction):
                applies = ~by_row.isnan()
                applied = None if applied is None else applied.to(scores.device) | applies
                self.latest[name] = by_row.nanmean()
                scores = scores.nan_to_num(nan=0.0)
            else:  # a model applies to every row, and its NaN is an error
                applied = None
                self.latest[name] = by_row.mean()
            part = weight * scores.float()
            if total is not None and total.ndim != part.ndim:
                total, part = (
                    at_last_tokens(x, lengths, max(lengths)) if x.ndim == 1 else x
                    for x in (total, part)
                )
            total = part if total is None else total.to(part.device) + part
        if self.parts and applied is not None and not bool(applied.all()):
            row = int((~applied).nonzero()[0])
            names = ", ".join(f"`{name}`" for name, _, _ in self.parts)
            tokenizer = next(s.tokenizer for _, s, _ in self.parts if isinstance(s, RewardFunction))
            text = decode(tokenizer, responses[row])
            raise RewardError(
                f"No reward applies to this sample; {names} returned None.\n"
                f"{show_sample(rows[row], text)}\nOne of them must return a number for every row."
            )
        return torch.zeros(len(rows)) if total is None else total
