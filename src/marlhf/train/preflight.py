"""What can be checked of a recipe's later stages before the first one trains for hours.

Each check calls what the stage itself will call, so that the sentences are the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from marlhf.config.build import field_names
from marlhf.config.rl import RLConfig
from marlhf.core import parser_of
from marlhf.data import Loaded, load_data
from marlhf.errors import MarlhfError, SettingError
from marlhf.models.adapter_config import import_peft, quantization
from marlhf.models.base import pick_device
from marlhf.models.tiny import MAX_POSITIONS
from marlhf.reward import RewardFunction, import_function
from marlhf.runs.layout import read_object
from marlhf.runs.stage_facts import facts_of
from marlhf.runs.write import is_finished
from marlhf.runtime.model_sources import reward_items
from marlhf.runtime.objects import NO_OBJECTS
from marlhf.runtime.trackers import check_installed
from marlhf.spans.parser import build_parser
from marlhf.train.recipe import ConfigError, Stage


def check_stages(stages: Sequence[Stage]) -> None:
    """Refuse a recipe of which a stage could not run, with every reason at once."""
    problems: list[str] = []
    read: dict[str, Loaded] = {}  # stages often share their rows
    made_by = {f"{stage.config.output_dir}/model": stage for stage in stages}
    for stage in stages:
        if is_finished(Path(stage.config.output_dir)):
            continue
        for check in _checks(stage, made_by, read):
            try:
                check()
            except MarlhfError as error:
                problems.append(f"{stage.name}: {error}")
    if problems:
        several = "1 stage could not run" if len(problems) == 1 else "Some stages could not run"
        lines = "\n  ".join(dict.fromkeys(problems))
        raise ConfigError(f"{several}; nothing has been trained yet.\n  {lines}")


def _checks(
    stage: Stage, made_by: Mapping[str, Stage], read: dict[str, Loaded]
) -> Iterator[Callable[[], object]]:
    config = stage.config
    yield lambda: pick_device(config.device)
    yield lambda: check_installed(config.report_to)
    models = [name for name in field_names(type(config)) if name.endswith("model")]
    for name in sorted({*models} - {"reward_model"}):
        yield lambda name=name: _check_model(getattr(config, name) or "", made_by)
    yield lambda: _check_length(config, made_by)
    if config.lora is not None:
        yield import_peft
        yield lambda: quantization(config.lora)
    loaded: list[Loaded] = []
    yield lambda: loaded.append(_check_data(stage, read))
    if isinstance(config, RLConfig):
        yield lambda: _check_rewards(config, made_by, loaded)
        yield lambda: _check_engine(config)
        if parser := parser_of(config.segmenter):
            yield lambda: build_parser(parser)


def _check_data(stage: Stage, read: dict[str, Loaded]) -> Loaded:
    """The rows can be read, have the columns that the stage needs, and fill a batch."""
    config = stage.config
    part = getattr(config, "part", facts_of(stage.kind).part)  # a setting of DPO's
    key = f"{config.data} {part} {config.columns}"
    if key not in read:  # the first stage is next to need its rows; others would hold memory
        read[key] = load_data(config.data, part, needs=config.columns, keep=not read)
    loaded = read[key]
    if len(loaded.train) < config.batch_size:
        raise SettingError(
            f"There are {len(loaded.train)} rows for a batch of {config.batch_size}. Lower "
            "batch_size, or give more data."
        )
    return loaded


def _check_model(name: str, made_by: Mapping[str, Stage]) -> None:
    """A folder or file that is named is there, or another stage will leave it behind."""
    is_path = name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf")
    if name not in made_by and is_path and not Path(name).expanduser().exists():
        raise SettingError(f"There is no model {name}. Correct the path.")


def _check_length(config: Any, made_by: Mapping[str, Stage]) -> None:
    """A response alone fits into the positions of the model that the stages begin with."""
    name = config.model
    while name in made_by:
        name = made_by[name].config.model
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


def _check_rewards(config: RLConfig, made_by: Mapping[str, Stage], loaded: list[Loaded]) -> None:
    for item in reward_items(config, NO_OBJECTS):
        name = str(item.item)
        if ":" in name:
            function = RewardFunction(import_function(name), cast(Any, None), name=name)
            function.check([row for rows in loaded for row in rows.train + rows.eval])
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
        else:
            _check_model(name, made_by)


def _writes_text(name: str, made_by: Mapping[str, Stage]) -> bool:
    return name in made_by and facts_of(made_by[name].kind).writes_text


def _check_engine(config: RLConfig) -> None:
    here = config.engine == "vllm" and not config.vllm_url
    if here and importlib.util.find_spec("vllm") is None:
        raise SettingError(
            "engine: vllm needs vLLM, which is not installed. Run `pip install 'marlhf[vllm]'`, "
            "set vllm_url to a server, or leave out engine."
        )
