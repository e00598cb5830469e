"""Warnings about settings that surprise, a critic that misleads, and a KL that is not 0."""

from __future__ import annotations

import statistics
from collections import deque

from marlhf.configs.rl import RLConfig
from marlhf.core import NGram
from marlhf.runs.write import RunError
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.progress import warn

APART = 0.5
"""Nats a response that bfloat16 explains: SmolLM2-135M, with activations of 25,000, has 0.04 in
35 tokens."""

MISLEADS = -1.0
"""Explained variance below which a critic adds more noise than the returns have. Of the runs on
TL;DR (docs/results.md) one was below it for long; after 20 steps all others stay above -0.25."""
PATIENCE, WINDOW = 40, 20
"""Steps in which a critic may find its scale, and the last steps that are judged."""


def warn_apart(kl: float, config: RLConfig) -> None:
    """Before the first step policy and reference are one model, and their KL is rounding."""
    if abs(kl) > APART and config.ref_model is None:
        warn(
            f"before the first step the KL to the reference is {kl:.2g} nats a response. Unless "
            "you gave another model as the reference it should be 0: what samples and what scores "
            "disagree. Try precision: float32, or engine: native where it is vllm."
        )


class CriticWatch:
    """Says once that the critic's values have long explained less than nothing of the returns."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.told = False

    def __call__(self, step: int, explained: float) -> None:
        self.recent.append(explained)
        if self.told or step < PATIENCE or len(self.recent) < WINDOW:
            return
        middle = statistics.median(self.recent)
        if middle < MISLEADS:
            self.told = True
            warn(
                f"step {step}: the critic misleads: in the last {WINDOW} steps its values "
                f"explained less than nothing of the returns (explained variance {middle:.2g}), so "
                f"advantages are mostly its mistakes. {self._advice()}"
            )

    def _advice(self) -> str:
        if divides(self.config):
            return "Set split_last: true, or pooling: sum."
        return "Raise critic_learning_rate, or bring scores to unit scale by normalize_scores."


def divides(config: PPOConfig) -> bool:
    """The score lies on the last token, and a mean over the last macro action divides it."""
    one = isinstance(config.segmenter, NGram) and config.segmenter.n == 1
    return config.pooling == "mean" and not config.split_last and not one


def warn_divided(config: PPOConfig) -> None:
    """To be said early: a run with such a score looks as if it learnt."""
    if divides(config):
        warn(
            "pooling: mean divides the score by the length of the last macro action, which the "
            "critic cannot foresee: on TL;DR critics hardly learnt it (docs/results.md). The "
            "authors' code has split_last: true beside it; pooling: sum divides nothing."
        )


def warn_early(config: RLConfig) -> None:
    """What is better said before the first step than found out after the last."""
    if config.sampling.truncated:
        warn(
            "top_k and top_p draw from part of the distribution while log-probs are of all of it: "
            "the KL penalty and PPO's ratio are then estimates from the wrong samples. The paper "
            "does this; top_k: 0 and top_p: 1 are exact."
        )
    if config.sampling.temperature == 0:
        raise RunError("The policy must explore: set sampling.temperature above 0.")
