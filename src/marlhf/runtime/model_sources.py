"""Where the weights of each role come from, decided before any weights are read.

A run has roles: policy, reference, critic, reward models. `rl_sources` maps each role to a source,
from the config and the objects given in Python. `model_loader.py` then loads the sources. Keeping
the two apart makes the rules below readable in one place, and testable without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from marlhf.config.rl import RLConfig
from marlhf.config.stage import StageConfig
from marlhf.models.adapter_config import Task
from marlhf.models.adapter_files import find_adapter, is_scalar_adapter, split_adapter
from marlhf.models.adapters import AdapterInit
from marlhf.models.base import Model, Tokenizer
from marlhf.models.load import has_same_tokenizer, is_scalar
from marlhf.runs.layout import RunError
from marlhf.runtime.objects import GivenObjects
from marlhf.runtime.progress import warn


@dataclass(frozen=True)
class WholeModel:
    """A model with all its weights."""

    origin: str | Model  # a path or hub name, or an object given in Python
    head: Task
    copied: bool = False  # a copy of that object: another role has the object itself
    seed: int = 0  # of a fresh scalar head, and of `tiny`
    setting: str = field(default="model", compare=False)  # what named it, for errors


@dataclass(frozen=True)
class OnBase:
    """A frozen base with an adapter. Roles whose bases are equal share one in memory."""

    base: WholeModel
    head: Task
    adapter: AdapterInit | None  # settings of a fresh one, the folder of a saved one, or none

    @property
    def copied(self) -> bool:
        return self.base.copied


Source = WholeModel | OnBase


@dataclass(frozen=True)
class RewardItem:
    """One of the things that score: a model or a function, with its weight."""

    item: str | Model | Callable[..., Any]
    tokenizer: Tokenizer | None  # the reward model's own, where it was given
    weight: float

    @property
    def is_model(self) -> bool:
        named = isinstance(self.item, str) and ":" not in self.item
        return named or isinstance(self.item, nn.Module)


def adapter_settings(config: StageConfig, objects: GivenObjects) -> Any:
    """Settings of fresh adapters: a user's peft config, a recipe's `lora`, or None."""
    return objects.peft_config if objects.peft_config is not None else config.lora


def policy_source(config: StageConfig, objects: GivenObjects) -> Source:
    """The language model that a stage trains."""
    origin = config.model if objects.model is None else objects.model
    settings = adapter_settings(config, objects)
    if settings is None:
        return WholeModel(origin, "language", seed=config.seed)
    base, saved = split_adapter(origin)
    return OnBase(WholeModel(base, "language", seed=config.seed), "language", saved or settings)


def scalar_source(config: StageConfig, objects: GivenObjects) -> Source:
    """The scalar model that a reward stage trains."""
    origin = config.model if objects.model is None else objects.model
    settings = adapter_settings(config, objects)
    if settings is None:
        return WholeModel(origin, "scalar", seed=config.seed)
    if isinstance(origin, str):
        remote = config.trust_remote_code
        has_head = is_scalar(origin, trust_remote_code=remote, setting="model")
    else:
        has_head = hasattr(origin, "score")
    # A language model stays one beneath the adapter, so that a policy can share it later.
    base_head: Task = "scalar" if has_head else "language"
    base, saved = split_adapter(origin)
    return OnBase(WholeModel(base, base_head, seed=config.seed), "scalar", saved or settings)


def rl_sources(
    config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer, *, critic: bool
) -> dict[str, Source]:
    """Sources by role: policy, reference, critic, reward-0, reward-1, ... and gold."""
    policy = policy_source(config, objects)
    sources = {"policy": policy, "reference": _reference(config, objects, tokenizer, policy)}
    if critic:
        sources["critic"] = _critic(config, objects, tokenizer, policy)
    for number, reward in enumerate(reward_items(config, objects)):
        if reward.is_model:
            sources[reward_role(number)] = _reward(reward, config, policy, sources.get("critic"))
    if config.gold_model:
        _check_scores(config.gold_model, config, "gold_model")
        sources["gold"] = WholeModel(config.gold_model, "scalar", setting="gold_model")
    return sources


def reward_role(number: int) -> str:
    return f"reward-{number}"


def reward_items(config: RLConfig, objects: GivenObjects) -> list[RewardItem]:
    """What scores the responses, in the order of `reward_weights`."""
    items = objects.reward_funcs
    if items is None:
        items = [*([config.reward_model] if config.reward_model else []), *config.reward_funcs]
    if not items:
        raise RunError(
            "Nothing scores the responses. Set reward_model to a reward model, or reward_funcs to "
            "functions of yours, such as [my_rewards:brevity]."
        )
    weights = config.reward_weights or (1.0,) * len(items)
    if len(weights) != len(items):
        raise RunError(
            f"There are {len(items)} rewards but {len(weights)} reward_weights. Give one each."
        )
    tokenizers = objects.reward_tokenizers or [None] * len(items)
    return [RewardItem(*fields) for fields in zip(items, tokenizers, weights, strict=True)]


def check_reference_tokenizer(config: Any, path: str, tokenizer: Tokenizer) -> None:
    remote = config.trust_remote_code
    if not has_same_tokenizer(path, tokenizer, trust_remote_code=remote, setting="ref_model"):
        raise RunError(
            f"The tokenizer of the reference {path} is not that of {config.model}: its "
            "log-probs would be of other tokens. Set ref_model to a model with the policy's "
            "tokenizer, or leave it out."
        )


def _reference(
    config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer, policy: Source
) -> Source:
    """What is named or given, else the policy as it is before the first step."""
    if objects.ref_model is not None:
        if objects.ref_model is objects.model:
            raise RunError(
                "The reference is the policy itself, so it would learn as well. Leave ref_model "
                "out, or load it a second time."
            )
        return WholeModel(objects.ref_model, "language")
    if config.ref_model is None and isinstance(policy, OnBase):
        # A fresh adapter changes nothing, so the plain base is the reference. A policy that
        # starts from a saved adapter needs a second, frozen copy of that adapter.
        saved = policy.adapter if isinstance(policy.adapter, Path) else None
        return OnBase(policy.base, "language", saved)
    if config.ref_model is None and objects.model is not None:
        return WholeModel(objects.model, "language", copied=True)
    path = config.ref_model or config.model
    if path != config.model or objects.tokenizer is not None:  # else it is read from there
        check_reference_tokenizer(config, path, tokenizer)
    return WholeModel(path, "language", seed=config.seed, setting="ref_model")


def _critic(config: Any, objects: GivenObjects, tokenizer: Tokenizer, policy: Source) -> Source:
    """The critic: whole, or with LoRA an adapter and a head on a frozen base.

    That base is the policy's where the critic starts from the policy, or where `lora.shared_base`
    asks for it. Otherwise the critic has a base of its own.
    """
    if isinstance(policy, OnBase) and config.lora is not None and config.lora.shared_base:
        adapter = _shared_critic_adapter(config, objects, tokenizer)
        return OnBase(policy.base, "scalar", adapter or policy.adapter)
    start = _critic_start(config, objects, tokenizer)
    policy_origin = config.model if objects.model is None else objects.model
    if isinstance(policy, OnBase) and start.origin == policy_origin:
        return OnBase(policy.base, "scalar", policy.adapter)
    if isinstance(start.origin, str):
        _check_critic_tokenizer(config, start.origin, tokenizer, start.setting)
    if isinstance(policy, WholeModel):
        return start
    base, saved = split_adapter(start.origin)
    adapter = saved or adapter_settings(config, objects)
    return OnBase(replace(start, origin=base), "scalar", adapter)


def _critic_start(config: Any, objects: GivenObjects, tokenizer: Tokenizer) -> WholeModel:
    """Given or named, else the reward model, else the policy with a fresh head."""
    if objects.critic_model is not None:
        return WholeModel(objects.critic_model, "scalar")
    named = config.critic_model or config.reward_model
    if named and named != config.model:
        setting = "critic_model" if config.critic_model else "reward_model"
        return WholeModel(named, "scalar", seed=config.seed, setting=setting)
    if not named:
        adapted = adapter_settings(config, objects) is not None
        for reward in _readers(config, objects, tokenizer):
            if isinstance(reward.item, nn.Module):
                return WholeModel(reward.item, "scalar", copied=True)
            if not adapted:  # a second base for a reward model among reward_funcs costs memory
                return WholeModel(reward.item, "scalar", seed=config.seed, setting="reward_funcs")
        if objects.model is not None:
            return WholeModel(objects.model, "scalar", copied=True, seed=config.seed)
    return WholeModel(config.model, "scalar", seed=config.seed)


def _readers(config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer) -> Iterator[RewardItem]:
    """Reward models that read the policy's tokens, so that a critic can start from them."""
    for reward in reward_items(config, objects):
        if reward.is_model:
            own = reward.tokenizer or (reward.item if isinstance(reward.item, str) else tokenizer)
            remote = config.trust_remote_code
            if has_same_tokenizer(own, tokenizer, trust_remote_code=remote, setting="reward_funcs"):
                yield reward


def _shared_critic_adapter(config: Any, objects: GivenObjects, tokenizer: Tokenizer) -> Path | None:
    """The saved adapter that a critic on the policy's base starts from; None for the policy's."""
    if objects.critic_model is not None:
        raise RunError(
            "With lora.shared_base the critic shares the policy's base, but a critic of its own "
            "is given. Leave it out, or set lora.shared_base: false."
        )
    named = config.critic_model or config.reward_model
    adapter = find_adapter(named) if named else None
    # The adapter beside a merged language model is no start for a critic; one that was named is.
    if adapter is not None and (is_scalar_adapter(adapter) or adapter == Path(named)):
        _check_critic_tokenizer(config, named, tokenizer, "critic_model")
        return adapter
    if config.critic_model not in (None, config.model):
        raise RunError(
            f"critic_model {named} is a whole model, which cannot share the policy's base. "
            "Train it with `lora` on the model that this run starts from, leave it out, or set "
            "lora.shared_base: false."
        )
    if config.reward_model:
        warn(
            f"the reward model {named} is not an adapter, so it takes memory of its own beside "
            "the shared base, and the critic starts from the policy with a fresh head. Train the "
            "reward model with `lora` on the model that this run starts from to share all."
        )
    return None


def _reward(reward: RewardItem, config: RLConfig, policy: Source, critic: Source | None) -> Source:
    """A reward model: whole, or on a base that another role has loaded anyway."""
    if not isinstance(reward.item, str):
        return WholeModel(reward.item, "scalar")
    setting = "reward_model" if reward.item == config.reward_model else "reward_funcs"
    _check_scores(reward.item, config, setting)
    if isinstance(policy, OnBase) and config.lora is not None and config.lora.shared_base:
        adapter = find_adapter(reward.item)
        if adapter is not None and is_scalar_adapter(adapter):
            return OnBase(policy.base, "scalar", adapter)
    base, saved = split_adapter(reward.item)
    own_base = WholeModel(base, "scalar", seed=config.seed)
    if isinstance(critic, OnBase) and critic.base == own_base:
        return OnBase(own_base, "scalar", saved)
    return WholeModel(reward.item, "scalar", setting=setting)


def _check_scores(path: str, config: RLConfig, setting: str) -> None:
    """A language model has no scalar head, and a random one would score at random."""
    remote = config.trust_remote_code
    if config.random_reward_head or is_scalar(path, trust_remote_code=remote, setting=setting):
        return
    raise RunError(
        f"`{setting}`: {path} is a language model without a scalar head, so its scores would come "
        "from random weights. Train a reward model from it with `marlhf reward`, or set "
        "random_reward_head: true where scores do not matter."
    )


def _check_critic_tokenizer(
    config: RLConfig, path: str, tokenizer: Tokenizer, setting: str
) -> None:
    remote = config.trust_remote_code
    if not has_same_tokenizer(path, tokenizer, trust_remote_code=remote, setting=setting):
        raise RunError(
            f"The critic starts from {path}, whose tokenizer is not that of {config.model}: "
            "it would read other tokens. Set critic_model to a model with the policy's tokenizer, "
            "such as the SFT model."
        )
