"""What can be checked of a recipe's later stages before the first one trains for hours.

Each check calls what the stage itself will call, so that the sentences are the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from marlhf.config.build import field_names
from marlhf.config.rl import RLConfig
from marlhf.config.user_code import check_name
from marlhf.core import parser_of
from marlhf.data import Loaded, load_data
from marlhf.environments import ChatTokens, find_environment
from marlhf.errors import MarlhfError, SettingError
from marlhf.models.adapter_files import import_peft, quantization
from marlhf.models.base import ModelError, pick_device
from marlhf.models.facts import locate, model_facts
from marlhf.models.load import check_embeddings, load_tokenizer
from marlhf.models.tiny import MAX_POSITIONS
from marlhf.reward import RewardFunction, import_function
from marlhf.runs.layout import MODEL, facts_of, read_object
from marlhf.runs.write import is_finished
from marlhf.runtime.optim import import_adamw_8bit
from marlhf.runtime.progress import say
from marlhf.runtime.publish import check_push, hub_name
from marlhf.runtime.sources import check_tokenizer, reward_items
from marlhf.runtime.stage import NO_OBJECTS
from marlhf.runtime.trackers import check_installed
from marlhf.spans.parser import build_parser
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.recipe import ConfigError, Stage, make_segmenters
from marlhf.train.state_values import check_answers


def check_stages(stages: Sequence[Stage]) -> list[Stage]:
    """Refuse a recipe of which a stage could not run, with every reason at once.

    Returns the stages with their segmenters. The user's own code, rewards and segmenters, is
    imported last: a recipe that is refused for another reason runs none of it.
    """
    stages = make_segmenters(stages, user_code=False)
    to_run = [stage for stage in stages if not is_finished(Path(stage.config.output_dir))]
    read: dict[str, Loaded] = {}  # stages often share their rows
    located: dict[str, str] = {}  # models by name, and what keeps them from being loaded
    made_by = {f"{stage.config.output_dir}/model": stage for stage in stages}
    _raise_problems((s, check) for s in to_run for check in _checks(s, made_by, read, located))
    code = {name: None for stage in stages for name in getattr(stage.config, "code", ())}
    if code:
        say(f"This recipe runs code of yours: {', '.join(code)}")
    _raise_problems((s, check) for s in to_run for check in _checks_of_user_code(s, read))
    return make_segmenters(stages)


def _raise_problems(checks: Iterable[tuple[Stage, Callable[[], object]]]) -> None:
    problems: list[str] = []
    for stage, check in checks:
        try:
            check()
        except MarlhfError as error:
            problems.append(f"{stage.name}: {error}")
    if problems:
        stages = "1 stage" if len(problems) == 1 else "Some stages"
        lines = "\n  ".join(dict.fromkeys(problems))
        raise ConfigError(f"{stages} could not run; nothing has been trained yet.\n  {lines}")


def _checks(
    stage: Stage, made_by: Mapping[str, Stage], read: dict[str, Loaded], located: dict[str, str]
) -> Iterator[Callable[[], object]]:
    config = stage.config
    yield lambda: pick_device(config.device)
    yield lambda: check_installed(config.report_to)
    if config.push_to_hub:
        yield lambda: check_push(hub_name(config), private=config.hub_private)
    models = [name for name in field_names(type(config)) if name.endswith("model")]
    for setting in sorted({*models} - {"reward_model", "process_model"}):
        yield lambda setting=setting: _check_model(
            getattr(config, setting) or "", setting, made_by, located
        )
    yield lambda: _check_length(config, made_by)
    yield lambda: _check_tokenizers(config, made_by)
    if config.optimizer == "adamw_8bit":
        yield import_adamw_8bit
    if config.lora is not None:
        yield import_peft
        yield lambda: quantization(config.lora)
    yield lambda: _check_data(stage, read, made_by)
    if isinstance(config, RLConfig):
        yield lambda: _check_rewards(config, made_by, located)
        yield lambda: _check_engine(config)
        if config.environment and not _is_user_class(config.environment):
            yield lambda: _check_environment(config, made_by)
        if parser := parser_of(config.segmenter):
            yield lambda: build_parser(parser)


def _checks_of_user_code(stage: Stage, read: dict[str, Loaded]) -> Iterator[Callable[[], object]]:
    config = stage.config
    names = [*map(str, getattr(config, "reward_funcs", ())), getattr(config, "reward_model", "")]
    for name in names:
        if ":" in name:
            yield lambda name=name: _check_function(name, config.code, read[_data_key(stage)])
    if _is_user_class(getattr(config, "environment", "")):
        yield lambda: find_environment(
            config.environment, config.code, **config.environment_options
        )


def _is_user_class(environment: str) -> bool:
    return ":" in environment and not environment.startswith("textarena:")


def _check_environment(config: RLConfig, made_by: Mapping[str, Stage]) -> None:
    """The environment exists, and the model's chat template can talk to it."""
    find_environment(config.environment, config.code, **config.environment_options)
    policy, remote = first_model(config.model, made_by), config.trust_remote_code
    tokenizer = load_tokenizer(policy, trust_remote_code=remote, setting="model")
    ChatTokens(tokenizer, raw=config.raw_turns).check()


def _check_function(name: str, code: Sequence[str], rows: Loaded) -> None:
    function = RewardFunction(import_function(name, code), cast(Any, None), name=name)
    function.check([*rows.train, *rows.eval])


def _data_key(stage: Stage) -> str:
    return f"{stage.config.data} {_part(stage)} {stage.config.columns}"


def _part(stage: Stage) -> str:
    return getattr(stage.config, "part", facts_of(stage.kind).part)  # a setting of DPO's


def _check_data(stage: Stage, read: dict[str, Loaded], made_by: Mapping[str, Stage]) -> None:
    """The rows can be read, have the columns that the stage needs, and fill a batch."""
    config, key = stage.config, _data_key(stage)
    if key not in read:
        there = tuple(x for x in config.data.more if str(Path(x).parent / MODEL) not in made_by)
        data = replace(config.data, more=there)
        read[key] = load_data(data, _part(stage), needs=config.columns)
    loaded = read[key]
    if len(loaded.train) < config.batch_size:
        raise SettingError(
            f"There are {len(loaded.train)} rows for a batch of {config.batch_size}, of "
            f"{loaded.counts.read} that were read.{config.data.explain_shares()} Lower "
            "batch_size, or give more data."
        )
    if isinstance(config, PPOConfig) and config.values == "answer":
        check_answers(loaded.train, config)


def _check_model(
    name: str, setting: str, made_by: Mapping[str, Stage], located: dict[str, str]
) -> None:
    """A model that is named is here or on the hub, or another stage will leave it behind."""
    folders = [Path(stage.config.output_dir) for stage in made_by.values()]
    if name in ("", "tiny") or any(folder in Path(name).parents for folder in folders):
        return
    if name not in located:
        located[name] = ""
        try:
            locate(name, setting)
        except ModelError as error:
            located[name] = str(error)
    if located[name]:
        raise SettingError(located[name])


def first_model(name: str, made_by: Mapping[str, Stage]) -> str:
    """What the stages begin with that lead to a model."""
    while name in made_by:
        name = made_by[name].config.model
    return name


def _check_tokenizers(config: Any, made_by: Mapping[str, Stage]) -> None:
    """Reference and critic read the policy's tokens, and have an embedding for each."""
    policy = first_model(config.model, made_by)
    for role, setting in (("reference", "ref_model"), ("critic", "critic_model")):
        name = first_model(getattr(config, setting, None) or config.model, made_by)
        if name == policy:
            continue
        remote = config.trust_remote_code
        tokenizer = load_tokenizer(policy, trust_remote_code=remote, setting="model")
        facts = model_facts(name, trust_remote_code=remote, setting=setting)
        check_tokenizer(role, facts, policy, tokenizer)
        if rows := read_object(Path(name) / "config.json").get("vocab_size"):
            check_embeddings(rows, tokenizer, f"the {role}")


def _check_length(config: Any, made_by: Mapping[str, Stage]) -> None:
    """A response alone fits into the positions of the model that the stages begin with."""
    name = first_model(config.model, made_by)
    file = Path(name).expanduser() / "config.json"
    if name == "tiny":
        limit = MAX_POSITIONS
    elif file.is_file():
        limit = read_object(file).get("max_position_embeddings")
    else:
        return
    longest = config.sampling.max_new_tokens if isinstance(config, RLConfig) else 0
    if limit is not None and longest >= limit:
        raise SettingError(
            f"Responses of {longest} tokens leave no room for a prompt: the model has {limit} "
            "positions. Lower sampling.max_new_tokens."
        )


def _check_rewards(config: RLConfig, made_by: Mapping[str, Stage], located: dict[str, str]) -> None:
    for item in reward_items(config, NO_OBJECTS):
        name = str(item.item)
        if ":" in name:  # the user's own, which is imported last
            check_name(name)
        elif name not in made_by and "/" not in name and not Path(name).exists() and name != "tiny":
            raise SettingError(
                f"{name!r} is neither a folder nor a hub name (owner/name). A function of yours "
                f"is written module:name, as in my_rewards:{name}."
            )
        elif _writes_text(name, made_by) and not config.random_reward_head:
            raise SettingError(
                f"The stage {made_by[name].name} trains a language model, which cannot score. "
                "Name the stage that trains a reward model."
            )
        elif name in made_by and (made_by[name].kind == "prm") != item.is_process:
            trains, wanted = ("a process", "process_model"), ("an outcome", "reward_model")
            kind, other = wanted if item.is_process else trains
            raise SettingError(
                f"The stage {made_by[name].name} trains {kind} reward model. Name it as {other}."
            )
        else:
            _check_model(name, item.setting, made_by, located)


def _writes_text(name: str, made_by: Mapping[str, Stage]) -> bool:
    return name in made_by and facts_of(made_by[name].kind).writes_text


def _check_engine(config: RLConfig) -> None:
    here = config.engine == "vllm" and not config.vllm_url
    if here and importlib.util.find_spec("vllm") is None:
        raise SettingError(
            "engine: vllm needs vLLM, which is not installed. Run `pip install 'marlhf[vllm]'`, "
            "set vllm_url to a server, or leave out engine."
        )
