"""Macro actions in SkyRL: estimators for its registry, and a mixin for its trainer.

SkyRL shows an estimator rewards, values, gamma, lambda and `response_mask`, which is 1 on every
token of a conversation, tool output included. Which tokens the policy wrote is in the batch's
`loss_mask`. `MacroTrainerMixin` shows the estimator the batch; without it the estimator refuses to
run, since a macro action would span what the tools wrote.

With `generator.step_wise_trajectories` an episode has a row for each step, and SkyRL shows an
estimator the last ones alone. Ours takes all rows from the batch, credits the episode as one, and
the mixin gives each row its own part.

Texts and log-probs are not shown, so `ngram` and `turns` work; other segmenters are refused when
the estimator is made, before anything runs.

Axes: B rows, T tokens of the longest response. SkyRL pads on the left.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from marlhf.engines.advantages import (
    Estimator,
    MacroSettings,
    macro_advantages,
    read_settings,
    refuse_unseen,
)
from marlhf.engines.batch import EngineBatch, EngineError, EpisodeSteps


@dataclass
class SkyRLBatch:
    """What the trainer shows the estimator, and the credit that it leaves there."""

    data: Any  # SkyRL's TrainingInputBatch
    credit: tuple[Tensor, Tensor] | None = None  # advantages and returns, [B, T]


_shown: ContextVar[SkyRLBatch | None] = ContextVar("the batch under estimation", default=None)


class MacroTrainerMixin:
    """Shows the estimator the batch: `class Trainer(MacroTrainerMixin, RayPPOTrainer)`."""

    def compute_advantages_and_returns(self, data: Any) -> Any:
        shown = SkyRLBatch(data)
        token = _shown.set(shown)
        try:
            data = super().compute_advantages_and_returns(data)  # pyright: ignore
        finally:
            _shown.reset(token)
        if shown.credit is not None and data.metadata.get("is_last_step") is not None:
            # SkyRL gave each row the advantage of its episode's last one.
            device = data["advantages"].device
            data["advantages"], data["returns"] = (x.to(device) for x in shown.credit)
        return data


@dataclass(frozen=True)
class MacroEstimator:
    """An estimator in the form in which SkyRL calls them.

    An object of a class, not a nested function: Ray sends it to other processes, where it has to
    find this module's `_shown` and not a copy.
    """

    settings: MacroSettings
    estimator: Estimator = "macro_gae"

    def __call__(
        self,
        token_level_rewards: Tensor,  # [B, T], or of last steps only
        gamma: float = 1.0,
        lambd: float = 1.0,
        grpo_norm_by_std: bool = True,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        shown = _shown.get()
        if shown is None:
            raise EngineError(
                f"{self.estimator} needs SkyRL's loss mask: response_mask also counts tool output, "
                "and macro actions would span it. Train with `class Trainer(MacroTrainerMixin, "
                "RayPPOTrainer)` from marlhf.engines.skyrl; docs/verl.md shows how."
            )
        data, device = shown.data, token_level_rewards.device
        last = data.metadata.get("is_last_step")
        mask = data["loss_mask"].to(device).bool()
        batch = EngineBatch(
            data["rewards"],
            mask,
            data["values"],
            groups=data.metadata["uids"],
            episodes=None if last is None else episodes_of(last),
            **(self._text(data, mask) if self.estimator == "macro_state" else {}),
        )
        options = {"estimator": self.estimator, "scale": grpo_norm_by_std}
        credit = macro_advantages(batch, self.settings, gamma=gamma, lam=lambd, **options)
        shown.credit = credit
        if len(token_level_rewards) == len(mask):
            return credit
        return credit[0][last], credit[1][last]

    def _text(self, data: Any, mask: Tensor) -> dict[str, Any]:
        """The tokens that states are known by: those of the response, and of its prompt."""
        width = mask.shape[1]
        in_prompt = data["attention_mask"].bool().clone()
        in_prompt[:, -width:] &= ~data["response_mask"].bool()
        prompts = [row[keep].tolist() for row, keep in zip(data["sequences"], in_prompt)]
        return {"tokens": data["sequences"][:, -width:].to(mask.device), "prompts": prompts}


def episodes_of(is_last_step: list[bool]) -> EpisodeSteps:
    """The episodes of SkyRL's step-wise rows, which come in order, each up to its last step.

    >>> episodes_of([False, True, True]).episode.tolist()
    [0, 0, 1]
    """
    ids = list(accumulate(is_last_step[:-1], initial=0))
    return EpisodeSteps.of(ids, range(len(ids)))


def macro_estimator(estimator: Estimator = "macro_gae", **macro: Any) -> MacroEstimator:
    """An estimator with these settings, to be registered with SkyRL under its name:

        AdvantageEstimatorRegistry.register("macro_rloo", macro_estimator("macro_rloo"))

    >>> macro_estimator(segmenter={"type": "ngram", "n": 2}).settings.segmenter
    NGram(n=2)
    """
    settings = read_settings(macro, estimator, estimator)
    rule = settings.segmenter
    if getattr(rule, "needs", ()):  # seeds as well: they are made of the tokens
        raise EngineError(
            f"{rule} reads tokens or log-probs, and SkyRL shows an estimator neither. Choose "
            "ngram or turns."
        )
    refuse_unseen(settings, "SkyRL")
    return MacroEstimator(settings, estimator)


macro_gae = partial(macro_estimator, "macro_gae")
"""`macro_gae(segmenter="turns")`: the same for the estimator with a critic."""
