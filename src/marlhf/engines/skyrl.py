"""Macro actions in SkyRL: an estimator for its registry.

SkyRL shows an estimator rewards, values, mask, gamma and lambda, but neither tokens nor log-probs.
So `ngram` and `turns` work; other segmenters are refused when the estimator is made, before
anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from marlhf.core import needs
from marlhf.engines.advantages import EngineBatch, macro_advantages
from marlhf.engines.settings import (
    EngineError,
    needs_logprobs,
    needs_reference,
    needs_text,
    read_settings,
)

Estimator = Callable[..., tuple[Tensor, Tensor]]


def macro_gae(**macro: Any) -> Estimator:
    """An estimator with these settings, to be registered with SkyRL:

        AdvantageEstimatorRegistry.register("macro_gae", macro_gae(segmenter="turns"))

    >>> import torch
    >>> ones = torch.ones(1, 4)
    >>> estimate = macro_gae(segmenter={"type": "ngram", "n": 2}, whiten="none")
    >>> batch = {"token_level_rewards": ones, "values": 0 * ones, "response_mask": ones}
    >>> estimate(**batch, gamma=1.0, lambd=1.0)[1]
    tensor([[4., 4., 2., 2.]])
    """
    settings = read_settings(macro, "macro_gae")
    rule = settings.segmenter
    seeded = needs(rule, "seeds")  # by the tokens, so that a resumed run draws the same
    if seeded or needs_text(rule) or needs_reference(rule) or needs_logprobs(rule):
        raise EngineError(
            f"{rule} reads tokens or log-probs, and SkyRL shows an estimator neither. Choose "
            "ngram or turns."
        )
    if settings.value_level != "token":
        raise EngineError(
            "value_level: macro needs the macro actions in the critic's loss, and SkyRL's critic "
            "does not see them. Set value_level: token."
        )

    def estimate(
        token_level_rewards: Tensor,  # [B, T]
        response_mask: Tensor,  # [B, T]
        values: Tensor | None = None,  # [B, T]
        gamma: float = 1.0,
        lambd: float = 1.0,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        batch = EngineBatch(token_level_rewards, response_mask, values)
        return macro_advantages(batch, settings, gamma=gamma, lam=lambd)

    return estimate
