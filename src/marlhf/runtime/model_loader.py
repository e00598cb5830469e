"""Loading the models of a run from their sources: whole models, and adapters on frozen bases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from marlhf.config.stage import LoRA, StageConfig
from marlhf.models.adapter_files import import_peft, quantization
from marlhf.models.adapters import AdaptedModel, FrozenBaseModel
from marlhf.models.base import (
    Head,
    Model,
    cast_linear_layers,
    cast_trained_weights,
    frozen_dtype,
    offload,
)
from marlhf.models.facts import model_facts
from marlhf.models.heads import average_heads
from marlhf.models.load import load_model
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.progress import say
from marlhf.runtime.sources import OnBase, Source, WholeModel, trained_source
from marlhf.runtime.stage import GivenObjects

NOT_COMPILED = {"gold"}
"""Roles with so few passes that compiling would take longer than it saves."""


def load_trained(
    head: Head, config: StageConfig, objects: GivenObjects, world: World, members: int = 1
) -> Model:
    """The model of a stage that trains one, not yet on its device."""
    role = "policy" if head == "language" else "reward"
    origin = config.model if objects.model is None else objects.model
    facts = model_facts(origin, trust_remote_code=config.trust_remote_code, setting="model")
    adapter = objects.peft_config or config.lora
    source = trained_source(head, facts, adapter, config.seed, members)
    return ModelLoader(config, world).read(role, source, trains=True)


load_trained_policy = partial(load_trained, "language")
load_trained_scalar = partial(load_trained, "scalar")


def load_sources(
    sources: Mapping[str, Source], trained: set[str], config: StageConfig, world: World
) -> dict[str, Model]:
    """All roles' models, on their devices; those not in `trained` are frozen.

    Each goes to its device before the next is read, so the host need not hold them all. Copies of
    a given object come first: compiling or sharding the object would change what is copied. With
    sharded weights adapted models are placed last: no adapter fits into a base in shards.
    """
    loader = ModelLoader(config, world)
    models: dict[str, Model] = {}
    late: list[str] = []
    for role in sorted(sources, key=lambda role: not sources[role].copied):
        models[role] = loader.read(role, sources[role], trains=role in trained)
        if role == "critic":
            # Random values differ from token to token by more than returns do, and everything that
            # lambda below 1 trusts them with is noise, for many steps.
            if sources[role].fresh_head:
                models[role].score.weight.data.zero_()
            average_heads(models[role])  # where it starts from an ensemble
        if world.sharded and isinstance(sources[role], OnBase):
            late.append(role)
        else:
            models[role] = loader.place(role, models[role], trains=role in trained)
    for role in late:
        models[role] = loader.place(role, models[role], trains=role in trained)
    return models


class ModelLoader:
    """Reads sources, and keeps the frozen bases that several of them share."""

    def __init__(self, config: StageConfig, world: World) -> None:
        self.config, self.world = config, world
        self.lora = config.lora or LoRA()
        if world.sharded and self.lora.quantize != "none":
            raise RunError(
                "lora.quantize does not work with parallel: fsdp, which shards weights in float32. "
                "Leave out quantize, or use parallel: data."
            )
        self.quantization = quantization(self.lora)
        self.checkpointing, self.seed = config.gradient_checkpointing is True, config.seed
        # What autocast would cast frozen matrices to at every pass. FSDP casts what it gathers.
        self.dtype = None if world.sharded else frozen_dtype(world.device, config.precision)
        if config.trained_weights == "bfloat16" and self.dtype is None:
            raise RunError(
                "trained_weights: bfloat16 needs arithmetic in bfloat16, and this device computes "
                "in float32. Set precision: bfloat16, or leave trained_weights out."
            )
        self._bases: dict[WholeModel, FrozenBaseModel] = {}

    def read(self, role: str, source: Source, *, trains: bool) -> Model:
        """A role's model, as it is before the first step."""
        if isinstance(source, OnBase):
            if source.base not in self._bases:
                self._bases[source.base] = self._read_base(source.base)
            base = self._bases[source.base]
            if trains and isinstance(source.adapter, Path):
                say(f"{role}: starts from the adapter {source.adapter}, with its rank and layers")
            build: Any = base.scalar_model if source.head == "scalar" else base.language_model
            if source.members > 1:
                build = partial(base.ensemble, members=source.members)
            return build(source.adapter, role, seed=self.seed, trainable=trains)
        model = _read_whole(source, checkpointing=trains and self.checkpointing)
        # In half the memory, with the same bits. A user's own object keeps its weights.
        ours = isinstance(source.facts.model, str) or source.copied
        if self.dtype is not None and ours and not trains:
            cast_linear_layers(model, self.dtype)
        if trains and self.config.trained_weights == "bfloat16":
            cast_trained_weights(model)
        return model

    def place(self, role: str, model: Model, *, trains: bool) -> Model:
        """A role's model on its device, ready for passes; frozen unless it trains."""
        placed = self.world.place(
            model,
            self.config.precision,
            compiled=self.config.compile and role not in NOT_COMPILED,
            # Adapted models are padded, and the others match them.
            unpadded=self.config.lora is None,
        )
        if trains:
            return placed
        on_gpu, whole = self.world.device.type == "cuda", not isinstance(placed, AdaptedModel)
        placed.requires_grad_(False)
        if on_gpu and whole and getattr(self.config, "offload", False):
            offload(placed)
        return placed

    def _read_base(self, source: WholeModel) -> FrozenBaseModel:
        import_peft()  # before anything slow
        module = _read_whole(
            source,
            checkpointing=self.checkpointing,
            quantization=self.quantization,
            device=self.world.device,
        )
        # Where an object came from: its weights are checked against that by their digest.
        origin = source.facts.model
        name = origin if isinstance(origin, str) else origin.name_or_path
        base = FrozenBaseModel(module, name, linear_dtype=self.dtype, merge=self.lora.merge)
        if self.lora.quantize != "none" and not base.quantized:
            raise RunError(
                f"lora.quantize: {self.lora.quantize} works for models that load from a folder or "
                f"from the hub, and {name or 'the model given here'} does not. Leave out quantize."
            )
        return base


def _read_whole(source: WholeModel, **options: Any) -> Model:
    how = {"seed": source.seed, "copied": source.copied}
    return load_model(source.head, source.facts, **how, **options)
