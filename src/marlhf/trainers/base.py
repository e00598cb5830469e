"""What all trainers share: from arguments to a config and objects, and the model afterwards."""

from __future__ import annotations

import difflib
import shutil
import warnings
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from marlhf.config.build import field_names
from marlhf.config.settings import hint_for
from marlhf.config.stage import DEFAULT_DATA, StageConfig, refuse_unknown
from marlhf.data import DataConfig, Row, held_out, prompt_key, rows_from_records
from marlhf.errors import SettingError
from marlhf.models.adapter_files import import_peft
from marlhf.models.base import Model, Tokenizer
from marlhf.models.facts import adapter_base, find_adapter, saved_members
from marlhf.models.load import load_policy, load_scalar, load_tokenizer
from marlhf.runs.atomic import read_jsonl
from marlhf.runs.layout import METRICS, RunError, facts_of, read_config
from marlhf.runs.write import ReadOnlyRunFolder, RunFolder
from marlhf.runtime.checkpoint import list_checkpoints
from marlhf.runtime.progress import say
from marlhf.runtime.publish import push, write_card
from marlhf.runtime.stage import GivenObjects
from marlhf.train.stages import METHODS
from marlhf.trainers.inputs import (
    GIVEN,
    Dataset,
    by_weights,
    check_writes,
    fingerprint,
    path_or_model,
    short_name,
    to_records,
    without_data,
)

ELSEWHERE = {
    "reward_model": "Pass it as reward_funcs.",
    "tokenizer": "Pass it as processing_class.",
    "data_collator": "Batches are put together for you; leave it out.",
    "optimizers": "Set learning_rate, schedule and weight_decay in args.",
    "value_model": "There is no critic to start; leave it out.",
}
"""Arguments that TRL's trainers have, and what to do about them here."""


def _arguments_of(cls: type) -> Iterable[str]:
    return getattr(vars(cls).get("__init__"), "__annotations__", ())


class Trainer:
    """The constructor that all trainers have, `.train()`, and what it leaves."""

    stage: str
    """The method's name in `marlhf.train.stages`."""

    def __init__(
        self,
        model: str | Path | Model | None = None,
        args: Any = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Tokenizer | str | None = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] | None = None,
        **own: Any,
    ) -> None:
        known = {name for cls in type(self).__mro__ for name in _arguments_of(cls)}
        self._refuse(own, known - {"return", "own", "unknown", "options", "others"})
        path, self._given = path_or_model(model, "model")
        args, objects = self._own_objects(self._arguments(args, model), **own)
        if self._given is not None and not self.scalar:
            check_writes(self._given, "model")
        if not path and self._given is None and not args.model:
            raise SettingError("There is nothing to train. Pass model, a path or a model.")
        if self._given is not None and processing_class is None:
            raise SettingError(
                "A model given as an object comes without its tokenizer. Pass it as "
                "processing_class."
            )
        tokenizer = load_tokenizer(processing_class) if processing_class is not None else None
        train_rows = eval_rows = None
        factory = own.get("environment_factory")
        if train_dataset is None and factory is not None and args.data is DEFAULT_DATA:
            train_dataset, args = without_data(factory, args)
        if train_dataset is not None:
            train_rows, eval_rows = self._rows(
                train_dataset, eval_dataset, tokenizer, args, opened=factory is not None
            )
            kept = ("max_prompt_tokens", "too_long", "eval_size", "seed")
            name = f"{GIVEN} {len(train_rows)} rows, {fingerprint(train_rows + eval_rows)}"
            data = {key: getattr(args.data, key) for key in kept}
            args = replace(args, data=DataConfig(source="local", path=name, **data))
        elif eval_dataset is not None:
            raise SettingError("eval_dataset is given without train_dataset. Pass both.")
        self.args = replace(args, model=path) if path else args
        self._trained_model: Model | None = None
        self.objects = GivenObjects(
            model=self._given,
            tokenizer=tokenizer,
            train_rows=train_rows,
            eval_rows=eval_rows,
            peft_config=peft_config,
            callbacks=tuple(callbacks or ()),
            **objects,
        )

    def _own_objects(self, args: Any) -> tuple[Any, dict[str, Any]]:
        """Arguments that only this trainer has: those that are names go into `args`."""
        return args, {}

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end; an unfinished run in output_dir resumes where it was.

        `resume_from_checkpoint=False` refuses to resume instead. Returns the step reached, the
        mean loss of the steps and the run's summary, as transformers' trainers do.
        """
        self._check_resume(resume_from_checkpoint)
        before = self._folder()
        if self.objects.train_rows is None and self.args.data is DEFAULT_DATA:
            raise SettingError(
                "There is nothing to learn from. Pass train_dataset, or set data in args: "
                'DataConfig(path="rows.jsonl"), or DataConfig(source="toy") to try without data.'
            )
        self._name_models(before)
        METHODS[self.stage].train(self.args, self.objects)
        self._trained_model = None
        if before.finished and self._given is not None and not self._adapted:  # nothing to train
            self._given.load_state_dict(self._load(str(before.model)).state_dict())
        summary = self._folder().state["summary"]
        loss = training_loss(self.state)
        return TrainOutput(int(summary["steps"]), loss, {**summary, "train_loss": loss})

    @property
    def state(self) -> TrainerState:
        """The steps so far: `log_history` has the metrics of each, and of each evaluation."""
        return trainer_state(Path(self.args.output_dir))

    def save_state(self) -> None:
        """Write `state` to `trainer_state.json` in output_dir."""
        if not self.state.log_history:
            raise RunError(f"There is no step in {self.args.output_dir} yet. Call train() first.")
        self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def evaluate(self, eval_dataset: Dataset | None = None) -> dict[str, float]:
        """The trained model's metrics on the held-out rows, as its last evaluation found them.

        The rows and the random numbers are the same each time, and so would be the results.
        """
        if eval_dataset is not None:
            raise SettingError(
                "evaluate() is of the rows held out while training: pass eval_dataset to the "
                "trainer. For other rows, run `marlhf evaluate RUN --path FILE`."
            )
        self._trained()
        return last_evaluation(self.state)

    def add_callback(self, callback: Any) -> None:
        """Call this one, too, from the next `train` on: an object, or a class to make one of."""
        self._set_callbacks([*self.objects.callbacks, callback])

    def remove_callback(self, callback: Any) -> None:
        """Leave out a callback: the object itself, or the first of a class."""
        given = list(self.objects.callbacks)
        same = [c for c in given if c is callback or type(c) is callback]
        if not same:
            raise SettingError(
                f"There is no callback {callback!r} to remove. There are: {given or 'none'}."
            )
        given.remove(same[0])
        self._set_callbacks(given)

    def _set_callbacks(self, callbacks: Sequence[Any]) -> None:
        self.objects = replace(self.objects, callbacks=tuple(callbacks))

    @property
    def model(self) -> Model:
        """The model: the one given, which trains in place, or the one that training left.

        With LoRA an object that was given stays as it was, and the trained model is another: a
        PeftModel, or with `lora.merge` a plain model.
        """
        if self._given is not None and not self._adapted:
            return self._given
        if self._trained_model is None:
            folder = self._folder().model
            if self._given is not None and not folder.is_dir():
                return self._given
            trained = folder.is_dir()
            self._trained_model = (
                self._load_trained(folder) if trained else self._load(self.args.model)
            )
        return self._trained_model

    def _load_trained(self, folder: Path, *, scalar: bool = False) -> Model:
        """What training saved. An adapter stays one, as in TRL, unless `lora.merge` merges it."""
        load = load_scalar if scalar or self.scalar else load_policy
        adapter = find_adapter(folder)
        merge = self.args.lora is not None and self.args.lora.merge
        # The critic's base is a policy object's backbone with a head, which is on no disk.
        baseless = scalar and self._given is not None
        if adapter is None or merge or baseless or saved_members(adapter) > 1:
            return load(str(folder))
        source = adapter_base(adapter) if self._given is None else deepcopy(self._given)
        with warnings.catch_warnings():
            # A copy of an object that was given still has the layers that training put into it,
            # switched off; peft warns of them.
            warnings.simplefilter("ignore", UserWarning)
            return import_peft().PeftModel.from_pretrained(load(source), str(adapter))

    @property
    def _config_class(self) -> type[StageConfig]:
        return METHODS[self.stage].config

    @property
    def scalar(self) -> bool:
        """Whether it trains a reward model, which gives numbers."""
        return not facts_of(self.stage).writes_text

    @property
    def _adapted(self) -> bool:
        return self.objects.peft_config is not None or self.args.lora is not None

    @property
    def processing_class(self) -> Tokenizer:
        """The tokenizer."""
        return self.objects.tokenizer or load_tokenizer(self.args.model)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model, with tokenizer and card, to another folder."""
        source = self._trained()
        if output_dir is not None and Path(output_dir).resolve() != source.parent.resolve():
            shutil.copytree(source, output_dir, dirs_exist_ok=True)

    def push_to_hub(
        self,
        commit_message: str = "Upload a model trained with marlhf",
        *,
        repo_id: str = "",
        private: bool | None = None,
        token: str | None = None,
        dataset_name: str = "",
    ) -> str:
        """Upload the trained model with its card; returns its address."""
        folder, run = self._trained(), self._folder()
        name = repo_id or self.args.hub_model_id or run.path.name
        write_card(run, repo_id=name, dataset=dataset_name)
        hidden = self.args.hub_private if private is None else private
        return push(folder, name, private=hidden, token=token, message=commit_message)

    def _arguments(self, args: Any, model: Any) -> Any:
        wanted = self._config_class
        args = wanted() if args is None else args
        if not isinstance(args, wanted):
            kind = f"{type(args).__module__}.{type(args).__qualname__}"
            raise TypeError(
                f"{type(self).__name__} takes args of marlhf.{wanted.__name__}; got {kind}."
            )
        if args.output_dir:
            return args
        return replace(args, output_dir=f"runs/{short_name(model or args.model)}-{self.stage}")

    def _refuse(self, given: Iterable[str], known: Iterable[str]) -> None:
        settings, hints = field_names(self._config_class), dict[str, str]()
        for name in given:
            if name in known:
                continue
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It has {', '.join(sorted(known))}."
            if name in settings:
                hint = "Settings go into args."
            elif hint_for(name):
                hint = f"Settings go into args. {hint_for(name, settings)}".rstrip()
            hints[name] = ELSEWHERE.get(name, hint)
        refuse_unknown(type(self).__name__, "argument", hints)

    def _rows(
        self,
        train: Dataset,
        evaluation: Dataset | None,
        tokenizer: Tokenizer | None,
        args: Any,
        *,
        opened: bool,
    ) -> tuple[list[Row], list[Row]]:
        def read(dataset: Dataset, name: str) -> list[Row]:
            records = to_records(dataset, tokenizer, name, opened=opened)
            rows, counts = rows_from_records(records, needs=args.columns, name=name, opened=opened)
            say(f"{name}: {counts}")
            return rows

        rows = read(train, "train_dataset")
        if evaluation is not None:
            return rows, read(evaluation, "eval_dataset")
        size, seed = args.data.eval_size, args.data.seed
        if (
            opened and len({prompt_key(row) for row in rows}) == 1
        ):  # what differs is the environment
            places = held_out([Row(str(place)) for place in range(len(rows))], size, seed)
            rows, aside = ([rows[int(str(row.prompt))] for row in part] for part in places)
        else:
            rows, aside = held_out(rows, size, seed)
        say(f"eval_dataset is not given: {len(aside)} rows are held out (data.eval_size)")
        return rows, aside

    def _name_models(self, before: RunFolder) -> None:
        """Models given as objects go into the config by their weights.

        They train in place. When a run fails and is resumed with the same objects, their
        weights are not those that it began with, and a reference copied from them would be another.
        """
        if self._given is None:
            return
        given = (self._given, self.objects.ref_model, self.objects.critic_model)
        name = f"{GIVEN} {', '.join(by_weights(model) for model in given if model is not None)}"
        recorded = read_config(before.path).get("model", "")
        if recorded != name and recorded.startswith(GIVEN):
            if not before.finished:
                raise RunError(
                    f"The models given do not have the weights that the run in {before.path} began "
                    "with: they are trained in place. Load them again to resume the run; or "
                    "choose another output_dir."
                )
            name = recorded
        self.args = replace(self.args, model=name)

    def _check_resume(self, wanted: bool | str | None) -> None:
        path = Path(self.args.output_dir)
        saved = list_checkpoints(self._folder().checkpoints)
        if wanted is False and saved and not self._folder().finished:
            raise RunError(
                f"{path} holds an unfinished run. Resume it (resume_from_checkpoint=True), "
                "delete the folder, or choose another output_dir."
            )
        if wanted is True and not saved:
            say(f"{path} has no checkpoint yet: training starts from the beginning")
        if isinstance(wanted, str) and (not saved or Path(wanted).resolve() != saved[-1].resolve()):
            last = f"The last is {saved[-1]}." if saved else "There is none."
            raise RunError(
                f"marlhf resumes from the last checkpoint of output_dir, not from {wanted}. {last}"
            )

    def _load(self, path: str) -> Model:
        return load_scalar(path) if self.scalar else load_policy(path)

    def _folder(self) -> RunFolder:
        return ReadOnlyRunFolder(self.args.output_dir, self.stage, self.args)

    def _trained(self) -> Path:
        folder = self._folder().model
        if not folder.is_dir():
            raise RunError(f"There is no trained model in {folder.parent}. Call train() first.")
        return folder


def trainer_state(folder: Path) -> TrainerState:
    """The steps and evaluations of a run, under the names that transformers gives them."""
    history = [_renamed(row) for row in read_jsonl(folder / METRICS).rows]
    last = max((row["step"] for row in history), default=0)
    return TrainerState(global_step=last, max_steps=last, log_history=history)


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """`eval/score` is `eval_score` there, and the loss of any method is `loss`."""
    named = {key.replace("eval/", "eval_", 1): x for key, x in row.items() if key != "kind"}
    losses = [x for key, x in row.items() if key.endswith(("/loss", "/policy_loss"))]
    return named | ({"loss": losses[0]} if losses and row["kind"] == "train" else {})


def training_loss(state: TrainerState) -> float:
    """The mean loss of the steps taken; NaN before the first."""
    losses = [row["loss"] for row in state.log_history if "loss" in row]
    return sum(losses) / len(losses) if losses else float("nan")


def last_evaluation(state: TrainerState) -> dict[str, float]:
    """The metrics of the last evaluation on held-out rows; nothing before it."""
    rows = (row for row in reversed(state.log_history) if any("eval_" in key for key in row))
    return {key: x for key, x in next(rows, {}).items() if key.startswith("eval_")}
