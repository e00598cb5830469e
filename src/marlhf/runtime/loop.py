"""What surrounds the steps of every stage: resume, progress, Ctrl-C, metrics, callbacks, saving.

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
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from marlhf.config.stage import StageConfig
from marlhf.models.adapters import AdaptedModel
from marlhf.models.base import Model, Tokenizer, quiet_transformers
from marlhf.runs.layout import MODEL, SAMPLES, RunError
from marlhf.runs.write import ReadOnlyRunFolder, RunFolder
from marlhf.runtime.callbacks import Callbacks
from marlhf.runtime.checkpoint import load_latest, save_checkpoint
from marlhf.runtime.distributed import World, start
from marlhf.runtime.memory import WATCHED_STEPS, seek_token_budget, settle_token_budget
from marlhf.runtime.memory_plan import checkpoints_activations
from marlhf.runtime.progress import Steps, format_numbers, say, warn
from marlhf.runtime.publish import check_push, hub_name, push, write_card
from marlhf.runtime.stage import (
    NO_OBJECTS,
    GivenObjects,
    Stopped,
    due,
    finish,
    record_outcome,
    seed_run,
)
from marlhf.runtime.trackers import Trackers


@dataclass(frozen=True)
class OpenRun:
    """What a method trains with, beside its config."""

    folder: RunFolder
    world: World
    objects: GivenObjects


Method = Callable[[Any, OpenRun], Path]
"""The loop of a method: trains by its config, and returns the folder of the model."""


def in_run_folder(stage: str) -> Callable[[Method], Callable[..., Path]]:
    """Make a method's loop into `train(config, objects)`, which opens and seeds the run.

    A finished run is not trained again. Where one loop serves several methods, the caller names the
    method: `train(config, objects, stage="grpo")`.
    """
    name = stage

    def decorate(method: Method) -> Callable[..., Path]:
        @functools.wraps(method)
        def train(
            config: StageConfig, objects: GivenObjects = NO_OBJECTS, stage: str = name
        ) -> Path:
            world = start(config.device, config.parallel)
            run = open_run(config, stage, world)
            if run.finished:
                return run.model
            seed_run(config.seed, config.deterministic)
            checkpointing = checkpoints_activations(config, world.device)
            config = replace(config, gradient_checkpointing=checkpointing)
            return method(config, OpenRun(run, world, objects))

        return train

    return decorate


def open_run(config: StageConfig, stage: str, world: World) -> RunFolder:
    """The run's folder, which rank 0 writes and the others only read.

    Rank 0 comes first: it may have to create the folder, or refuse what is in it.
    """
    run: RunFolder | None = None
    with world.raise_on_all_ranks():
        if world.main:
            run = RunFolder(config.output_dir, stage, config)
            if config.push_to_hub and not run.finished:
                check_push(hub_name(config), private=config.hub_private)
    with world.raise_on_all_ranks():
        if run is None:
            run = ReadOnlyRunFolder(config.output_dir, stage, config)
    assert run is not None
    for problem in run.problems:
        warn(problem)
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
        """Why to stop before the last step, if a guard or a callback says so."""
        self.callbacks = Callbacks(
            objects.callbacks,
            config,
            total_steps=total,
            steps_per_epoch=rows[0] // config.batch_size,
            metric=metric,
            model=next(iter(models.values())),
            processing_class=tokenizer,
            optimizer=next(iter(optimizers.values())),
            world=world,
        )
        self.rows = run.state["rows"] = {"training": rows[0], "held-out": rows[1]}
        if config.token_budget == "auto" and not config.deterministic:
            seek_token_budget(world, run, next(iter(models.values())))
        self._stack = contextlib.ExitStack()
        self._stopping = False  # a signal has reached some rank
        self._last_evaluation: tuple[int, dict[str, float]] | None = None  # its step, and metrics

    def at_end(self, close: Callable[[], None]) -> None:
        """Call this when the loop has ended, however it ends."""
        self._stack.callback(close)

    def resume(self, *needs: str) -> dict[str, Any] | None:
        """Resume from the last complete checkpoint, if there is one; returns its state.

        `needs` names what the stage adds to a state and reads again.
        """
        state, damaged = load_latest(
            self.run.checkpoints,
            world=self.world,
            models=self.models,
            optimizers=self.optimizers,
            needs=needs,
        )
        for line in damaged:
            warn(line)
        if state is None:
            self.run.clear()
            return None
        if state["bases"] != self._bases():
            raise RunError(
                f"The base model of the adapters in {self.run.path} has changed since step "
                f"{state['step']}, and they only fit the one they were trained on. Put that model "
                "back, or choose another output_dir."
            )
        self.run.rewind(state["step"], state["seconds"])
        self.step = self.done = state["step"]
        self.verdict = state["verdict"]
        self.callbacks.load_state(state["callbacks"])
        say(f"resuming from step {self.done} in {self.run.path}")
        return state

    def __enter__(self) -> Loop:
        self._interrupts = self._stack.enter_context(record_outcome(self.run))
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
        """The numbers of the steps, until the last one, a verdict, a callback or a signal."""
        self.check("before the first step")
        if self.verdict or self.callbacks.should_stop:  # so at the checkpoint that was resumed
            return
        for step in range(self.done + 1, self.total + 1):
            self.step = step
            self._stopping = False
            self.callbacks.step_begin(step)
            yield step
            # The stage has called `must_save`, which agreed on this with all ranks, and `save`.
            if self._stopping:
                self._stop(f"saved at step {step} in {self.run.path}")
            if self.world.any(self.callbacks.should_stop) and not self.verdict:
                self.verdict = f"Stopped by a callback after step {step}."
            if self.verdict:
                break

    def steps(self, evaluate: Callable[[], str | None], save: Callable[[], None]) -> Iterator[int]:
        """The steps that are left. Before the first, and where it is due, the model is evaluated,
        which may say why to stop; a checkpoint is saved after a step where one is due."""
        if not self.done:
            evaluate()
        for step in self:
            yield step
            if self.must_evaluate:
                self.verdict = evaluate() or self.verdict
            if self.must_save:
                save()

    def check(self, where: str) -> None:
        """End here if a signal came, on any rank."""
        if self.world.any(bool(self._interrupts.received)):
            self._stop(where)

    def _stop(self, where: str) -> None:
        """All ranks stop, also those that the signal did not reach."""
        self._interrupts.received = self._interrupts.received or "a signal"
        self._interrupts.check(where)

    @contextlib.contextmanager
    def other_steps(self, name: str, total: int, done: int = 0) -> Iterator[Steps]:
        """A bar in the place of this one's, for work that comes before the first step."""
        self._bar.stop()
        with Steps(name, total, done) as steps:
            yield steps
        self._bar.__enter__()

    def log(self, numbers: dict[str, float], show: Sequence[str] = ()) -> None:
        """The metrics of a step that is done: to the folder, the bar, trackers and callbacks."""
        if self.step - self.done >= WATCHED_STEPS:
            settle_token_budget(self.config.pass_tokens, self.world, self.run)
        self.callbacks.step_end(self.step)
        self.run.log("train", self.step, numbers)
        self._bar.advance(self.step, {key: numbers[key] for key in show})
        self.trackers.log(self.step, numbers)
        self.callbacks.log(self.step, numbers)

    def evaluated(self, metrics: dict[str, float]) -> None:
        self._last_evaluation = self.step, metrics
        self.run.log("eval", self.step, metrics)
        numbers = format_numbers(metrics)
        say(f"{self.run.path.name} {self.step}/{self.total}  held out: {numbers}", wrap=True)
        self.trackers.log(self.step, metrics)
        self.callbacks.evaluate(self.step, metrics)

    def log_samples(self, rows: list[dict[str, Any]]) -> None:
        """Samples of an evaluation: into the run folder, and as a table to dashboards."""
        for row in rows:
            self.run.append(SAMPLES, row)
        shown = ("prompt", "response", "score", "gold", "kl", "length")
        table = [{name: row[name] for name in shown} for row in rows]
        self.trackers.table(self.step, "samples", table)

    def final_metrics(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Held-out metrics of the final weights, evaluated only if the last step was not."""
        if self._last_evaluation is not None and self._last_evaluation[0] == self.step:
            return self._last_evaluation[1]
        return evaluate()

    @property
    def must_evaluate(self) -> bool:
        wanted = due(self.step, self.config.eval_every, self.total)
        return self.world.any(wanted or self.callbacks.should_evaluate)

    @property
    def must_save(self) -> bool:
        """Whether a checkpoint is due, or the run stops after this step.

        Saving is a collective call, so the ranks must agree on it: signals and callbacks may have
        reached only one of them.
        """
        self._stopping = self.world.any(bool(self._interrupts.received))
        wanted = due(self.step, self.config.save_every, 0) or bool(self.verdict)
        return self._stopping or self.world.any(wanted or self.callbacks.should_save)

    def save(self, **state: Any) -> None:
        """Write a checkpoint of this step."""
        state |= {"verdict": self.verdict, "callbacks": self.callbacks.state()}
        state |= {"bases": self._bases(), "seconds": self.run.seconds}
        folder = save_checkpoint(
            self.run.checkpoints,
            self.step,
            world=self.world,
            models=self.models,
            optimizers=self.optimizers,
            state=state,
            keep=self.config.keep_checkpoints,
        )
        say(f"{self.run.path.name} {self.step}/{self.total}  saved {folder}")
        self.callbacks.save(self.step)

    def _bases(self) -> dict[str, str | None]:
        """Digests of the frozen models under adapters: checkpoints hold the adapters only."""
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
        """Save the model, end the run, and say where things are."""
        self._bar.stop()
        if self.verdict:
            warn(self.verdict)
            self.run.state["note"] = self.verdict
        self.keep_model(model)
        self.callbacks.train_end()
        path = finish(self.run, summary, next_step)
        if self.world.main:
            push_to_hub, name = self.config.push_to_hub, hub_name(self.config)
            write_card(self.run, rows=self.rows, repo_id=name if push_to_hub else "")
            if push_to_hub:
                say(f"  hub     {push(path, name, private=self.config.hub_private)}")
        self.world.wait()
        return path


def to_numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    """To the host in one go: each `float()` would wait for the device once."""
    device = next(iter(metrics.values())).device
    values = torch.stack([v.detach().float().to(device) for v in metrics.values()]).tolist()
    return dict(zip(metrics, values))


class Clock:
    """Seconds of each phase of a step.

    On a GPU the phases' ends are marked in its own queue and read when the step is over: waiting
    for each would leave the device idle until the host has launched the next.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._names: list[str] = []
        self._marks = [self._now()]
        self._start = time.perf_counter()

    def mark(self, phase: str) -> None:
        """The end of a phase."""
        self._names.append(f"time/{phase}")
        self._marks.append(self._now())

    def times(self, rows: int) -> dict[str, Any]:
        """Seconds of phases and step, once the device is through with it."""
        phases = self.phases
        whole = time.perf_counter() - self._start
        return phases | {"time/step": whole, "time/samples_per_second": rows / whole}

    @property
    def phases(self) -> dict[str, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        pairs = zip(self._names, self._marks, self._marks[1:])
        return {name: self._between(start, end) for name, start, end in pairs}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - start
