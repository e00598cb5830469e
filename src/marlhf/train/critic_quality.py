"""What a critic explains of the returns, by thirds of a response, and what to do if it is nothing.

A critic knows little at the start of a response, where everything is still open. So one number for
whole responses hides where it can be trusted.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from marlhf.core import NGram, masked_mean
from marlhf.runtime.progress import warn
from marlhf.runtime.timing import explained_variance
from marlhf.train.ppo_config import PPOConfig

THIRDS = tuple(f"rl/explained_variance_{third}" for third in (1, 2, 3))
NOTHING = 0.05
"""Explained variance up to which a critic knows nothing: batches are small, so it is never 0."""
SPREAD = 1e-8
"""Variance of returns that is rounding: of equal scores and the KL of a policy to itself."""
WATCHED = 20
"""Steps of which the median counts, and after which a critic should know something."""
LONG_REACH = 0.5
"""Share of a response over which credit should reach where the critic knows nothing."""


def explained_by_thirds(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The explained variance in the first, second and last third of every response.

    >>> mask, returns = torch.ones(2, 3).bool(), torch.tensor([[0.0] * 3, [1.0] * 3])
    >>> values = torch.tensor([[0.5, 0.25, 0.0], [0.5, 0.75, 1.0]])
    >>> [round(float(x), 2) for x in explained_by_thirds(values, returns, mask).values()]
    [0.0, 0.75, 1.0]
    """
    place = mask.cumsum(dim=1) - 1
    third = place * 3 // mask.sum(dim=1, keepdim=True).clamp(min=1)
    return {
        name: explained_or_nothing(values, returns, mask & (third == number))
        for number, name in enumerate(THIRDS)
    }


def explained_or_nothing(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """The explained variance; 0 where there is none to explain: no tokens, or equal returns."""
    spread = masked_mean((returns - masked_mean(returns, mask)).square(), mask)
    return torch.where(spread > SPREAD, explained_variance(values, returns, mask), 0.0)


def knows_nothing(history: Sequence[float]) -> bool:
    """Whether the median of the last `WATCHED` steps explains nothing; False before there are any.

    >>> knows_nothing([0.0] * 20), knows_nothing([0.0] * 19), knows_nothing([0.0] * 9 + [0.3] * 11)
    (True, False, False)
    """
    recent = list(history)[-WATCHED:]
    return len(recent) == WATCHED and statistics.median(recent) < NOTHING


class KnowledgeWatch:
    """Warns once where the critic has long explained nothing, in no third of the responses."""

    def __init__(self, config: PPOConfig) -> None:
        self.config, self.warned = config, False
        self.recent: deque[list[float]] = deque(maxlen=WATCHED)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step's explained variances."""
        self.recent.append([metrics[name] for name in THIRDS])
        best = [max(thirds) for thirds in self.recent]
        if self.warned or not knows_nothing(best):
            return
        self.warned = True
        middle = ", ".join(f"{statistics.median(x):.2f}" for x in zip(*self.recent))
        warn(
            f"step {step}: the critic explains nothing of the returns: over the last {WATCHED} "
            f"steps its explained variance was {middle} in the first, second and last third of a "
            f"response. {advice(self.config)}"
        )


def advice(config: PPOConfig) -> str:
    """What to do about a critic that explains nothing."""
    teach = "pretrain it on samples of the starting policy (critic_pretraining: {responses: 20000})"
    if config.critic_pretraining is not None:
        teach = "pretrain it on more responses, or at another critic_pretraining.learning_rate"
    single = isinstance(config.segmenter, NGram) and config.segmenter.n == 1
    reach = ""
    if config.lam != 1:
        less = "lam: 1" if single or config.lam == "adaptive" else "lam nearer 1"
        reach = f"; or trust it less ({less})"
    return f"Either {teach}{reach}; or use RLOO, which needs no critic."
