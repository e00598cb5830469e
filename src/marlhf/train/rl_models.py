"""All that a step of reinforcement learning talks to, loaded and found to fit together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from marlhf.core import Vocabulary
from marlhf.data import Row
from marlhf.models.adapter_files import find_adapter, is_scalar_adapter
from marlhf.models.adapters import FrozenBase, View
from marlhf.models.load import (
    Model,
    Tokenizer,
    check_vocabulary,
    end_tokens,
    is_scalar,
    load_policy,
    load_scalar,
    load_tokenizer,
    same_tokenizer,
)
from marlhf.reward import RewardFunction, RewardModel, Rewards, import_function
from marlhf.rollout import Engine, NativeEngine
from marlhf.spans import vocabulary
from marlhf.train.distributed import World
from marlhf.train.lora import adapter_settings, load_trained_policy, open_base, start_from
from marlhf.train.parts import Parts
from marlhf.train.progress import warn
from marlhf.train.rl_config import RLConfig
from marlhf.train.run import RunError
from marlhf.train.stage import Example, check_positions, each_prompt_once, load_examples


@dataclass(frozen=True)
class Models:
    """Policy and critic to train, the rest to ask."""

    policy: Model
    reference: Model
    critic: Model  # None for methods that do without
    reward: Rewards
    engine: Engine
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    world: World


def load_models(config: RLConfig, parts: Parts, world: World, *, critic: bool) -> Models:
    """Load, or take what was given, and refuse what does not belong together."""
    with world.together():
        remote = config.trust_remote_code
        tokenizer = load_tokenizer(parts.tokenizer or config.model, trust_remote_code=remote)
        policy = load_trained_policy(config, parts, world)
        if isinstance(policy, View):
            reference, scalar, rewards = _load_adapted(policy, config, parts, tokenizer, world)
            scalar = scalar if critic else None
        else:
            reference = _load_reference(config, parts, tokenizer, policy)
            rewards = _load_rewards(config, parts, tokenizer, world)
            scalar = _load_critic(config, parts, tokenizer, rewards) if critic else None
        named = {"the policy": policy, "the reference": reference, "critic": scalar}
        for name, model in named.items():
            if model is not None:
                check_vocabulary(model, tokenizer, name)
    policy = world.place(policy, config.precision)
    engine = NativeEngine(
        policy,
        end_tokens(policy, tokenizer),
        tokenizer.pad_token_id,
        token_budget=config.rollout_tokens,
        precision=config.precision,
    )
    table = vocabulary(tokenizer, policy.config.get_text_config().vocab_size)
    for _, scorer, _ in rewards.parts:
        if isinstance(scorer, RewardModel):
            scorer.model = world.place(scorer.model, config.precision)
    return Models(
        policy,
        world.place(reference, config.precision).requires_grad_(False),
        None if scalar is None else world.place(scalar, config.precision),
        rewards,
        engine,
        tokenizer,
        Vocabulary(**{k: v.to(world.device) for k, v in vars(table).items()}),
        world,
    )


def load_prompts(
    config: RLConfig, models: Models, parts: Parts
) -> tuple[list[Example], list[Example]]:
    """Prompts to train on and to evaluate on, each once, and short enough for every model."""
    with models.world.together():
        loaded = load_examples(config, "ppo", models.tokenizer, parts, needs=("prompt",))
        examples, held_out = map(each_prompt_once, loaded)
        readers = {"policy": models.policy, "reference": models.reference, "critic": models.critic}
        for name, scorer, _ in models.reward.parts:
            if isinstance(scorer, RewardModel) and not scorer.foreign:  # else it counts others
                readers[f"reward model {name}"] = scorer.model
        for name, model in readers.items():
            if model is not None:
                check_positions(model, examples + held_out, config.sampling.max_new_tokens, name)
        models.reward.check([e.row for e in examples + held_out])
    return examples, held_out


def _load_reference(config: RLConfig, parts: Parts, tokenizer: Tokenizer, policy: Model) -> Model:
    remote = config.trust_remote_code
    if parts.ref_model is not None:
        if parts.ref_model is parts.model:
            raise RunError(
                "The reference is the policy itself, so it would learn as well. Leave ref_model "
                "out, or load it a second time."
            )
        return load_policy(parts.ref_model)
    if config.ref_model is None and parts.model is not None:  # a copy of what was given
        copy = type(policy)(policy.config)
        copy.load_state_dict(policy.state_dict())
        return load_policy(copy)
    path = config.ref_model or config.model
    if not same_tokenizer(tokenizer, load_tokenizer(path, trust_remote_code=remote)):
        raise RunError(
            f"The tokenizer of the reference {path} is not that of {config.model}: its "
            "log-probs would be of other tokens. Set ref_model to a model with the policy's "
            "tokenizer, or leave it out."
        )
    return load_policy(path, seed=config.seed, trust_remote_code=remote)


def _load_adapted(
    policy: View, config: Any, parts: Parts, tokenizer: Tokenizer, world: World
) -> tuple[Model, Model, Rewards]:
    """Reference, critic and rewards of a policy that is an adapter.

    The reference is the policy's base with the adapter off. With a shared base the critic stands
    on it too, and so does a reward model that is an adapter on it; else critic and reward model
    share a second base where they start from the same weights.
    """
    settings, model = adapter_settings(config, parts), parts.model or config.model
    if config.ref_model is not None or parts.ref_model is not None:
        reference = _load_reference(config, parts, tokenizer, policy)
    elif isinstance(start_from(model, None), Path):
        reference = policy.base.language(Path(model), "reference", trainable=False)
    else:
        reference = policy.base.reference()
    source = config.critic_model or config.reward_model or config.model
    if config.lora is not None and config.lora.shared_base:
        rewards = _load_rewards(config, parts, tokenizer, world, shared=policy.base)
        found = find_adapter(source)
        begin = found if found and is_scalar_adapter(found) else settings
        return reference, policy.base.scalar(begin, "critic", seed=config.seed), rewards
    _check_critic(source, config, tokenizer)
    base = open_base(load_scalar, parts.critic_model or source, config, world)
    critic = base.scalar(start_from(source, settings), "critic", seed=config.seed)
    plain = source == config.reward_model and not isinstance(start_from(source, None), Path)
    own = {source: base.frozen_scalar()} if plain and parts.critic_model is None else {}
    return reference, critic, _load_rewards(config, parts, tokenizer, world, loaded=own)


def _load_critic(config: Any, parts: Parts, tokenizer: Tokenizer, rewards: Rewards) -> Model:
    remote, checkpointing = config.trust_remote_code, config.gradient_checkpointing
    if parts.critic_model is not None:
        return load_scalar(parts.critic_model, checkpointing=checkpointing)
    models = [s for _, s, _ in rewards.parts if isinstance(s, RewardModel)]
    path = config.critic_model or config.reward_model
    if not path and models and not models[0].foreign:  # a copy of the reward model given
        copy = type(models[0].model)(models[0].model.config)
        copy.load_state_dict(models[0].model.state_dict())
        return load_scalar(copy, checkpointing=checkpointing)
    if not path and parts.model is not None:
        return load_scalar(_with_head(parts.model, config.seed), checkpointing=checkpointing)
    path = path or config.model
    _check_critic(path, config, tokenizer)
    return load_scalar(
        path, seed=config.seed, trust_remote_code=remote, checkpointing=checkpointing
    )


def _with_head(policy: Model, seed: int) -> Model:
    """A copy of a policy that was given, with a fresh scalar head as `load_scalar` makes it."""
    config = deepcopy(policy.config)
    config.num_labels = 1
    critic: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    critic.base_model.load_state_dict(policy.base_model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    scale = 1 / math.sqrt(critic.score.in_features + 1)
    with torch.no_grad():
        critic.score.weight.copy_(
            torch.randn(critic.score.weight.shape, generator=generator) * scale
        )
    return critic


def _check_critic(path: str, config: RLConfig, tokenizer: Tokenizer) -> None:
    theirs = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
    if not same_tokenizer(tokenizer, theirs):
        raise RunError(
            f"The critic starts from {path}, whose tokenizer is not that of {config.model}: "
            "it would read other tokens. Set critic_model to a model with the policy's tokenizer, "
            "such as the SFT model."
        )


def _load_rewards(
    config: RLConfig,
    parts: Parts,
    tokenizer: Tokenizer,
    world: World,
    *,
    shared: FrozenBase | None = None,
    loaded: Mapping[str, Model] = MappingProxyType({}),
) -> Rewards:
    """Reward models and functions with their weights.

    An adapter goes on the `shared` base, and what is `loaded` already is not loaded again.
    """
    given = parts.reward_funcs
    if given is None:
        given = [*([config.reward_model] if config.reward_model else []), *config.reward_funcs]
    if not given:
        raise RunError(
            "Nothing scores the responses. Set reward_model to a reward model, or reward_funcs to "
            "functions of yours, such as [my_rewards:brevity]."
        )
    weights = config.reward_weights or (1.0,) * len(given)
    if len(weights) != len(given):
        raise RunError(
            f"There are {len(given)} rewards but {len(weights)} reward_weights. Give one each."
        )
    tokenizers = parts.reward_tokenizers or [None] * len(given)
    scorers: list[tuple[str, Any, float]] = []
    for item, own, weight in zip(given, tokenizers, weights, strict=True):
        if isinstance(item, torch.nn.Module) or (isinstance(item, str) and ":" not in item):
            found = find_adapter(item) if isinstance(item, str) and shared else None
            if shared and found and is_scalar_adapter(found):
                model = shared.scalar(found, f"reward-{len(scorers)}", trainable=False)
            elif isinstance(item, str) and item in loaded:
                model = loaded[item]
            else:
                model = load_scalar(item, trust_remote_code=config.trust_remote_code)
            scorer = _reward_model(item, model, own, config, tokenizer, world)
            name = item.rstrip("/").removesuffix("/model") if isinstance(item, str) else "model"
            scorers.append((name.rpartition("/")[2], scorer, weight))
        else:
            function = import_function(item) if isinstance(item, str) else item
            wrapped = SharedFunction(function, tokenizer, world, timeout=config.reward_timeout)
            scorers.append((wrapped.name, wrapped, weight))
    return Rewards(scorers)


def _reward_model(
    item: str | Model,
    model: Model,
    own: Tokenizer | None,
    config: RLConfig,
    tokenizer: Tokenizer,
    world: World,
) -> RewardModel:
    remote = config.trust_remote_code
    if isinstance(item, str) and not is_scalar(item, trust_remote_code=remote):
        warn(
            f"{item} is not a reward model but a language model: its scores come "
            "from a head of random weights and mean nothing. Train one with `marlhf reward`."
        )
    source = own or (item if isinstance(item, str) else tokenizer)
    return RewardModel(
        model,
        load_tokenizer(source, trust_remote_code=remote),
        tokenizer,
        token_budget=2 * config.token_budget,
        precision=config.precision,
        division=world,
    )


class SharedFunction(RewardFunction):
    """A reward function whose rows are divided over processes; if one fails, all stop."""

    def __init__(self, function: Any, tokenizer: Tokenizer, world: World, **options: Any) -> None:
        super().__init__(function, tokenizer, device=world.device, **options)
        self.world = world

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        rows: Sequence[Row],
    ) -> Tensor:
        mine = self.world.share([len(r) for r in responses])
        scores = torch.zeros(len(rows), device=self.world.device)
        with self.world.together():
            found = super().__call__(
                [prompts[i] for i in mine], [responses[i] for i in mine], [rows[i] for i in mine]
            )
        scores[torch.tensor(mine, dtype=torch.int64, device=self.world.device)] = found
        return self.world.sum(scores)
