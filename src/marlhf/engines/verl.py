"""Macro actions in verl: estimators, losses, and trainers that show them the batch.

verl imports this module in every process, by the environment variable that `marlhf verl` sets.
Its estimators see rewards and a mask only. The v1 trainers are therefore replaced by subclasses
that fetch values, tokens, log-probs and fields of samples as well, and leave the macro action of
each token in the batch, where the losses of the workers find it. With another estimator they do
what verl's do.

The losses pool their inputs over macro actions, keep one token of each, and call verl's own loss.
So clip_ratio_low, clip_ratio_high, clip_ratio_c, loss_agg_mode and cliprange_value mean what they
mean in verl, with macro actions in place of tokens.

Axes: B rows, T response tokens.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
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
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from marlhf.core import Segments
from marlhf.core.segments import Sigma
from marlhf.engines.advantages import (
    ESTIMATORS,
    Estimator,
    MacroSettings,
    TokenText,
    credit_segments,
    segment_batch,
    segment_metrics,
)
from marlhf.engines.batch import EngineBatch, EngineError, EpisodeSteps
from marlhf.engines.verl_config import RATIOS, check_config, check_version

IDS = "macro_ids"
"""The field of a batch that holds the macro action of each response token."""
COUNT = "num_macro_actions"
"""Macro actions in a mini-batch over all ranks, what a mean over macro actions divides by."""

_micro_batch: ContextVar[tuple[Segments, int]] = ContextVar("segments of a micro-batch, and COUNT")
FIELDS = ["responses", "response_mask", "values", "ref_log_prob", "old_log_probs", "rm_scores"]
ROLLOUT_LOGPROBS = "rollout_log_probs"


@dataclass
class VerlBatch:
    """What the trainer shows the estimator, and the macro actions that it leaves there."""

    settings: MacroSettings
    text: TokenText
    batch: Any  # padded tensors by verl's names
    fields: dict[str, Any] = field(default_factory=dict)  # what else an `EngineBatch` has, by name
    segments: Segments | None = None


_shown: ContextVar[VerlBatch | None] = ContextVar("the batch under estimation", default=None)


def macro_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any,
    index: Any = None,  # [B], the uid of each row's prompt
    *,
    estimator: Estimator,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, in the form in which verl calls its estimators."""
    shown = _shown.get()
    if shown is None:
        raise EngineError(
            f"{estimator} was called by a trainer that shows it no tokens. It works with verl's v1 "
            "trainers: sync, colocate_async, separate_async."
        )
    batch, episodes = shown.batch, shown.fields.get("episodes")
    if episodes is not None:  # verl repeats the score of the last row in all of an episode
        not_last = episodes.step != episodes.last_steps
        token_level_rewards = token_level_rewards - batch["rm_scores"] * not_last[:, None]
    inputs = EngineBatch(
        token_level_rewards,
        response_mask,
        values=batch.get("values", None),
        tokens=batch["responses"],
        ref_logprobs=batch.get("ref_log_prob", None),
        logprobs=batch.get(ROLLOUT_LOGPROBS, batch.get("old_log_probs", None)),
        groups=None if index is None else list(index),
        **shown.fields,
    )
    shown.segments = segment_batch(inputs, shown.settings, shown.text)
    return credit_segments(
        inputs,
        shown.segments,
        shown.settings,
        config.gamma,
        config.lam,
        estimator,
        scale=config.get("norm_adv_by_std_in_grpo", True),
    )


def sample_field(data: Any, name: str) -> list[Any]:
    """A field of each sample by its name: `[B]`, in verl's rows, or in one of their dicts.

    Agent loops write `extra_fields`, reward functions `reward_extra_info` within it, and data sets
    `extra_info`. Text is read as JSON: verl's validation stumbles over lists from reward functions.
    """
    rows = [{key: data[key][row] for key in data.keys()} for row in range(len(data))]  # noqa: SIM118
    found = []
    for row in [{key: getattr(x, "data", x) for key, x in row.items()} for row in rows]:
        extra = row.get("extra_fields") or {}
        places = (row, extra, extra.get("reward_extra_info") or {}, row.get("extra_info") or {})
        place = next((place for place in places if name in place), None)
        if place is None:
            raise EngineError(
                f"Samples have no field {name}. Put it into extra_fields of the agent loop, what "
                f"the reward function returns, or extra_info of the data; there is: "
                f"{', '.join(sorted({key for place in places for key in place}))}."
            )
        value = place[name]
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # else it is no list, which is said later
                value = json.loads(value)
        found.append(value.tolist() if isinstance(value, np.ndarray | Tensor) else value)
    return found


def read_segments(data: Any) -> Segments:
    """The macro actions of a batch of verl's, which is a TensorDict of nested tensors."""
    padded = data.select(IDS, "response_mask").to_padded_tensor()
    return Segments(padded[IDS].long(), padded["response_mask"].bool())


def macro_ppo_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """verl's PPO loss, entropy and KL terms included, for a policy loss of macro actions.

    verl hands a policy loss only padded tensors of known names; this hands it the macro actions.
    """
    token = _micro_batch.set((read_segments(data), data[COUNT]))
    try:
        return ppo_loss(config, model_output, data, dp_group)
    finally:
        _micro_batch.reset(token)


def macro_policy_loss(
    old_log_prob: Tensor,  # [B, T]
    log_prob: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T], constant within a macro action
    response_mask: Tensor,  # [B, T]
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,  # [B, T]
    *,
    ratio: str,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's clipped loss over the ratios of macro actions.

    Importance weights of the rollout are averaged over a macro action: weights per sequence stay
    as they are, and truncated ones per token stay below their bound.
    """
    segments, count = _micro_batch.get()
    assert torch.equal(segments.mask, response_mask.bool())
    pool = segments.sum if ratio == "macro" else segments.mean
    log_ratio = segments.spread(pool(log_prob - old_log_prob))
    weights = None
    if rollout_is_weights is not None:
        weights = segments.spread(segments.mean(rollout_is_weights))
    # Let means of verl's divide by macro actions; entropy and KL still divide by tokens.
    info = config.global_batch_info
    num_tokens, info["batch_num_tokens"] = info["batch_num_tokens"], count
    try:
        return core_algos.compute_policy_loss_vanilla(
            old_log_prob=torch.zeros_like(log_ratio),
            log_prob=log_ratio,
            advantages=advantages,
            response_mask=segments.starts,
            loss_agg_mode=loss_agg_mode,
            config=config,
            rollout_is_weights=weights,
        )
    finally:
        info["batch_num_tokens"] = num_tokens


def macro_value_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None, *, sigma: Sigma
) -> tuple[Tensor, dict[str, Any]]:
    """verl's value loss over the values of macro actions, weighed by `sigma`."""
    segments = read_segments(data)
    old = data.select("values", "returns").to_padded_tensor()
    new_values = no_padding_2_padding(model_output["values"], data)
    loss, clip_fraction = core_algos.compute_value_loss(
        vpreds=segments.spread(segments.weighted(new_values, sigma)),
        values=segments.spread(segments.weighted(old["values"], sigma)),
        returns=old["returns"],
        response_mask=segments.starts,
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.loss_agg_mode,
        dp_size=data["dp_size"],
        batch_num_tokens=data[COUNT],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=config.loss_scale_factor,
    )
    mean_value = new_values[segments.mask].mean()
    return loss, {
        "critic/vf_loss": Metric(value=loss, aggregation=AggregationType.SUM),
        "critic/vf_clipfrac": clip_fraction.detach().item(),
        "critic/vpred_mean": mean_value.detach().item(),
    }


def _counted(train_batch: Callable[..., Any]) -> Callable[..., Any]:
    """`TrainingWorker.train_batch` that first counts the mini-batch's macro actions.

    verl counts tokens over all ranks before it cuts a mini-batch into micro-batches; a mean over
    macro actions needs the same count of these, and there is no hook between the two.
    """

    @functools.wraps(train_batch)
    def with_count(self: Any, data: Any) -> Any:
        if IDS in data.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            count = read_segments(data).macro_mask.sum().to(engine_workers.get_device_name())
            torch.distributed.all_reduce(count, group=self.engine.get_data_parallel_group())
            tensordict_utils.assign_non_tensor(data, **{COUNT: count.item()})
        return train_batch(self, data)

    return with_count


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
        with_critic = config.algorithm.adv_estimator == "macro_gae"
        if with_critic and not config.critic.enable:
            raise EngineError(
                "macro_gae needs a critic, which verl enables by itself for its own gae alone. "
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
            self.actor_rollout_wg.set_loss_fn(functools.partial(macro_ppo_loss, config=actor))
        if self.macro.value_level == "macro":
            critic = omega_conf_to_dataclass(self.config.critic)
            loss = functools.partial(macro_value_loss, config=critic, sigma=self.macro.sigma)
            self.critic_wg.set_loss_fn(loss)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.macro is None:
            return super()._compute_advantage(batch, metrics)  # pyright: ignore
        queue = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = trainer_base.tq.kv_batch_get(**queue, select_fields=[*FIELDS, ROLLOUT_LOGPROBS])
        fields = self._sample_fields(queue)
        shown = VerlBatch(self.macro, self.macro_text, data.to_padded_tensor(), fields)
        token = _shown.set(shown)
        try:
            batch = super()._compute_advantage(batch, metrics)  # pyright: ignore
        finally:
            _shown.reset(token)
        assert shown.segments is not None
        ids = response_to_nested(shown.segments.ids, data["response_mask"])
        fields = TensorDict({IDS: ids}, batch_size=len(batch))
        metrics.update(segment_metrics(shown.segments))
        return trainer_base.tq.kv_batch_put(**queue, fields=fields)

    def _sample_fields(self, queue: dict[str, Any]) -> dict[str, Any]:
        """What an `EngineBatch` has beside verl's tensors: fields of samples, and episodes."""
        assert self.macro is not None
        fields: dict[str, Any] = {}
        # Keys are uid_session_row, with a row for each output of an agent loop.
        ids, steps = zip(*(key.rsplit("_", 1) for key in queue["keys"]), strict=True)
        episodes = EpisodeSteps.of(ids, [int(step) for step in steps])
        if episodes.step.any():
            fields["episodes"] = episodes
        names = {"turn_rewards": self.macro.turn_rewards, "turn_states": self.macro.turn_states}
        names = {kind: name for kind, name in names.items() if name}
        if names:
            places = [*names.values(), "extra_fields", "extra_info"]
            data = trainer_base.tq.kv_batch_get(**queue, select_fields=places)
            fields |= {kind: sample_field(data, name) for kind, name in names.items()}
        if self.config.algorithm.adv_estimator == "macro_state":
            data = trainer_base.tq.kv_batch_get(**queue, select_fields=["prompts"])
            fields["prompts"] = [row.tolist() for row in data["prompts"]]
        return fields


def register() -> None:
    """Put the trainers with macro actions in the place of verl's own, under the same names."""
    for estimator in ESTIMATORS:
        estimate = functools.partial(macro_advantage, estimator=estimator)
        core_algos.register_adv_est(estimator)(estimate)
    for name, ratio in RATIOS.items():
        loss = functools.partial(macro_policy_loss, ratio=ratio)
        core_algos.register_policy_loss(name)(loss)
    engine_workers.TrainingWorker.train_batch = _counted(engine_workers.TrainingWorker.train_batch)
    for mode, base in (
        ("sync", trainer_sync.PPOTrainerSync),
        ("colocate_async", trainer_colocate_async.PPOTrainerColocateAsync),
        ("separate_async", trainer_separate_async.PPOTrainerSeparateAsync),
    ):
        trainer = type(f"Macro{base.__name__}", (MacroActions, base), {"__module__": __name__})
        trainer_base.TRAINER_REGISTRY[mode] = trainer


register()
