"""Where the models of a run come from, decided before any weights are read.

A run has roles: policy, reference, critic, reward models. The source of each is a whole model, or
an adapter on a frozen base that others may share. `rl_sources` decides by the config and by the
objects given in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from marlhf.config.rl import RLConfig
from marlhf.models.adapters import AdapterInit
from marlhf.models.base import Head, Model, Tokenizer
from marlhf.models.facts import ModelFacts, is_scalar_adapter, model_facts, same_tokenizer
from marlhf.runs.layout import RunError
from marlhf.runtime.progress import warn
from marlhf.runtime.stage import GivenObjects

PROCESS = "process"
"""The role of a process reward model."""


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


def trained_source(
    head: Head, facts: ModelFacts, adapter: AdapterInit, seed: int, members: int = 1
) -> Source:
    """What a model that trains starts from: whole, or with the settings of an adapter on a base."""
    if adapter is None:
        return WholeModel(facts, head, seed=seed)
    # It stays a language model beneath the adapter, so that a policy can share it.
    base_head = "scalar" if head == "scalar" and facts.is_scalar else "language"
    base = WholeModel(facts.base, base_head, seed=seed)
    return OnBase(base, head, facts.saved or adapter, members)


def check_tokenizer(role: str, facts: ModelFacts, policy: str, tokenizer: Tokenizer) -> None:
    """Models that read the policy's tokens must have its tokenizer."""
    if not same_tokenizer(facts.tokenizer, tokenizer):
        # A critic that starts from the reward model needs a start of its own, for reward models
        # may have other tokenizers.
        named = "critic_model" if facts.setting == "reward_model" else facts.setting
        otherwise = ", or leave it out" if named == facts.setting else ""
        raise RunError(
            f"The {role} {facts.model} does not have the tokenizer of {policy}: it would read "
            f"other tokens. Set {named} to a model with the policy's tokenizer, such as the SFT "
            f"model{otherwise}."
        )


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


@dataclass(frozen=True)
class RLSources:
    """What a run's models start from, and the tokenizers that they read."""

    roles: dict[str, Source]
    """Of policy, reference, critic, reward-0, reward-1, ... and gold."""
    rewards: list[RewardItem]
    tokenizer: Tokenizer
    """The policy's."""
    tokenizers: dict[str, Tokenizer]
    """Those of reward models, by role."""


def rl_sources(config: RLConfig, objects: GivenObjects, *, critic: bool) -> RLSources:
    """What each role starts from. The facts of all that is named are read once."""
    rewards = reward_items(config, objects)
    read_facts = cache(partial(model_facts, trust_remote_code=config.trust_remote_code))
    tokenizer = objects.tokenizer or read_facts(config.model, setting="model").tokenizer
    origin = config.model if objects.model is None else objects.model
    adapter = objects.peft_config or config.lora
    policy = trained_source("language", read_facts(origin, setting="model"), adapter, config.seed)
    rules = _Rules(config, objects, tokenizer, policy, read_facts)
    roles = {"policy": rules.policy, "reference": rules.reference()}
    if critic:
        roles["critic"] = rules.critic(rewards)
    models = [reward for reward in rewards if reward.is_model]
    roles |= {reward.role: rules.reward(reward, roles.get("critic")) for reward in models}
    tokenizers = {reward.role: rules.reads(reward) for reward in models}
    if config.gold_model:
        gold = read_facts(config.gold_model, setting="gold_model")
        roles["gold"], tokenizers["gold"] = rules.gold(gold), gold.tokenizer
    return RLSources(roles, rewards, tokenizer, tokenizers)


@dataclass(frozen=True)
class _Rules:
    """Where reference, critic and reward models come from, given the policy's source."""

    config: Any  # RLConfig, with the settings of a critic where the method has one
    objects: GivenObjects
    tokenizer: Tokenizer
    policy: Source
    read_facts: Callable[..., ModelFacts]
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
            return WholeModel(self.read_facts(objects.ref_model), "language")
        if config.ref_model is None:
            if isinstance(policy, OnBase):
                # A fresh adapter changes nothing, so the plain base is the reference. A policy that
                # starts from a saved adapter needs a second, frozen copy of that adapter.
                saved = policy.adapter if isinstance(policy.adapter, Path) else None
                return OnBase(policy.base, "language", saved)
            if objects.model is not None:
                return WholeModel(policy.facts, "language", copied=True)
        facts = self.read_facts(config.ref_model or config.model, setting="ref_model")
        if facts.model != config.model or objects.tokenizer is not None:  # else it is read there
            check_tokenizer("reference", facts, config.model, self.tokenizer)
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
            check_tokenizer("critic", start.facts, self.config.model, self.tokenizer)
        if isinstance(policy, WholeModel):
            return start
        adapter = start.facts.saved or self.objects.peft_config or self.config.lora
        return OnBase(replace(start, facts=start.facts.base), "scalar", adapter)

    def reward(self, reward: RewardItem, critic: Source | None) -> Source:
        """A reward model: whole, or on a base that another role has loaded anyway."""
        facts = self.read_facts(reward.item, setting=reward.setting)
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

    def reads(self, reward: RewardItem) -> Tokenizer:
        """A reward model's tokenizer: given with it, else beside it, else the policy's."""
        if reward.tokenizer is not None:
            return reward.tokenizer
        if isinstance(reward.item, nn.Module):
            return self.tokenizer
        return self.read_facts(reward.item, setting=reward.setting).tokenizer

    def gold(self, facts: ModelFacts) -> Source:
        """The reward model that judges held-out responses."""
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
            return WholeModel(self.read_facts(self.objects.critic_model), "scalar")
        named = self._named_critic
        if named and named.model != config.model:
            return WholeModel(named, "scalar", seed=config.seed)
        is_adapted = isinstance(policy, OnBase)
        for reward in rewards if not named else ():
            given = isinstance(reward.item, nn.Module)
            # A second base for a reward model that is only named would cost memory.
            if not reward.is_model or reward.is_process or (is_adapted and not given):
                continue
            if same_tokenizer(self.reads(reward), self.tokenizer):
                facts = self.read_facts(reward.item, setting=reward.setting)
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
            check_tokenizer("critic", named, config.model, self.tokenizer)
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
                return self.read_facts(path, setting=setting)
        return None


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
