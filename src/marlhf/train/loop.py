"""What surrounds the steps of every stage: resuming, the bar, Ctrl-C, metrics, callbacks, saving.

loop = Loop(run, config, world, total, models=..., optimizers=..., ...)
loop.resume()
with loop:
    for step in loop:
        ...
        loop.log({"sft/loss": loss}, show=("loss",))
        if loop.must_save:
            loop.save()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from marlhf.configs.stage import StageConfig
from marlhf.models.adapters import AdaptedModel
from marlhf.models.base import Model, Tokenizer, quiet_transformers
from marlhf.runs.layout import MODEL, RunError
from marlhf.runs.write import ReadOnlyRunFolder, RunFolder
from marlhf.train.callbacks import Callbacks
from marlhf.train.card import push, write_card
from marlhf.train.checkpoint import load_latest, save_checkpoint
from marlhf.train.distributed import World
from marlhf.train.interrupts import Stopped
from marlhf.train.objects import GivenObjects
from marlhf.train.progress import Steps, format_numbers, say, warn
from marlhf.train.stage import due, finish, record_outcome
from marlhf.train.trackers import Trackers


def open_run(config: StageConfig, stage: str, world: World) -> RunFolder:
    """The run's folder: the main process's to write to, the others' to look at."""
    run: RunFolder | None = None
    with world.raise_on_all_ranks():
        if world.main:
            run = RunFolder(config.output_dir, stage, config)
    with world.raise_on_all_ranks():
        if run is None:
            run = ReadOnlyRunFolder(config.output_dir, stage, config)
    assert run is not None
    if run.finished:
        say(f"{run.path.name} is finished: {run.model}")
    return run


class Loop:
    """The steps that are left to take; after `resume`, those after the last checkpoint."""

    def __init__(
        self,
        run: RunFolder,
        config: StageConfig,
        world: World,
        total: int,
        *,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        tokenizer: Tokenizer,
        objects: GivenObjects,
        rows: tuple[int, int],
        metric: str,
    ) -> None:
        self.run, self.config, self.world, self.total = run, config, world, total
        self.models, self.optimizers, self.tokenizer = models, optimizers, tokenizer
        self.step = self.done = 0
        self.verdict = ""
        """Why to end before the last step, if anything says so."""
        model = next(iter(models.values()))
        self.callbacks = Callbacks(
            objects.callbacks,
            config,
            total_steps=total,
            steps_per_epoch=rows[0] // config.batch_size,
            metric=metric,
            model=model,
            processing_class=tokenizer,
            optimizer=next(iter(optimizers.values())),
            main=world.main,
        )
        self.rows = {"training": rows[0], "held-out": rows[1]}
        self._stack = contextlib.ExitStack()
        self._asked = False

    def resume(self) -> dict[str, Any] | None:
        """Resume from the last complete checkpoint, if there is one; returns its state."""
        state, damaged = load_latest(
            self.run, world=self.world, models=self.models, optimizers=self.optimizers
        )
        for line in damaged:
            warn(line)
        if state is None:
            self.run.clear()
            return None
        if state["bases"] != self._bases():
            raise RunError(
                f"The model that the adapters of {self.run.path} stand on has changed since step "
                f"{state['step']}, and they mean nothing on another. Put that model back, or "
                "choose another output_dir."
            )
        self.run.rewind(state["step"], state["seconds"])
        self.step = self.done = state["step"]
        self.verdict = state["verdict"]
        self.callbacks.load_state(state["callbacks"])
        say(f"resuming from step {self.done} in {self.run.path}")
        return state

    def __enter__(self) -> Loop:
        self._interrupts = self._stack.enter_context(record_outcome(self.run, self.models))
        try:
            self.trackers = Trackers(
                self.config.report_to if self.world.main else (),
                self.run.path,
                name=self.config.run_name or self.run.path.name,
                config_raw=self.run.config,
                done=self.done,
            )
            self._bar = self._stack.enter_context(Steps(self.run.path.name, self.total, self.done))
            self.callbacks.train_begin(self.done)
        except BaseException as error:  # `with` calls __exit__ only once it has entered
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = kind is not None and issubclass(kind, (Stopped, KeyboardInterrupt))
        self.trackers.finish("finished" if kind is None else "stopped" if stopped else "failed")
        self._stack.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[int]:
        """Step by step, until the last, a verdict, a callback's word or Ctrl-C."""
        self.check("before the first step")
        over = self.verdict or self.callbacks.should_stop  # already so at the last checkpoint
        for step in range(self.done + 1, (self.done if over else self.total) + 1):
            self.step = step
            self._asked = False
            self.callbacks.step_begin(step)
            yield step
            if self._asked:
                self._interrupts.asked = self._interrupts.asked or "a signal"
                self._interrupts.check(f"saved at step {step} in {self.run.path}")
            if self.world.any(self.callbacks.should_stop) and not self.verdict:
                self.verdict = f"Stopped by a callback after step {step}."
            if self.verdict:
                break

    def check(self, where: str) -> None:
        """End here if that was asked for, on any process."""
        if self.world.any(bool(self._interrupts.asked)):
            self._interrupts.asked = self._interrupts.asked or "a signal"
            self._interrupts.check(where)

    def log(self, numbers: dict[str, float], show: Sequence[str] = ()) -> None:
        """The step is taken: its numbers to the folder, the bar, trackers and callbacks."""
        self.callbacks.step_end(self.step)
        self.run.log("train", self.step, numbers)
        self._bar.advance(self.step, {key: numbers[key] for key in show})
        self.trackers.log(self.step, numbers)
        self.callbacks.log(self.step, numbers)

    def evaluated(self, metrics: dict[str, float]) -> None:
        self.run.log("eval", self.step, metrics)
        say(f"{self.run.path.name} {self.step}/{self.total}  held out: {format_numbers(metrics)}")
        self.trackers.log(self.step, metrics)
        self.callbacks.evaluate(self.step, metrics)

    @property
    def must_evaluate(self) -> bool:
        wanted = due(self.step, self.config.eval_every, self.total)
        return self.world.any(wanted or self.callbacks.should_evaluate)

    @property
    def must_save(self) -> bool:
        """Whether it is time to, or the run is about to end for now."""
        self._asked = self.world.any(bool(self._interrupts.asked))
        wanted = due(self.step, self.config.save_every, 0) or bool(self.verdict)
        return self._asked or self.world.any(wanted or self.callbacks.should_save)

    def save(self, **state: Any) -> None:
        """A checkpoint of this step."""
        whole = state | {"verdict": self.verdict, "callbacks": self.callbacks.state()}
        whole["bases"] = self._bases()
        folder = save_checkpoint(
            self.run,
            self.step,
            world=self.world,
            models=self.models,
            optimizers=self.optimizers,
            state=whole,
            keep=self.config.keep_checkpoints,
        )
        say(f"{self.run.path.name} {self.step}/{self.total}  saved {folder}")
        self.callbacks.save(self.step)

    def _bases(self) -> dict[str, str | None]:
        """What adapters stand on, by its weights: checkpoints hold only what trains."""
        views = {name: m for name, m in self.models.items() if isinstance(m, AdaptedModel)}
        return {name: view.base.digest for name, view in views.items()}

    def keep_model(self, model: Model, name: str = MODEL) -> None:
        """The model as plain files that load without marlhf."""
        state = self.world.full_state_dict(model)
        # Where no process holds all weights, those collected from all of them are saved.
        options = {} if state is None else {"state_dict": state}

        def save(folder: Path) -> None:
            with quiet_transformers():
                model.save_pretrained(folder, **options)
                self.tokenizer.save_pretrained(folder)

        self.run.save_model(save, name)
        self.world.wait()

    def close(self, model: Model, summary: dict[str, Any], next_step: str) -> Path:
        """Keep the model, end the run, and say where things are."""
        if self.verdict:
            warn(self.verdict)
            self.run.state["note"] = self.verdict
        self.keep_model(model)
        self.callbacks.train_end()
        path = finish(self.run, summary, next_step)
        if self.world.main:
            publish(self.run, self.config, self.rows)
        self.world.wait()
        return path


def publish(run: RunFolder, config: StageConfig, rows: Mapping[str, int] | None = None) -> None:
    """Write the model's card, and upload both where that is asked for."""
    name = config.hub_model_id or run.path.name
    write_card(run, rows=rows, repo_id=name if config.push_to_hub else "")
    if config.push_to_hub:
        say(f"  hub     {push(run.model, name, private=config.hub_private)}")
