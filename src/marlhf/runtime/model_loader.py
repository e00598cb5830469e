"""Load what `model_sources.py` has decided: whole models, and adapters on frozen bases."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marlhf.config.model import LoRA
from marlhf.config.stage import StageConfig
from marlhf.models.adapter_config import Task, import_peft, quantization
from marlhf.models.adapters import FrozenBaseModel, cast_linear_layers, frozen_dtype
from marlhf.models.base import Model
from marlhf.models.heads import with_scalar_head
from marlhf.models.load import load_policy, load_scalar
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.model_sources import OnBase, Source, WholeModel, policy_source, scalar_source
from marlhf.runtime.objects import GivenObjects
from marlhf.runtime.progress import say, warn

NOT_COMPILED = {"gold"}
"""Roles with so few passes that compiling would take longer than it saves."""


def load_trained_policy(config: StageConfig, objects: GivenObjects, world: World) -> Model:
    """The language model of a stage that trains one, not yet on its device."""
    return ModelLoader(config, world).read("policy", policy_source(config, objects), trains=True)


def load_trained_scalar(config: StageConfig, objects: GivenObjects, world: World) -> Model:
    """The scalar model of a stage that trains one, not yet on its device."""
    return ModelLoader(config, world).read("reward", scalar_source(config, objects), trains=True)


def load_sources(
    sources: Mapping[str, Source], trained: set[str], config: StageConfig, world: World
) -> dict[str, Model]:
    """All roles' models, on their devices; those not in `trained` are frozen.

    Each goes to its device before the next is read, so the host need not hold them all. Copies of
    a given object come first: compiling or sharding the object would change what is copied.
    """
    loader = ModelLoader(config, world, sources.values())
    models: dict[str, Model] = {}

    def place(role: str) -> None:
        compiled = config.compile and role not in NOT_COMPILED
        placed = world.place(
            models[role],
            config.precision,
            compiled=compiled,
            unpadded=config.lora is None,  # adapted models are padded, and the others match them
        )
        models[role] = placed if role in trained else placed.requires_grad_(False)

    late: list[str] = []
    for role in sorted(sources, key=lambda role: not sources[role].copied):
        source, trains = sources[role], role in trained
        models[role] = loader.read(role, source, trains=trains)
        if not trains:
            loader.shrink(models[role], source)
        if world.sharded and isinstance(source, OnBase):
            late.append(role)  # no adapter can be put into a base that is sharded already
        else:
            place(role)
    for role in late:
        place(role)
    return models


class ModelLoader:
    """Reads sources, and keeps what several of them share.

    That is frozen bases, and on a CPU the weights that more than one role starts from: these are
    read once and copied. With a GPU or in shards the copy would be one more model on the host.
    """

    def __init__(self, config: StageConfig, world: World, sources: Iterable[Source] = ()) -> None:
        self.config = config
        self.world = world
        self.lora = config.lora or LoRA()
        self._bases: dict[WholeModel, FrozenBaseModel] = {}
        self._read: dict[WholeModel, Model] = {}
        named = [s for s in sources if isinstance(s, WholeModel) and isinstance(s.origin, str)]
        copies = world.device.type == "cpu" and not world.sharded
        self._roles = Counter(s for s in named if copies and named.count(s) > 1)

    def read(self, role: str, source: Source, *, trains: bool) -> Model:
        """A role's model, as it is before the first step."""
        if isinstance(source, WholeModel):
            checkpointing = trains and self.config.gradient_checkpointing
            return self._read_whole(source, checkpointing=checkpointing)
        # The first adapter's warnings are about settings that all adapters of the run share.
        with _printed_warnings() if not self._bases else _no_warnings():
            base = self._base(source.base)
            if trains and isinstance(source.adapter, Path):
                say(f"{role}: starts from the adapter {source.adapter}, with its rank and layers")
            if source.head == "language":
                if source.adapter is None:
                    return base.plain_language_model()
                build = base.language_model
            elif source.adapter is None:
                return base.plain_scalar_model()
            else:
                build = base.scalar_model
            return build(source.adapter, role, seed=self.config.seed, trainable=trains)

    def shrink(self, model: Model, source: Source) -> None:
        """Store a frozen model's matrices in the dtype that they are used in anyway.

        Under autocast that changes no bit of its output, and halves its memory. A user's own
        object keeps its weights, and bases are stored so already.
        """
        if isinstance(source, OnBase) or self.world.sharded:
            return
        dtype = frozen_dtype(self.world.device, self.config.precision)
        if dtype is not None and (isinstance(source.origin, str) or source.copied):
            cast_linear_layers(model, dtype)

    def _read_whole(self, source: WholeModel, **options: Any) -> Model:
        origin = source.origin
        if source.copied:
            origin = _copy(origin, source.head, source.seed)
        elif source in self._roles:
            origin = self._read_once(source)
        return self._load(source, origin, **options)

    def _read_once(self, source: WholeModel) -> Model:
        """A copy for each role but the last, which gets the model that was read."""
        if source not in self._read:
            self._read[source] = self._load(source, source.origin)
        self._roles[source] -= 1
        return copy.deepcopy(self._read[source]) if self._roles[source] else self._read.pop(source)

    def _load(self, source: WholeModel, origin: str | Model, **options: Any) -> Model:
        load = load_scalar if source.head == "scalar" else load_policy
        options["trust_remote_code"] = self.config.trust_remote_code
        return load(origin, seed=source.seed, setting=source.setting, **options)

    def _base(self, source: WholeModel) -> FrozenBaseModel:
        if source not in self._bases:
            self._bases[source] = self._open_base(source)
        return self._bases[source]

    def _open_base(self, source: WholeModel) -> FrozenBaseModel:
        import_peft()  # before anything slow
        if self.world.sharded and self.lora.quantize != "none":
            raise RunError(
                "lora.quantize does not work with parallel: fsdp, which shards weights in float32. "
                "Leave out quantize, or use parallel: data."
            )
        module = self._read_whole(
            source,
            checkpointing=self.config.gradient_checkpointing,
            quantization=quantization(self.lora),
            device=self.world.device,
        )
        # Where an object came from: its weights are checked against that by their digest.
        name = source.origin if isinstance(source.origin, str) else source.origin.name_or_path
        dtype = frozen_dtype(self.world.device, self.config.precision)
        if self.world.sharded:
            dtype = None  # FSDP casts what it gathers, and shards one dtype at a time
        base = FrozenBaseModel(module, name, linear_dtype=dtype, merge=self.lora.merge)
        if self.lora.quantize != "none" and not base.quantized:
            raise RunError(
                f"lora.quantize: {self.lora.quantize} works for models that load from a folder or "
                f"from the hub, and {name or 'the model given here'} does not. Leave out quantize."
            )
        return base


def _copy(model: Model, head: Task, seed: int) -> Model:
    """A copy of a given object; a language model as a scalar one gets a fresh head."""
    if head == "scalar" and not hasattr(model, "score"):
        return with_scalar_head(model, seed)
    return copy.deepcopy(model).requires_grad_(True)


@contextlib.contextmanager
def _printed_warnings() -> Iterator[None]:
    """Python warnings of the models' side as lines of our own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            warn(str(warning.message))


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
