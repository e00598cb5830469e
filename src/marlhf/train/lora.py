"""Models as a config asks for them: whole, or as adapters on a frozen base."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from marlhf.configs.stage import StageConfig
from marlhf.models.adapter_files import adapter_base, import_peft
from marlhf.models.adapters import FrozenBase, LoRA, frozen_dtype, quantization
from marlhf.models.base import Model
from marlhf.models.load import is_scalar, load_policy, load_scalar
from marlhf.runs.write import RunError
from marlhf.train.distributed import World
from marlhf.train.objects import GivenObjects
from marlhf.train.progress import say, warn


def adapter_settings(config: StageConfig, objects: GivenObjects) -> Any:
    """What adapters are made from: a user's peft config, a recipe's `lora`, or None."""
    return objects.peft_config if objects.peft_config is not None else config.lora


def open_base(
    load: Callable[..., Model], source: str | Model, config: StageConfig, world: World
) -> FrozenBase:
    """A frozen model to put adapters on; that of an adapter's folder is its base."""
    import_peft()  # before anything slow
    if world.sharded:
        raise RunError(
            "LoRA does not work with parallel: fsdp yet. Adapters are small, so use parallel: "
            "data, which keeps the frozen base on each process."
        )
    lora = config.lora or LoRA()
    if isinstance(source, str):
        source = place = adapter_base(source) or source
    else:
        place = source.name_or_path  # where it came from; its weights are checked against that
    module = load(
        source,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        checkpointing=config.gradient_checkpointing,
        quantization=quantization(lora),
        device=world.device,
    )
    matrices = frozen_dtype(world.device, config.precision)
    base = FrozenBase(module, place, matrices=matrices, merge=lora.merge)
    if lora.quantize != "none" and not base.quantized:
        raise RunError(
            f"lora.quantize: {lora.quantize} works for models that load from a folder or from the "
            f"hub, and {place or 'the model given here'} does not. Leave out quantize."
        )
    return base


def saved_adapter(source: str | Model) -> Path | None:
    """The adapter that a model's folder is, if it is one."""
    found = isinstance(source, str) and adapter_base(source) is not None
    return Path(source) if found else None


def start_from(source: str | Model, settings: Any) -> Any:
    """A saved adapter goes on from where it was; anything else gets a fresh one."""
    return saved_adapter(source) or settings


def load_trained_policy(config: StageConfig, objects: GivenObjects, world: World) -> Model:
    """The language model of a stage that trains one."""
    source, settings = objects.model or config.model, adapter_settings(config, objects)
    if settings is not None:
        with spoken_warnings():
            base = open_base(load_policy, source, config, world)
            _announce(source)
            return base.language(start_from(source, settings), seed=config.seed)
    return load_policy(
        source,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        checkpointing=config.gradient_checkpointing,
    )


def load_trained_scalar(config: StageConfig, objects: GivenObjects, world: World) -> Model:
    """The scalar model of a stage that trains one."""
    source, settings = objects.model or config.model, adapter_settings(config, objects)
    if settings is not None:
        # A language model stays one beneath the adapter, so that a policy may share it.
        remote = config.trust_remote_code
        named = isinstance(source, str)
        scalar = is_scalar(source, trust_remote_code=remote) if named else hasattr(source, "score")
        with spoken_warnings():
            base = open_base(load_scalar if scalar else load_policy, source, config, world)
            _announce(source)
            return base.scalar(start_from(source, settings), "reward", seed=config.seed)
    return load_scalar(
        source,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        checkpointing=config.gradient_checkpointing,
    )


def _announce(source: str | Model) -> None:
    if saved_adapter(source):
        say(f"going on with the adapter {source}: its own rank, alpha and layers hold")


@contextlib.contextmanager
def spoken_warnings() -> Iterator[None]:
    """Warnings of the models' side as lines of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            warn(str(warning.message))
