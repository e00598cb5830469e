"""What a critic explains of the returns, by thirds of a response, with warnings where it is little.

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
from marlhf.train.experience import Credit, explained_variance
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


MIN_REACH = 0.25
"""Share of a response that credit should reach back over. With 0.12 (chained sums, lambda .95) PPO
fell far behind; with 0.6 (the same with n = 5, TL;DR with lambda .95) nothing is lost."""
MIN_EXPLAINED_VARIANCE = -1.0
"""A critic below this adds more noise than the returns have. Of the runs on
TL;DR (docs/results.md) one was below it for long; after 20 steps all others stay above -0.25."""
FIRST_STEPS, LAST_STEPS = 40, 20
"""Steps that a critic has to find its scale, and how many of the last steps count."""


class CriticWatch:
    """Warns where credit is lost: by settings, by a short reach, or by a critic that misleads."""

    def __init__(self, config: PPOConfig) -> None:
        single_tokens = isinstance(config.segmenter, NGram) and config.segmenter.n == 1
        splits = config.split_last or single_tokens
        self.divides_scores = config.pooling == "mean" and not splits
        self.has_critic, self.lam = config.has_critic, config.lam
        self.auto = config.credit == "auto"
        self.recent: deque[float] = deque(maxlen=LAST_STEPS)
        self.warned = False
        self.watch_knowledge = KnowledgeWatch(config)
        if self.divides_scores:  # now: later such a run looks as if it learnt
            warn(
                "pooling: mean divides the score by the length of the last macro action, which the "
                "critic cannot foresee: on TL;DR critics hardly learnt it (docs/results.md). The "
                "authors' code has split_last: true beside it; pooling: sum divides nothing."
            )

    def __call__(self, step: int, credit: Credit, metrics: Mapping[str, float]) -> None:
        if not self.has_critic:
            return
        self.check_variance(step, metrics["rl/explained_variance"])
        if not self.warned:
            self.watch_knowledge(step, metrics)
        # The reach of an adaptive lambda is a share of the response, which the user chose.
        if step == 1 and not self.auto and not isinstance(self.lam, str):
            reach = float(credit.reach(self.lam, alpha=1.0))
            warn_about_short_reach(reach, metrics["rl/length"], self.lam)

    def check_variance(self, step: int, explained: float) -> None:
        """Warn once when the critic's values have long had a negative explained variance."""
        self.recent.append(explained)
        if self.warned or step < FIRST_STEPS or len(self.recent) < LAST_STEPS:
            return
        middle = statistics.median(self.recent)
        if middle < MIN_EXPLAINED_VARIANCE:
            self.warned = True
            advice = (
                "Raise critic_learning_rate, or bring scores to unit scale by normalize_scores."
            )
            if self.divides_scores:
                advice = "Set split_last: true, or pooling: sum."
            warn(
                f"step {step}: the critic misleads: in the last {LAST_STEPS} steps its values "
                f"explained less than nothing of the returns (explained variance {middle:.2g}), so "
                f"advantages are mostly its mistakes. {advice}"
            )


def warn_about_short_reach(reach: float, length: float, lam: float) -> None:
    """Where credit for the score, which is on the last token, ends long before the first tokens."""
    if reach < MIN_REACH * length:
        warn(
            f"credit reaches {reach:.0f} tokens back (lam: {lam:g}), and responses have "
            f"{length:.0f}: what is written early hardly learns from the score at the end. On sums "
            "of 168 tokens a longer reach took 2.5 times fewer steps (docs/results.md). Try lam: "
            "0.99 or 1, longer macro actions, or credit: auto; `marlhf credit` measures which."
        )
