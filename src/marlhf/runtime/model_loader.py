"""The models of a run: where each role's weights come from, and loading them.

A run has roles: policy, reference, critic, reward models. `rl_sources` decides where each role's
weights come from, by the config and the objects given in Python, before any weights are read.
`load_sources` then loads them: whole models, and adapters on frozen bases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from marlhf.config.rl import RLConfig
from marlhf.config.stage import LoRA, StageConfig
from marlhf.models.adapter_files import import_peft, quantization
from marlhf.models.adapters import AdapterInit, FrozenBaseModel, cast_linear_layers, frozen_dtype
from marlhf.models.base import Head, Model, Tokenizer, offload
from marlhf.models.facts import ModelFacts, is_scalar_adapter, model_facts
from marlhf.models.heads import average_heads, with_scalar_head
from marlhf.models.load import has_same_tokenizer, load_model
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.optim import cast_trained_weights
from marlhf.runtime.progress import say, warn
from marlhf.runtime.stage import GivenObjects

PROCESS = "process"
"""The role of a process reward model."""
NOT_COMPILED = {"gold"}
"""Roles with so few passes that compiling would take longer than it saves."""


@dataclass(frozen=True)
class WholeModel:
    """A model with all its weights."""

    facts: ModelFacts
    head: Head
    copied: bool = False  # a copy of a given object: another role has the object itself
    seed: int = 0  # of a fresh scalar head, and of `tiny`

    @property
    def fresh_head(self) -> bool:
        """Whether its scalar head is drawn anew: what it starts from has none."""
        return not self.facts.is_scalar


@dataclass(frozen=True)
class OnBase:
    """A frozen base with an adapter. Roles whose bases are equal share one in memory."""

    base: WholeModel
    head: Head
    adapter: AdapterInit  # settings of a fresh one, the folder of a saved one, or None
    members: int = 1  # of an ensemble, with an adapter each

    @property
    def copied(self) -> bool:
        return self.base.copied

    @property
    def fresh_head(self) -> bool:
        saved = isinstance(self.adapter, Path) and is_scalar_adapter(self.adapter)
        return not saved and self.base.fresh_head


Source = WholeModel | OnBase


@dataclass(frozen=True)
class RewardItem:
    """One of the things that score: a model or a function, with its weight."""

    role: str
    item: str | Model | Callable[..., Any]
    tokenizer: Tokenizer | None  # the reward model's own, where it was given
    weight: float
    setting: str  # what named it

    @property
    def is_process(self) -> bool:
        """Whether it scores steps, and not whole responses."""
        return self.role == PROCESS

    @property
    def is_model(self) -> bool:
        named = isinstance(self.item, str) and ":" not in self.item
        return named or isinstance(self.item, nn.Module)


def reward_items(config: RLConfig, objects: GivenObjects) -> list[RewardItem]:
    """What scores the responses, in the order of `reward_weights`."""
    items = objects.reward_funcs
    if items is None:
        items = [*([config.reward_model] if config.reward_model else []), *config.reward_funcs]
    if not items and config.needs_rewards:
        raise RunError(
            "Nothing scores the responses. Set reward_model to a reward model, process_model to a "
            "process reward model, or reward_funcs to functions of yours, such as "
            "[my_rewards:brevity]."
        )
    weights = config.reward_weights or (1.0,) * len(items)
    if len(weights) != len(items):
        raise RunError(
            f"There are {len(items)} rewards but {len(weights)} reward_weights. Give one each."
        )
    tokenizers = objects.reward_tokenizers or [None] * len(items)
    scorers: list[RewardItem] = []
    for item, tokenizer, weight in zip(items, tokenizers, weights, strict=True):
        named = isinstance(item, str) and item == config.reward_model
        setting = "reward_model" if named else "reward_funcs"
        role = f"reward-{len(scorers)}"
        scorers.append(RewardItem(role, item, tokenizer, weight, setting))
    if config.process_model:
        process = config.process_model, None, config.process_weight, "process_model"
        scorers.append(RewardItem(PROCESS, *process))
    return scorers


def trained_source(
    head: Head, config: StageConfig, objects: GivenObjects, members: int = 1
) -> Source:
    """The model that a stage starts from: a policy, or a scalar model for a reward stage."""
    origin = config.model if objects.model is None else objects.model
    settings = objects.peft_config or config.lora
    facts = model_facts(origin, trust_remote_code=config.trust_remote_code, setting="model")
    if settings is None:
        return WholeModel(facts, head, seed=config.seed)
    # It stays a language model beneath the adapter, so that a policy can share it.
    base_head = "scalar" if head == "scalar" and facts.is_scalar else "language"
    base = WholeModel(facts.base, base_head, seed=config.seed)
    return OnBase(base, head, facts.saved or settings, members)


def rl_sources(
    config: RLConfig,
    objects: GivenObjects,
    tokenizer: Tokenizer,
    rewards: list[RewardItem],
    *,
    critic: bool,
) -> dict[str, Source]:
    """Sources by role: policy, reference, critic, reward-0, reward-1, ... and gold."""
    facts_of = cache(partial(model_facts, trust_remote_code=config.trust_remote_code))
    policy = trained_source("language", config, objects)
    rules = _Rules(config, objects, tokenizer, policy, facts_of)
    sources = {"policy": rules.policy, "reference": rules.reference()}
    if critic:
        sources["critic"] = rules.critic(rewards)
    for reward in rewards:
        if reward.is_model:
            sources[reward.role] = rules.reward(reward, sources.get("critic"))
    if config.gold_model:
        sources["gold"] = rules.gold(config.gold_model)
    return sources


def check_tokenizer(role: str, facts: ModelFacts, policy: str, tokenizer: Tokenizer) -> None:
    """Models that read the policy's tokens must have its tokenizer."""
    remote, setting = facts.trust_remote_code, facts.setting
    if not has_same_tokenizer(facts.model, tokenizer, trust_remote_code=remote, setting=setting):
        # A critic that starts from the reward model needs a start of its own, for reward models
        # may have other tokenizers.
        from_reward = setting == "reward_model"
        otherwise = "" if from_reward else ", or leave it out"
        raise RunError(
            f"The {role} {facts.model} does not have the tokenizer of {policy}: it would read "
            f"other tokens. Set {'critic_model' if from_reward else setting} to a model with the "
            f"policy's tokenizer, such as the SFT model{otherwise}."
        )


@dataclass(frozen=True)
class _Rules:
    """Where reference, critic and reward models come from, given the policy's source."""

    config: Any  # RLConfig, with the settings of a critic where the method has one
    objects: GivenObjects
    tokenizer: Tokenizer
    policy: Source
    facts_of: Callable[..., ModelFacts]
    """Of a model and the setting that named it, read once."""

    def reference(self) -> Source:
        """What is named or given, else the policy as it is before the first step."""
        config, objects, policy = self.config, self.objects, self.policy
        if objects.ref_model is not None:
            if objects.ref_model is objects.model:
                raise RunError(
                    "The reference is the policy itself, so it would learn as well. Leave "
                    "ref_model out, or load it a second time."
                )
            return WholeModel(self.facts_of(objects.ref_model), "language")
        if config.ref_model is None and isinstance(policy, OnBase):
            # A fresh adapter changes nothing, so the plain base is the reference. A policy that
            # starts from a saved adapter needs a second, frozen copy of that adapter.
            saved = policy.adapter if isinstance(policy.adapter, Path) else None
            return OnBase(policy.base, "language", saved)
        if (
            config.ref_model is None
            and isinstance(policy, WholeModel)
            and objects.model is not None
        ):
            return WholeModel(policy.facts, "language", copied=True)
        facts = self.facts_of(config.ref_model or config.model, setting="ref_model")
        if facts.model != config.model or objects.tokenizer is not None:  # else it is read there
            self._check_tokenizer("reference", facts)
        return WholeModel(facts, "language", seed=config.seed)

    def critic(self, rewards: list[RewardItem]) -> Source:
        """The critic: whole, or with LoRA an adapter and a head on a frozen base.

        That base is the policy's where the critic starts from the policy, or where
        `lora.shared_base` asks for it. Otherwise the critic has a base of its own.
        """
        policy = self.policy
        if isinstance(policy, OnBase) and self._shares_base:
            return OnBase(policy.base, "scalar", self._shared_critic_adapter() or policy.adapter)
        start = self._critic_start(rewards)
        if isinstance(start, OnBase):
            return start
        if isinstance(start.facts.model, str):
            self._check_tokenizer("critic", start.facts)
        if isinstance(policy, WholeModel):
            return start
        adapter = start.facts.saved or self.objects.peft_config or self.config.lora
        return OnBase(replace(start, facts=start.facts.base), "scalar", adapter)

    def reward(self, reward: RewardItem, critic: Source | None) -> Source:
        """A reward model: whole, or on a base that another role has loaded anyway."""
        facts = self.facts_of(reward.item, setting=reward.setting)
        if not isinstance(reward.item, str):
            facts.refuse_process_model()
            return WholeModel(facts, "scalar")
        if reward.is_process:
            _check_steps(facts)
        else:
            self._check_scores(facts)
        if isinstance(self.policy, OnBase) and self._shares_base and facts.scalar:
            return OnBase(self.policy.base, "scalar", facts.scalar, facts.members)
        return self._scorer(facts, critic)

    def gold(self, path: str) -> Source:
        """The reward model that judges held-out responses."""
        facts = self.facts_of(path, setting="gold_model")
        self._check_scores(facts)
        return self._scorer(facts)

    def _scorer(self, facts: ModelFacts, critic: Source | None = None) -> Source:
        """A frozen scalar model: whole, or on a base of its own or the critic's."""
        base = WholeModel(facts.base, "scalar", seed=self.config.seed)
        if facts.members > 1 or (isinstance(critic, OnBase) and critic.base == base):
            return OnBase(base, "scalar", facts.saved, facts.members)
        return WholeModel(facts, "scalar")

    def _check_scores(self, facts: ModelFacts) -> None:
        """A language model has no scalar head, and a random one would score at random."""
        if not facts.is_scalar and not self.config.random_reward_head:
            raise RunError(
                f"{facts.name} is a language model without a scalar head, so its scores "
                "would come from random weights. Train a reward model from it with `marlhf "
                "reward`, or set random_reward_head: true where scores do not matter."
            )
        facts.refuse_process_model()

    def _critic_start(self, rewards: list[RewardItem]) -> Source:
        """Given or named, else a reward model that reads the same tokens, else the policy."""
        config, policy = self.config, self.policy
        if self.objects.critic_model is not None:
            return WholeModel(self.facts_of(self.objects.critic_model), "scalar")
        named = self._named_critic
        if named and named.model != config.model:
            return WholeModel(named, "scalar", seed=config.seed)
        is_adapted = isinstance(policy, OnBase)
        for reward in rewards if not named else ():
            given = isinstance(reward.item, nn.Module)
            # A second base for a reward model that is only named would cost memory.
            if not reward.is_model or reward.is_process or (is_adapted and not given):
                continue
            own = reward.tokenizer or (self.tokenizer if given else reward.item)
            remote, setting = config.trust_remote_code, reward.setting
            if has_same_tokenizer(own, self.tokenizer, trust_remote_code=remote, setting=setting):
                facts = self.facts_of(reward.item, setting=setting)
                return WholeModel(facts, "scalar", given, 0 if given else config.seed)
        if isinstance(policy, OnBase):
            return OnBase(policy.base, "scalar", policy.adapter)
        return replace(policy, head="scalar", copied=not isinstance(policy.facts.model, str))

    def _shared_critic_adapter(self) -> Path | None:
        """The saved adapter that a critic on the policy's base starts from, if there is one."""
        config, named = self.config, self._named_critic
        if self.objects.critic_model is not None:
            raise RunError(
                "With lora.shared_base the critic shares the policy's base, but a critic of its "
                "own is given. Leave it out, or set lora.shared_base: false."
            )
        if named is None:
            return None
        # The adapter beside a merged language model is no start for a critic; one named is.
        if adapter := named.scalar or named.saved:
            self._check_tokenizer("critic", named)
            return adapter
        if config.critic_model not in (None, config.model):
            raise RunError(
                f"critic_model {named.model} is a whole model, which cannot share the policy's "
                "base. Train it with `lora` on the model that this run starts from, leave it out, "
                "or set lora.shared_base: false."
            )
        if config.reward_model:
            warn(
                f"the reward model {named.model} is not an adapter, so it takes memory of its own "
                "beside the shared base, and the critic starts from the policy with a fresh head. "
                "Train the reward model with `lora` on the model that this run starts from to "
                "share all."
            )
        return None

    @property
    def _shares_base(self) -> bool:
        return self.config.lora is not None and self.config.lora.shared_base

    @property
    def _named_critic(self) -> ModelFacts | None:
        """What a critic starts from by name: its own setting's, or the reward model."""
        for setting in ("critic_model", "reward_model"):
            if path := getattr(self.config, setting):
                return self.facts_of(path, setting=setting)
        return None

    def _check_tokenizer(self, role: str, facts: ModelFacts) -> None:
        check_tokenizer(role, facts, self.config.model, self.tokenizer)


def _check_steps(facts: ModelFacts) -> None:
    """Only a head that was trained at the ends of steps says anything there."""
    if facts.step_separator is not None:
        return
    scores = facts.is_scalar
    what = "an outcome reward model, which scores" if scores else "a language model, which has"
    what += " whole responses alone" if scores else " no head that scores"
    raise RunError(
        f"{facts.name} is {what}. Train a process reward model with `marlhf prm`"
        + (", or name this one as reward_model." if scores else ".")
    )


def load_trained(
    head: Head, config: StageConfig, objects: GivenObjects, world: World, members: int = 1
) -> Model:
    """The model of a stage that trains one, not yet on its device."""
    role = "policy" if head == "language" else "reward"
    source = trained_source(head, config, objects, members)
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

    def place(role: str) -> None:
        placed = world.place(
            models[role],
            config.precision,
            compiled=config.compile and role not in NOT_COMPILED,
            unpadded=config.lora is None,  # adapted models are padded, and the others match them
        )
        models[role] = placed if role in trained else placed.requires_grad_(False)
        whole = role not in trained and isinstance(sources[role], WholeModel)
        if whole and world.device.type == "cuda" and getattr(config, "offload", False):
            offload(placed)

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
            place(role)
    for role in late:
        place(role)
    return models


class ModelLoader:
    """Reads sources, and keeps the frozen bases that several of them share."""

    def __init__(self, config: StageConfig, world: World) -> None:
        self.world = world
        self.lora = config.lora or LoRA()
        self.checkpointing, self.seed = config.gradient_checkpointing is True, config.seed
        # What autocast would cast frozen matrices to at every pass. FSDP casts what it gathers.
        self.dtype = None if world.sharded else frozen_dtype(world.device, config.precision)
        self.half = config.trained_weights == "bfloat16"
        if self.half and self.dtype is None:
            raise RunError(
                "trained_weights: bfloat16 needs arithmetic in bfloat16, and this device computes "
                "in float32. Set precision: bfloat16, or leave trained_weights out."
            )
        self._bases: dict[WholeModel, FrozenBaseModel] = {}

    def read(self, role: str, source: Source, *, trains: bool) -> Model:
        """A role's model, as it is before the first step."""
        if isinstance(source, WholeModel):
            checkpointing = trains and self.checkpointing
            model = self._read_whole(source, checkpointing=checkpointing)
            # In half the memory, with the same bits. A user's own object keeps its weights.
            ours = isinstance(source.facts.model, str) or source.copied
            if self.dtype is not None and ours and not trains:
                cast_linear_layers(model, self.dtype)
            if trains and self.half:
                cast_trained_weights(model)
            return model
        if source.base not in self._bases:
            self._bases[source.base] = self._read_base(source.base)
        base = self._bases[source.base]
        if trains and isinstance(source.adapter, Path):
            say(f"{role}: starts from the adapter {source.adapter}, with its rank and layers")
        build: Any = base.scalar_model if source.head == "scalar" else base.language_model
        if source.members > 1:
            build = partial(base.ensemble, members=source.members)
        return build(source.adapter, role, seed=self.seed, trainable=trains)

    def _read_whole(self, source: WholeModel, **options: Any) -> Model:
        facts = source.facts
        if source.copied and source.head == "scalar" and source.fresh_head:
            facts = replace(facts, model=with_scalar_head(facts.model, source.seed))
        elif source.copied:
            model: Any = copy.deepcopy(facts.model)
            facts = replace(facts, model=model.requires_grad_(True))
        return load_model(source.head, facts, seed=source.seed, **options)

    def _read_base(self, source: WholeModel) -> FrozenBaseModel:
        import_peft()  # before anything slow
        quantize = self.lora.quantize
        if self.world.sharded and quantize != "none":
            raise RunError(
                "lora.quantize does not work with parallel: fsdp, which shards weights in float32. "
                "Leave out quantize, or use parallel: data."
            )
        module = self._read_whole(
            source,
            checkpointing=self.checkpointing,
            quantization=quantization(self.lora),
            device=self.world.device,
        )
        # Where an object came from: its weights are checked against that by their digest.
        origin = source.facts.model
        name = origin if isinstance(origin, str) else origin.name_or_path
        base = FrozenBaseModel(module, name, linear_dtype=self.dtype, merge=self.lora.merge)
        if quantize != "none" and not base.quantized:
            raise RunError(
                f"lora.quantize: {quantize} works for models that load from a folder or "
                f"from the hub, and {name or 'the model given here'} does not. Leave out quantize."
            )
        return base
