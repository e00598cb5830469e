"""Macro actions in verl: the estimator `macro_gae`, and trainers that show it the batch.

verl imports this module in every process, by the environment variable that `marlhf verl` sets.
Its estimators see rewards and a mask only. The v1 trainers are therefore replaced by subclasses
that fetch values, tokens and log-probs as well, and leave the macro action of each token in the
batch, where the losses of the workers find it. With another estimator they do what verl's do.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import (
    trainer_base,
    trainer_colocate_async,
    trainer_separate_async,
    trainer_sync,
)
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_to_nested

from marlhf.core import Segments
from marlhf.engines import verl_losses
from marlhf.engines.advantages import (
    EngineBatch,
    TokenText,
    credit_segments,
    segment_batch,
    segment_metrics,
)
from marlhf.engines.settings import EngineError, MacroSettings
from marlhf.engines.verl_config import ESTIMATOR, RATIOS, check_config, check_version

FIELDS = ["responses", "response_mask", "values", "ref_log_prob", "old_log_probs"]
ROLLOUT_LOGPROBS = "rollout_log_probs"


@dataclass
class ShownBatch:
    """What the trainer shows the estimator, and the macro actions that it leaves there."""

    settings: MacroSettings
    text: TokenText
    batch: Any  # padded tensors by verl's names
    segments: Segments | None = field(default=None)


_shown: ContextVar[ShownBatch | None] = ContextVar("the batch under estimation", default=None)


@core_algos.register_adv_est(ESTIMATOR)
def macro_gae_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, in the form in which verl calls its estimators."""
    shown = _shown.get()
    if shown is None:
        raise EngineError(
            f"{ESTIMATOR} was called by a trainer that shows it no values. It works with verl's v1 "
            "trainers: sync, colocate_async, separate_async."
        )
    batch = shown.batch
    inputs = EngineBatch(
        token_level_rewards,
        response_mask,
        values=batch.get("values", None),
        tokens=batch["responses"],
        ref_logprobs=batch.get("ref_log_prob", None),
        logprobs=batch.get(ROLLOUT_LOGPROBS, batch.get("old_log_probs", None)),
    )
    shown.segments = segment_batch(inputs, shown.settings, shown.text)
    return credit_segments(inputs, shown.segments, shown.settings, config.gamma, config.lam)


class MacroActions:
    """Over any v1 trainer: show the estimator the batch, and the workers its macro actions."""

    config: Any
    tokenizer: Any
    actor_rollout_wg: Any
    critic_wg: Any
    macro: MacroSettings | None

    def __init__(self, config: Any) -> None:
        check_version()
        self.macro = check_config(OmegaConf.to_container(config, resolve=True))  # pyright: ignore
        if self.macro is not None and not config.critic.enable:
            raise EngineError(
                f"{ESTIMATOR} needs a critic, which verl enables by itself for its own gae alone. "
                "Set critic.enable=True, or start with `marlhf verl`, which does."
            )
        super().__init__(config)  # pyright: ignore[reportCallIssue]

    def _setup(self) -> None:
        super()._setup()  # pyright: ignore[reportAttributeAccessIssue]
        if self.macro is None:
            return
        self.macro_text = TokenText(self.macro.segmenter, self.tokenizer)
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        if actor.policy_loss.loss_mode in RATIOS:
            self.actor_rollout_wg.set_loss_fn(partial(verl_losses.macro_ppo_loss, config=actor))
        if self.macro.value_level == "macro":
            critic = omega_conf_to_dataclass(self.config.critic)
            loss = partial(verl_losses.macro_value_loss, config=critic, sigma=self.macro.sigma)
            self.critic_wg.set_loss_fn(loss)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.macro is None:
            return super()._compute_advantage(batch, metrics)  # pyright: ignore
        queue = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = trainer_base.tq.kv_batch_get(**queue, select_fields=[*FIELDS, ROLLOUT_LOGPROBS])
        shown = ShownBatch(self.macro, self.macro_text, data.to_padded_tensor())
        token = _shown.set(shown)
        try:
            batch = super()._compute_advantage(batch, metrics)  # pyright: ignore
        finally:
            _shown.reset(token)
        assert shown.segments is not None
        ids = response_to_nested(shown.segments.ids, data["response_mask"])
        fields = TensorDict({verl_losses.IDS: ids}, batch_size=len(batch))
        metrics.update(segment_metrics(shown.segments))
        return trainer_base.tq.kv_batch_put(**queue, fields=fields)


def register() -> None:
    """Put the trainers with macro actions in the place of verl's own, under the same names."""
    verl_losses.register()
    for mode, base in (
        ("sync", trainer_sync.PPOTrainerSync),
        ("colocate_async", trainer_colocate_async.PPOTrainerColocateAsync),
        ("separate_async", trainer_separate_async.PPOTrainerSeparateAsync),
    ):
        trainer = type(f"Macro{base.__name__}", (MacroActions, base), {"__module__": __name__})
        trainer_base.TRAINER_REGISTRY[mode] = trainer


register()
