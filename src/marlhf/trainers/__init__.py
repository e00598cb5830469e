"""Trainers in TRL's manner: a constructor that takes models, data and functions, and `.train()`.

Each is a thin layer over the loop of its stage in `marlhf.train`, the one that the command line
runs as well; a run folder is the same whichever way it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from marlhf.config.rl import RLConfig
from marlhf.errors import SettingError
from marlhf.models.base import Model, Tokenizer
from marlhf.runs.layout import CRITIC, GIVEN
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.stages import METHODS
from marlhf.trainers.base import Trainer
from marlhf.trainers.inputs import (
    Dataset,
    check_writes,
    environment_of,
    path_or_model,
    reward_parts,
    unrewarded,
)


class SFTTrainer(Trainer):
    """Supervised fine-tuning on `prompt` and `chosen` (or `completion`).

    >>> rows = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(20)]
    >>> trainer = SFTTrainer(model="tiny", train_dataset=rows)
    >>> trainer.args.output_dir
    'runs/tiny-sft'
    """

    stage = "sft"


class RewardTrainer(Trainer):
    """A reward model from `prompt`, `chosen` and `rejected`.

    >>> rows = [{"prompt": f"{n}?", "chosen": "Hello", "rejected": "no"} for n in range(20)]
    >>> trainer = RewardTrainer(model="tiny", train_dataset=rows[:16], eval_dataset=rows[16:])
    >>> type(trainer.model).__name__
    'LlamaForSequenceClassification'
    """

    stage = "reward"


class PRMTrainer(Trainer):
    """A process reward model from `prompt`, `completions` (steps) and their `labels`.

    >>> rows = [{"prompt": f"{n}+1=", "completions": ["a", "b"], "labels": [True, n < 9]}
    ...         for n in range(20)]
    >>> PRMTrainer(model="tiny", train_dataset=rows).args.step_separator
    '\\n'
    """

    stage = "prm"


class DPOTrainer(Trainer):
    """Direct preference optimisation on `prompt`, `chosen` and `rejected`.

    >>> from marlhf import DPOConfig
    >>> DPOTrainer(model="tiny", args=DPOConfig(beta=0.2)).args.beta
    0.2
    """

    stage = "dpo"

    def __init__(
        self,
        model: str | Path | Model | None = None,
        ref_model: str | Path | Model | None = None,
        args: Any = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Tokenizer | str | None = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] | None = None,
        **unknown: NoReturn,
    ) -> None:
        data = train_dataset, eval_dataset, processing_class
        super().__init__(model, args, *data, peft_config, callbacks, ref_model=ref_model, **unknown)

    def _own_objects(
        self, args: Any, ref_model: str | Path | Model | None = None
    ) -> tuple[Any, dict[str, Any]]:
        path, reference = path_or_model(ref_model, "ref_model")
        return replace(args, ref_model=path) if path else args, {"ref_model": reference}


class MacroPPOTrainer(Trainer):
    """PPO over macro actions; with `segmenter=NGram(1)` ordinary PPO.

    `reward_funcs` is a path, a reward model, a function `f(prompts, completions, **columns)` that
    returns a number (or None) for each completion, or a list of these, weighted by
    `args.reward_weights`. `value_model` is where the critic starts.

    With `tools`, functions that the model may call, or `environment_factory`, a class as TRL's
    GRPOTrainer takes it or one with `reset` and `step`, a response is a conversation.

    >>> def brevity(completions, **_):
    ...     return [-len(completion) / 100 for completion in completions]
    >>> trainer = MacroPPOTrainer(model="tiny", reward_funcs=brevity)
    >>> trainer.args.reward_funcs
    ('brevity',)
    """

    stage = "ppo"

    def __init__(
        self,
        model: str | Path | Model | None = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Tokenizer | str | None = None,
        reward_processing_classes: Tokenizer | Sequence[Tokenizer | None] | None = None,
        segmenter: Callable[..., Any] | None = None,
        ref_model: str | Path | Model | None = None,
        value_model: str | Path | Model | None = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        **unknown: NoReturn,
    ) -> None:
        data = train_dataset, eval_dataset, processing_class
        super().__init__(
            model,
            args,
            *data,
            peft_config,
            callbacks,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            segmenter=segmenter,
            ref_model=ref_model,
            value_model=value_model,
            tools=tools,
            environment_factory=environment_factory,
            **unknown,
        )

    def _own_objects(
        self,
        args: Any,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        segmenter: Any = None,
        ref_model: Any = None,
        value_model: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
    ) -> tuple[Any, dict[str, Any]]:
        if segmenter is not None:
            if not callable(segmenter):
                raise TypeError(
                    f"segmenter must be a rule such as NGram(5); got {segmenter!r}. Any function "
                    "from Responses to starts [B, T] is one."
                )
            args = replace(args, segmenter=segmenter)
        path, reference = path_or_model(ref_model, "ref_model")
        if path:
            args = replace(args, ref_model=path)
        if reference is not None:
            check_writes(reference, "ref_model")
        path, critic = path_or_model(value_model, "value_model")
        if value_model is not None and not isinstance(args, PPOConfig):
            self._refuse(["value_model"], ())
        if path:
            args = replace(args, critic_model=path)
        environment, args = environment_of(tools, environment_factory, args)
        rewards, args = reward_parts(
            reward_funcs, args, unrewarded=unrewarded(tools, environment_factory)
        )
        tokenizers = reward_processing_classes
        if tokenizers is not None and not isinstance(tokenizers, (list, tuple)):
            tokenizers = [tokenizers]
        if tokenizers is not None and len(tokenizers) != len(rewards or ()):
            raise SettingError(
                f"There are {len(rewards or ())} reward_funcs but {len(tokenizers)} "
                "reward_processing_classes. Give one each, None for functions."
            )
        return args, {
            "reward_funcs": rewards,
            "reward_tokenizers": tokenizers,
            "environment": environment,
            "ref_model": reference,
            "critic_model": critic,
        }

    @property
    def value_model(self) -> Model:
        """The critic: the one given, which trains in place, or the one that training left."""
        given = self.objects.critic_model
        if given is not None and not self._adapted:
            return given
        folder = self._trained().with_name(CRITIC)
        if not folder.is_dir():
            raise AttributeError(f"{type(self).__name__} has no critic in {folder.parent}.")
        return self._load_trained(folder, scalar=True)


class RLOOTrainer(MacroPPOTrainer):
    """REINFORCE with a leave-one-out baseline: no critic.

    >>> def brevity(completions, **_):
    ...     return [-len(completion) / 100 for completion in completions]
    >>> from marlhf import RLOOConfig
    >>> args = RLOOConfig(num_samples=8)
    >>> RLOOTrainer(model="tiny", reward_funcs=brevity, args=args).args.num_samples
    8
    """

    stage = "rloo"


class GRPOTrainer(RLOOTrainer):
    """Group relative policy optimisation: RLOO's loop with GRPO's settings.

    >>> def brevity(completions, **_):
    ...     return [-len(completion) / 100 for completion in completions]
    >>> GRPOTrainer(model="tiny", reward_funcs=brevity).args.baseline
    'group'
    """

    stage = "grpo"


class OnlineDPOTrainer(MacroPPOTrainer):
    """DPO on pairs that the policy samples, labelled by rewards or by a judge.

    `judge` is openai:MODEL, model:PATH or reward:PATH, or one of TRL's judges of pairs.

    >>> trainer = OnlineDPOTrainer(model="tiny", judge="openai:gpt-4o-mini")
    >>> trainer.args.judge, trainer.args.num_samples
    ('openai:gpt-4o-mini', 2)
    """

    stage = "online-dpo"

    def __init__(
        self,
        model: str | Path | Model | None = None,
        reward_funcs: Any = None,
        args: Any = None,
        *others: Any,
        judge: Any = None,
        **options: Any,
    ) -> None:
        named = isinstance(judge, str)
        if judge is not None and not named and not hasattr(judge, "judge"):
            raise TypeError(
                "judge must be a name such as openai:gpt-4o-mini, or an object with "
                f"`judge(prompts, completions)`; got {judge!r}."
            )
        if judge is not None:
            name = judge if named else f"{GIVEN} {type(judge).__name__}"
            args = replace(self._arguments(args, model), judge=name)
        super().__init__(model, reward_funcs, args, *others, **options)
        self.objects = replace(self.objects, judge=None if named else judge)


PPOTrainer = MacroPPOTrainer
"""The name that TRL's users look for."""


def __getattr__(name: str) -> Any:
    """A method of the table that has no class here needs none: its trainer is made of its line."""
    for stage, method in METHODS.items():
        if name == method.config.__name__.removesuffix("Config") + "Trainer":
            base = MacroPPOTrainer if issubclass(method.config, RLConfig) else Trainer
            return type(name, (base,), {"stage": stage, "__doc__": method.help})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
