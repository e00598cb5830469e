"""Runs callbacks of transformers in our loops.

A `TrainerCallback` written for transformers or TRL gets what it gets there: the arguments, the
state and the control of a trainer, under the same names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.progress import warn

Callback = TrainerCallback | type[TrainerCallback]
KEPT = ("log_history", "best_metric", "best_global_step")
"""What a checkpoint keeps of the trainer's state."""


class Arguments(TrainingArguments):
    """Our settings under the names that callbacks read.

    The constructor of transformers' own class sets up devices, process groups and Accelerate,
    which would interfere with ours; this one only holds the settings. `distributed_state` is
    where transformers' properties read the rank and the number of processes from.
    """

    def __post_init__(self) -> None:
        self.distributed_state: Any = None
        self._device = torch.device("cpu")

    def set_world(self, world: World) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0")) if world.size > 1 else 0
        self.distributed_state = SimpleNamespace(
            num_processes=world.size, process_index=world.rank, local_process_index=local_rank
        )
        self._device = world.device

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def n_gpu(self) -> int:
        return int(self._device.type != "cpu")


class Callbacks:
    """Calls the callbacks of a run.

    `step_begin`, `step_end`, `log`, `evaluate` and `save` are called after those events, with the
    step that they belong to. What callbacks request is in `should_stop`, `should_evaluate` and
    `should_save`.

    `metric` is the held-out metric for early stopping, with or without `eval/`; higher is better
    unless its name ends in `loss`.

    >>> from transformers import TrainerCallback
    >>> class Enough(TrainerCallback):
    ...     def on_step_end(self, args, state, control, **kwargs):
    ...         control.should_training_stop = state.global_step >= 2
    >>> from marlhf.train.sft import SFTConfig
    >>> config = SFTConfig(model="tiny", output_dir="runs/sft")
    >>> callbacks = Callbacks([Enough], config, total_steps=10)
    >>> callbacks.train_begin()
    >>> for step in range(1, 11):
    ...     callbacks.step_begin(step)
    ...     callbacks.step_end(step)
    ...     if callbacks.should_stop:
    ...         break
    >>> step
    2
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        config: Any,
        *,
        total_steps: int,
        steps_per_epoch: int | None = None,
        metric: str = "score",
        world: World | None = None,
        **given: Any,
    ) -> None:
        """`given` is what callbacks get as keywords: model, processing_class, optimizer."""
        world = world or World(torch.device("cpu"))
        self.callbacks = [_instance(callback) for callback in callbacks]
        self.control = TrainerControl()
        self.metric = metric.removeprefix("eval/").removeprefix("eval_")
        self.args = _arguments(config, total_steps, self.metric)
        self.args.set_world(world)
        shared = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps")
        self.trainer_state = TrainerState(
            **{name: getattr(self.args, name) for name in shared},
            train_batch_size=config.batch_size,
            is_local_process_zero=world.main,
            is_world_process_zero=world.main,
        )
        self._epoch = steps_per_epoch or max(1, math.ceil(total_steps / config.num_epochs))
        self._begun = False
        expected = ("model", "processing_class", "optimizer", "lr_scheduler")
        self._given = dict.fromkeys((*expected, "train_dataloader", "eval_dataloader")) | given
        self._call("on_init_end")

    @property
    def should_stop(self) -> bool:
        """End the run, as if its last step had been taken."""
        return self.control.should_training_stop

    @property
    def should_save(self) -> bool:
        """Write a checkpoint after this step."""
        return self.control.should_save

    @property
    def should_evaluate(self) -> bool:
        """Evaluate after this step."""
        return self.control.should_evaluate

    def train_begin(self, step: int = 0) -> None:
        """`step` steps were taken before this resume. Call it after `load_state`."""
        self._set_step(step)
        self._call("on_train_begin")

    def step_begin(self, step: int) -> None:
        self._set_step(step - 1)
        if not self._begun or (step - 1) % self._epoch == 0:
            self._begun = True
            self.control.should_epoch_stop = False
            self._call("on_epoch_begin")
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self._call("on_step_begin")

    def step_end(self, step: int) -> None:
        self._set_step(step)
        self._call("on_step_end")
        if step % self._epoch == 0 or step == self.trainer_state.max_steps:
            self._call("on_epoch_end")
        if self.control.should_epoch_stop:
            self.control.should_epoch_stop = False
            warn(
                "a callback set should_epoch_stop, which does nothing here. Set "
                "should_training_stop."
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""
        if not self.callbacks:  # no one reads the history, which would only grow
            return
        self._set_step(step)
        self.control.should_log = False
        logs = {**metrics, "epoch": self.trainer_state.epoch}
        self.trainer_state.log_history.append({**logs, "step": step})
        self._call("on_log", logs=logs)

    def evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation: ours are `eval/score`, transformers' `eval_score`."""
        renamed = {name.replace("eval/", "eval_", 1): value for name, value in metrics.items()}
        self.log(step, renamed)
        self.control.should_evaluate = False
        self._call("on_evaluate", metrics={**metrics, **renamed})
        value, best = renamed.get(f"eval_{self.metric}"), self.trainer_state.best_metric
        if value is None or math.isnan(value):
            return
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.trainer_state.best_metric = value
            self.trainer_state.best_global_step = step

    def save(self, step: int) -> None:
        """A checkpoint was written."""
        self._set_step(step)
        self.control.should_save = False
        self._call("on_save")

    def train_end(self) -> None:
        self._call("on_train_end")

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON: the trainer's state and that of callbacks which keep one."""
        if not self.callbacks:
            return {}
        kept = [c.state() if isinstance(c, ExportableState) else None for c in self.callbacks]
        return {
            "callbacks": [[type(c).__name__, s] for c, s in zip(self.callbacks, kept)],
            "should_stop": self.should_stop,
            **{name: getattr(self.trainer_state, name) for name in KEPT},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. Callbacks that were added since start afresh."""
        if not self.callbacks or not state:
            return
        saved = list(state["callbacks"])
        for callback in self.callbacks:
            match = next((one for one in saved if one[0] == type(callback).__name__), None)
            if match is None:
                continue
            saved.remove(match)
            # Only what the callback has gathered is restored: its settings may have changed.
            for name, value in (match[1] or {}).get("attributes", {}).items():
                setattr(callback, name, value)
        for name in KEPT:
            setattr(self.trainer_state, name, state[name])
        self.control.should_training_stop = state["should_stop"]

    def _set_step(self, step: int) -> None:
        self.trainer_state.global_step = step
        self.trainer_state.epoch = step / self._epoch

    def _call(self, event: str, **given: Any) -> None:
        for callback in self.callbacks:
            handler = getattr(callback, event)
            try:
                answer = handler(
                    self.args, self.trainer_state, self.control, **self._given, **given
                )
            except Exception as error:
                raise RunError(
                    f"The callback {type(callback).__name__} failed in {event} at step "
                    f"{self.trainer_state.global_step}: {type(error).__name__}: {error}. Fix or "
                    "remove it; the same command resumes from the last checkpoint."
                ) from error
            if isinstance(answer, TrainerControl):
                self.control = answer


def _instance(callback: Any) -> TrainerCallback:
    name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
    try:
        instance = callback() if isinstance(callback, type) else callback
    except Exception as error:
        raise RunError(
            f"The callback {name} cannot be created: {error}. Pass an object, as in {name}(...)."
        ) from error
    if not isinstance(instance, TrainerCallback):
        raise RunError(f"{name} is no callback. Derive it from transformers.TrainerCallback.")
    return instance


def _arguments(config: Any, total_steps: int, metric: str) -> Arguments:
    return Arguments(
        output_dir=config.output_dir,
        run_name=config.run_name or Path(config.output_dir).name,
        seed=config.seed,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type=SchedulerType(config.schedule),
        per_device_train_batch_size=config.batch_size,
        num_train_epochs=config.num_epochs,
        max_steps=total_steps,
        logging_steps=1,
        logging_strategy=IntervalStrategy.STEPS,
        eval_steps=config.eval_every or total_steps,
        eval_strategy=IntervalStrategy.STEPS if config.eval_every else IntervalStrategy.NO,
        save_steps=config.save_every,
        save_strategy=SaveStrategy.STEPS if config.save_every else SaveStrategy.NO,
        save_total_limit=config.keep_checkpoints,
        gradient_checkpointing=config.gradient_checkpointing is True,
        metric_for_best_model=metric,
        greater_is_better=not metric.endswith("loss"),
        report_to=[],
        disable_tqdm=False,
    )
