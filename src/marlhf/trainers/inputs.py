"""What trainers are given in Python: models or paths, rewards, data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from marlhf.data import Row
from marlhf.environments import environment_from
from marlhf.errors import SettingError
from marlhf.models.adapter_files import digest as weights_digest
from marlhf.models.base import Model, Tokenizer
from marlhf.runs.layout import GIVEN

EPISODES_ASIDE = 64
"""To evaluate, where there is no data to hold out from."""

EMPTY = [{"role": "user", "content": ""}]
"""The prompt where an environment says all of it."""

Dataset = Iterable[Mapping[str, Any]]
"""A `datasets.Dataset`, a list of dicts, or anything else that gives records."""


def path_or_model(given: Any, name: str) -> tuple[str, Model | None]:
    """What was given as a path, or else as a model."""
    if given is None or isinstance(given, PreTrainedModel):
        return "", given
    if isinstance(given, (str, Path)):
        return str(given), None
    is_peft = hasattr(given, "peft_config")
    plain = " Give the plain model, and the adapter as peft_config." if is_peft else ""
    raise TypeError(
        f"{name} must be a path or a model of transformers; got {type(given).__name__}.{plain}"
    )


def check_writes(model: Model, name: str) -> None:
    if model.get_output_embeddings() is None:
        raise TypeError(
            f"{name} is a {type(model).__name__}, which cannot write. Load it with "
            "AutoModelForCausalLM."
        )


def reward_parts(
    given: Any, args: Any, *, unrewarded: bool = False
) -> tuple[list[Any] | None, Any]:
    """What scores, one by one, and the settings with its names.

    The environment, if there is one, may give no rewards of its own (`unrewarded`).
    """
    named = [name for name in (args.reward_model, *args.reward_funcs) if name]
    scored = named or args.process_model
    if given is None and (scored or not (args.needs_rewards or unrewarded)):
        return None, args
    rewards = list(given) if isinstance(given, (list, tuple)) else [given]
    if given is None or not rewards:
        raise SettingError(
            "Nothing scores the responses. Pass reward_funcs: a reward model's path, a model, "
            "or a function f(prompts, completions, **columns); or an environment_factory whose "
            "environments have get_reward."
        )
    if named:
        raise SettingError(
            f"args name {', '.join(named)} as rewards, and reward_funcs is given as well. Put all "
            "of them into reward_funcs."
        )
    rewards = [str(item) if isinstance(item, Path) else item for item in rewards]
    for item in rewards:
        if not isinstance(item, str) and not callable(item):
            raise TypeError(
                "reward_funcs must be paths, models or functions f(prompts, completions, "
                f"**columns); got {item!r}."
            )
    first = rewards[0] if isinstance(rewards[0], str) and ":" not in rewards[0] else ""
    names = tuple(map(_reward_name, rewards[1:] if first else rewards))
    return rewards, replace(args, reward_model=first, reward_funcs=names)


def environment_of(tools: Any, factory: Any, args: Any) -> tuple[Any, Any]:
    """What makes an environment of tools or a factory, if given; and args with its name."""
    if tools is None and factory is None:
        return None, args
    if args.environment:
        raise SettingError(
            f"args name the environment {args.environment}, and tools or an environment_factory "
            "are given as well. Give one of them."
        )
    made = environment_from(tools, factory)
    given = list(tools or ()) if factory is None else [factory]
    names = ", ".join(getattr(item, "__name__", type(item).__name__) for item in given)
    return made, replace(args, environment=f"{GIVEN} {names}")


def unrewarded(tools: Any, factory: Any) -> bool:
    """Whether tools, or TRL's environments without `get_reward`, certainly give no rewards."""
    factories = list(factory.values()) if isinstance(factory, Mapping) else [factory]
    if factory is None:
        return tools is not None
    classes = [each for each in factories if isinstance(each, type)]
    paying = [c for c in classes if hasattr(c, "get_reward") or hasattr(c, "step")]
    return len(classes) == len(factories) and not paying


def without_data(factory: Any, args: Any) -> tuple[Dataset, Any]:
    """Empty prompts, where an environment opens each conversation; args that repeat them."""
    if isinstance(factory, Mapping):
        raise SettingError(
            "Several environments need a train_dataset: its column `environment` says which of "
            "them a row is for."
        )
    if args.num_steps is None:
        raise SettingError(
            "Without a train_dataset the environment opens each conversation, and num_steps "
            "(max_steps in TRL) says how many steps to train. Set it in args."
        )
    kept = args.batch_size * min(args.num_steps, 100)
    rows = [{"prompt": EMPTY}] * (kept + EPISODES_ASIDE)
    data = replace(args.data, eval_size=EPISODES_ASIDE)
    return rows, replace(args, num_epochs=args.num_steps, data=data)


def _reward_name(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, PreTrainedModel):
        return f"{GIVEN} {by_weights(item)}"
    return getattr(item, "__name__", type(item).__name__)


def by_weights(model: Model) -> str:
    return f"{type(model).__name__} {weights_digest(model)[:12]}"


def to_records(
    dataset: Dataset, tokenizer: Tokenizer | None, name: str, *, opened: bool = False
) -> Iterator[Mapping[str, Any]]:
    """Records with the columns that marlhf knows: TRL's other names and forms are put in order.

    Where an environment opens conversations (`opened`), there may be no prompt.
    """
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(str, dataset))
        raise TypeError(f"{name} is a dictionary with {splits}. Pass one of them.")
    if isinstance(dataset, (str, Path)):
        raise TypeError(
            f"{name} is a path. Set data=DataConfig(path={str(dataset)!r}) in args, or load the "
            "rows yourself."
        )
    for number, record in enumerate(dataset, start=1):
        if not isinstance(record, Mapping):
            raise TypeError(
                f"Row {number} of {name} is a {type(record).__name__}, not a dictionary. Pass a "
                "datasets.Dataset or a list of dictionaries."
            )
        record = dict(record)
        if "prompt" not in record and "input_ids" in record:  # prompts already in tokens
            if tokenizer is None:
                raise SettingError(
                    "The prompts are given as input_ids. Pass processing_class, the tokenizer that "
                    "they are of."
                )
            ids = [int(i) for i in record.pop("input_ids")]
            mask = record.pop("attention_mask", None)
            if mask is not None:
                ids = [i for i, real in zip(ids, mask) if real]
            record["prompt_ids"], record["prompt"] = ids, tokenizer.decode(ids)
        if opened and "prompt" not in record:
            record["prompt"] = EMPTY
        yield record


def fingerprint(rows: Sequence[Row]) -> str:
    """A short name for what is learnt from: not the columns, which reward functions read."""
    digest = hashlib.sha256()
    for row in rows:
        text = repr((row.prompt, row.chosen, row.rejected))
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:12]


def short_name(model: Any) -> str:
    if isinstance(model, (str, Path)):
        name = str(model).rstrip("/").removesuffix("/model").rpartition("/")[2]
        return name.removesuffix(".gguf")
    return type(model).__name__
