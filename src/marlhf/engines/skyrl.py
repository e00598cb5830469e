"""Macro actions in SkyRL: an estimator for its registry, and a mixin for its trainer.

SkyRL shows an estimator rewards, values, gamma, lambda and `response_mask`, which is 1 on every
token of a conversation, tool output included. Which tokens the policy wrote is in the batch's
`loss_mask`. `MacroTrainerMixin` shows the estimator that one; without it the estimator refuses to
run, since a macro action would span what the tools wrote.

SkyRL shows neither tokens nor log-probs, so `ngram` and `turns` work; other segmenters are refused
when the estimator is made, before anything runs.

Axes: B rows, T tokens of the longest response. SkyRL pads on the left.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlhf.core import needs
from marlhf.engines.advantages import (
    EngineBatch,
    EngineError,
    MacroSettings,
    macro_advantages,
    needs_logprobs,
    needs_reference,
    needs_text,
    read_settings,
)

_loss_mask: ContextVar[Tensor | None] = ContextVar("loss mask of the batch", default=None)


class MacroTrainerMixin:
    """Shows the estimator the loss mask: `class Trainer(MacroTrainerMixin, RayPPOTrainer)`."""

    def compute_advantages_and_returns(self, data: Any) -> Any:
        token = _loss_mask.set(data["loss_mask"])
        try:
            return super().compute_advantages_and_returns(data)  # pyright: ignore
        finally:
            _loss_mask.reset(token)


@dataclass(frozen=True)
class MacroEstimator:
    """An estimator in the form in which SkyRL calls them.

    An object of a class, not a nested function: Ray sends it to other processes, where it has to
    find this module's `_loss_mask` and not a copy.
    """

    settings: MacroSettings

    def __call__(
        self,
        token_level_rewards: Tensor,  # [B, T]
        response_mask: Tensor,  # [B, T]
        values: Tensor | None = None,  # [B, T]
        gamma: float = 1.0,
        lambd: float = 1.0,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        mask = _loss_mask.get()
        if mask is None:
            raise EngineError(
                "macro_gae needs SkyRL's loss mask: response_mask also counts tool output, and "
                "macro actions would span it. Train with `class Trainer(MacroTrainerMixin, "
                "RayPPOTrainer)` from marlhf.engines.skyrl; docs/verl.md shows how."
            )
        if mask.shape != response_mask.shape:
            raise EngineError(
                f"The loss mask is {list(mask.shape)} and the rewards {list(response_mask.shape)}, "
                "as with step-wise trajectories. Leave out generator.step_wise_trajectories."
            )
        mask = mask.to(response_mask.device).bool()
        rewards = move_to_policy_tokens(token_level_rewards, mask)
        batch = EngineBatch(rewards, mask, values)
        return macro_advantages(batch, self.settings, gamma=gamma, lam=lambd)


def macro_gae(**macro: Any) -> MacroEstimator:
    """An estimator with these settings, to be registered with SkyRL:

        AdvantageEstimatorRegistry.register("macro_gae", macro_gae(segmenter="turns"))

    >>> macro_gae(segmenter={"type": "ngram", "n": 2}).settings.segmenter
    NGram(n=2)
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
    return MacroEstimator(settings)


def move_to_policy_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards with those of masked tokens moved to the last policy token before them: [B, T].

    SkyRL puts a turn's reward on its last token, which may be an EOS that the policy did not
    write. Rewards before the first policy token move to that one. Without any they are lost.

    >>> mask = torch.tensor([[False, True, True, False]])
    >>> move_to_policy_tokens(torch.tensor([[1.0, 2.0, 0.0, 4.0]]), mask)
    tensor([[0., 3., 4., 0.]])
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    before = torch.where(mask, position, -1).cummax(dim=1).values  # [B, T]
    first = mask.int().argmax(dim=1, keepdim=True)
    target = torch.where(before < 0, first, before)
    return torch.zeros_like(rewards).scatter_add(1, target, rewards) * mask
