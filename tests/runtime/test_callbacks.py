import json

import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from marlhf.runs.layout import RunError
from marlhf.runtime.callbacks import Callbacks
from marlhf.train.sft import SFTConfig

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Witness(TrainerCallback):
    """Writes down each event with what it came with."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name not in EVENTS:
            return super().__getattribute__(name)

        def note(args, state, control, **given):
            self.seen.append((name, state.global_step, state.epoch, given))

        return note

    @property
    def events(self):
        return [name.removeprefix("on_") for name, *_ in self.seen]


@pytest.fixture
def config(tmp_path):
    return SFTConfig(
        model="tiny",
        output_dir=str(tmp_path / "sft"),
        batch_size=4,
        learning_rate=3e-4,
        num_epochs=2,
        eval_every=2,
        save_every=3,
    )


def run(callbacks, scores=(), done=0):
    """A loop as our stages have it; returns the steps that were taken."""
    scores, steps = dict(scores), []
    callbacks.train_begin(done)
    total = 6
    for step in range(done + 1, (done if callbacks.should_stop else total) + 1):
        callbacks.step_begin(step)
        callbacks.step_end(step)
        steps.append(step)
        callbacks.log(step, {"sft/loss": 1.0 / step})
        if step in scores or callbacks.should_evaluate:
            callbacks.evaluate(step, {"eval/score": scores.get(step, 0.0)})
        if callbacks.should_save:
            callbacks.save(step)
        if callbacks.should_stop:
            break
    callbacks.train_end()
    return steps


def test_events_come_in_transformers_order_with_its_arguments(config):
    witness, model = Witness(), torch.nn.Linear(2, 2)
    callbacks = Callbacks(
        [witness], config, total_steps=6, steps_per_epoch=3, model=model, processing_class="tok"
    )
    run(callbacks, {2: 0.5})
    step = ["step_begin", "step_end", "log"]
    epochs = ["init_end", "train_begin"]
    epochs += ["epoch_begin", *step, *step, "log", "evaluate", "step_begin", "step_end"]
    epochs += ["epoch_end", "log", "epoch_begin", *step, *step, "step_begin", "step_end"]
    assert witness.events == [*epochs, "epoch_end", "log", "train_end"]
    assert all(given["model"] is model for *_, given in witness.seen)
    assert all(given["processing_class"] == "tok" for *_, given in witness.seen)
    ends = [(s, e) for name, s, e, _ in witness.seen if name == "on_step_end"]
    assert ends == [(s, s / 3) for s in range(1, 7)]
    [metrics] = [given["metrics"] for name, *_, given in witness.seen if name == "on_evaluate"]
    assert metrics == {"eval/score": 0.5, "eval_score": 0.5}
    logs = [given["logs"] for name, *_, given in witness.seen if name == "on_log"]
    assert logs[0] == {"sft/loss": 1.0, "epoch": 1 / 3}
    assert logs[2] == {"eval_score": 0.5, "epoch": 2 / 3}
    assert callbacks.trainer_state.log_history[2] == {**logs[2], "step": 2}


def test_arguments_are_transformers_own_and_touch_nothing(config, monkeypatch):
    monkeypatch.setattr("accelerate.PartialState.__init__", None)  # would raise
    monkeypatch.setattr("torch.cuda.set_device", None)
    args = Callbacks([Witness], config, total_steps=6, model=torch.nn.Linear(2, 2)).args
    assert isinstance(args, TrainingArguments)
    assert args.output_dir == config.output_dir
    assert (args.learning_rate, args.max_steps, args.logging_steps) == (3e-4, 6, 1)
    assert (args.eval_steps, args.save_steps, args.num_train_epochs) == (2, 3, 2)
    assert args.device == torch.device("cpu")
    assert (args.world_size, args.process_index, args.n_gpu) == (1, 0, 0)
    assert args.should_save
    assert json.loads(args.to_json_string())["learning_rate"] == 3e-4
    assert args.to_sanitized_dict()["max_steps"] == 6


@pytest.mark.filterwarnings("ignore")
def test_transformers_own_callbacks_run(config, tmp_path, capsys):
    kinds = [PrinterCallback, ProgressCallback, DefaultFlowCallback, TensorBoardCallback]
    callbacks = Callbacks([*kinds, Witness()], config, total_steps=6, model=None)
    assert run(callbacks, {2: 0.1}) == [1, 2, 3, 4, 5, 6]
    assert "'sft/loss': '0.5'" in capsys.readouterr().out
    assert list((tmp_path / "sft").rglob("events.out.tfevents*"))
    witness = callbacks.callbacks[-1]
    # the default flow evaluates every 2 and saves every 3 steps, and both at the last
    assert [s for name, s, *_ in witness.seen if name == "on_evaluate"] == [2, 4, 6]
    assert [s for name, s, *_ in witness.seen if name == "on_save"] == [3, 6]


def test_callbacks_can_stop_evaluate_and_save(config):
    class Eager(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = control.should_save = state.global_step == 2
            control.should_training_stop = state.global_step == 4
            return control

    witness = Witness()
    callbacks = Callbacks([Eager, witness], config, total_steps=6)
    assert run(callbacks) == [1, 2, 3, 4]
    assert [s for name, s, *_ in witness.seen if name == "on_evaluate"] == [2]
    assert [s for name, s, *_ in witness.seen if name == "on_save"] == [2]
    assert witness.events[-1] == "train_end"


@pytest.mark.parametrize("metric", ["score", "eval/score", "eval_score"])
def test_early_stopping_waits_for_its_patience(config, metric):
    early = EarlyStoppingCallback(early_stopping_patience=2)
    callbacks = Callbacks([early], config, total_steps=6, metric=metric)
    # better, worse, worse
    assert run(callbacks, {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.45, 5: 0.9}) == [1, 2, 3, 4]
    assert callbacks.trainer_state.best_metric == 0.5
    assert callbacks.trainer_state.best_global_step == 2


def test_losses_are_better_lower_and_nan_is_never_the_best(config):
    early = EarlyStoppingCallback(early_stopping_patience=1)
    callbacks = Callbacks([early], config, total_steps=6, metric="loss")
    callbacks.train_begin()
    stopped = []
    for step, loss in enumerate([float("nan"), 3.0, 2.0, 2.5], start=1):
        callbacks.evaluate(step, {"eval/loss": loss})
        stopped.append(callbacks.should_stop)
    assert stopped == [False, False, False, True]
    assert callbacks.trainer_state.best_metric == 2.0


class Counter(TrainerCallback, ExportableState):
    def __init__(self, step=1):
        self.step, self.count = step, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += self.step

    def state(self):
        return {"args": {"step": self.step}, "attributes": {"count": self.count}}


def test_callbacks_go_on_where_they_were(config):
    scores = {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.2}

    def make():
        parts = [Counter(1), EarlyStoppingCallback(3), Witness(), Counter(10)]
        return Callbacks(parts, config, total_steps=6)

    whole = make()
    assert run(whole, scores) == [1, 2, 3, 4]

    first = make()
    first.train_begin()
    for step in (1, 2):
        first.step_begin(step)
        first.step_end(step)
        first.log(step, {"sft/loss": 1.0 / step})
        first.evaluate(step, {"eval/score": scores[step]})
    saved = json.loads(json.dumps(first.state()))
    second = make()
    second.load_state(saved)
    assert run(second, scores, done=2) == [3, 4]
    assert [c.count for c in (second.callbacks[0], second.callbacks[3])] == [4, 40]
    assert second.trainer_state.log_history == whole.trainer_state.log_history
    assert second.state() == whole.state()

    third = make()  # killed between the last checkpoint and the end
    third.load_state(whole.state())
    assert run(third, scores, done=4) == []


def test_other_callbacks_than_at_the_checkpoint_are_no_fault(config):
    old = Callbacks([Counter], config, total_steps=6)
    old.step_end(1)
    new = Callbacks([Witness, Counter, Counter], config, total_steps=6)
    new.load_state(old.state())
    assert [c.count for c in new.callbacks[1:]] == [1, 0]
    none = Callbacks([], config, total_steps=6)
    none.load_state(old.state())
    new.load_state(none.state())


@pytest.mark.parametrize("event", ["on_init_end", "on_step_end", "on_log", "on_evaluate"])
def test_a_callback_that_raises_is_named_with_its_event(config, event):
    class Clumsy(TrainerCallback):
        pass

    def fail(self, args, state, control, **kwargs):
        raise KeyError("lost")

    setattr(Clumsy, event, fail)
    with pytest.raises(RunError) as caught:
        run(Callbacks([Witness, Clumsy], config, total_steps=6), {1: 0.1})
    message = str(caught.value)
    assert f"callback Clumsy failed in {event} at step" in message
    assert "KeyError: 'lost'" in message
    assert "the same command resumes" in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_is_no_callback_is_refused(config):
    class Needy(TrainerCallback):
        def __init__(self, path): ...

    for odd, said in ((print, "no callback"), (dict, "dict is no callback"), (Needy, r"Needy\(")):
        with pytest.raises(RunError, match=said):
            Callbacks([odd], config, total_steps=6)


def test_a_run_without_callbacks_keeps_no_state(config):
    callbacks = Callbacks([], config, total_steps=6)
    assert run(callbacks, {1: 0.1}) == [1, 2, 3, 4, 5, 6]
    assert callbacks.state() == {}


def test_epochs_cannot_be_cut_short_and_that_is_said(config, capsys):
    class Hasty(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 1

    assert len(run(Callbacks([Hasty], config, total_steps=6))) == 6
    assert "should_epoch_stop" in capsys.readouterr().err
