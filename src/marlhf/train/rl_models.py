"""All that a step of reinforcement learning talks to, loaded and found to fit together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from marlhf.configs.rl import RLConfig
from marlhf.core import Vocabulary
from marlhf.data import Row
from marlhf.models.adapter_files import find_adapter, is_scalar_adapter
from marlhf.models.adapters import FrozenBase, View, frozen_dtype, store_matrices
from marlhf.models.base import Model, Tokenizer
from marlhf.models.load import (
    check_vocabulary,
    end_tokens,
    is_scalar,
    load_policy,
    load_scalar,
    load_tokenizer,
    same_tokenizer,
)
from marlhf.reward import RewardFunction, RewardModel, Rewards, import_function
from marlhf.rollout.engine import Engine
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.vllm import VLLMEngine
from marlhf.rollout.vllm_server import VLLMServer
from marlhf.runs.write import RunError
from marlhf.spans import vocabulary
from marlhf.train.distributed import World
from marlhf.train.lora import (
    adapter_settings,
    load_trained_policy,
    open_base,
    saved_adapter,
    start_from,
)
from marlhf.train.objects import GivenObjects
from marlhf.train.parsing import Parsing, open_parsing
from marlhf.train.progress import warn
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
    parsing: Parsing | None = None  # for rules that follow constituents
    gold: RewardModel | None = None  # judges held-out responses, and teaches nobody


def load_models(config: RLConfig, objects: GivenObjects, world: World, *, critic: bool) -> Models:
    """Load, or take what was given, and refuse what does not belong together.

    A model goes to its device before the next is read, so that the host need not hold them all.
    What others are copied from goes last.
    """

    def place(model: Model) -> Model:
        return world.place(model, config.precision, compiled=config.compile)

    with world.raise_on_all_ranks():
        remote = config.trust_remote_code
        tokenizer = load_tokenizer(objects.tokenizer or config.model, trust_remote_code=remote)
        given = [objects.ref_model, *(objects.reward_funcs or ())]
        policy = load_trained_policy(config, objects, world)
        if isinstance(policy, View):
            reference = _adapted_reference(policy, config, objects, tokenizer)
            load = _load_adapted if critic else _load_rewards_alone
            scalar, rewards = load(policy.base, config, objects, tokenizer, world)
            policy, reference = place(policy), _freeze(reference, config, world, given)
            scalar = None if scalar is None else place(scalar)
        else:
            policy = place(policy) if objects.model is None else policy
            reference = _load_reference(config, objects, tokenizer, policy)
            reference = _freeze(reference, config, world, given)
            policy = policy if objects.model is None else place(policy)
            rewards = _load_rewards(config, objects, tokenizer, world)
            scalar = place(_load_critic(config, objects, tokenizer, rewards)) if critic else None
        named = {"the policy": policy, "the reference": reference, "critic": scalar}
        for name, model in named.items():
            if model is not None:
                check_vocabulary(model, tokenizer, name)
        parsing = open_parsing(config.segmenter, tokenizer)
        for _, scorer, _ in rewards.parts:
            if isinstance(scorer, RewardModel) and not _read_from_disk(scorer.model, given):
                scorer.model = _freeze(scorer.model, config, world, given)
        gold = _load_gold(config, tokenizer, world) if config.gold_model else None
        engine = _load_engine(config, policy, tokenizer, world)
    table = vocabulary(tokenizer, policy.config.get_text_config().vocab_size)
    return Models(
        policy,
        reference,
        scalar,
        rewards,
        engine,
        tokenizer,
        Vocabulary(**{k: v.to(world.device) for k, v in vars(table).items()}),
        world,
        parsing,
        gold,
    )


def _read_from_disk(model: Model, given: Sequence[Any]) -> bool:
    return not isinstance(model, View) and not any(model is x for x in given)


def _freeze(model: Model, config: RLConfig, world: World, given: Sequence[Any] = ()) -> Model:
    """A model that is only asked, its matrices in the type that they are used in anyway.

    Under autocast that changes no bit of its answers, and halves its memory. A user's own object
    keeps its weights.
    """
    dtype = frozen_dtype(world.device, config.precision)
    if dtype is not None and _read_from_disk(model, given) and not world.sharded:
        store_matrices(model, dtype)
    return world.place(model, config.precision, compiled=config.compile).requires_grad_(False)


def load_prompts(
    config: RLConfig, models: Models, objects: GivenObjects
) -> tuple[list[Example], list[Example]]:
    """Prompts to train on and to evaluate on, each once, and short enough for every model."""
    with models.world.raise_on_all_ranks():
        loaded = load_examples(config, "ppo", models.tokenizer, objects, needs=("prompt",))
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


def _load_engine(config: RLConfig, policy: Model, tokenizer: Tokenizer, world: World) -> Engine:
    """What samples: the policy itself, or vLLM with a copy of it."""
    ends, pad = end_tokens(policy, tokenizer), tokenizer.pad_token_id
    if config.engine == "native":
        budget = config.rollout_tokens
        return NativeEngine(policy, ends, pad, token_budget=budget, precision=config.precision)
    if world.size > 1:
        raise RunError(
            "engine: vllm works with one training process, not with several. Leave engine out, "
            "or start without torchrun: a vLLM server may itself use several GPUs."
        )
    if not config.vllm_url:
        return VLLMEngine(
            policy,
            ends,
            pad,
            token_budget=2 * config.token_budget,
            precision=config.precision,
            memory=config.vllm_memory,
        )
    return VLLMServer(
        config.vllm_url,
        policy,
        ends,
        pad,
        folder=config.output_dir,
        token_budget=2 * config.token_budget,
        precision=config.precision,
    )


def _load_reference(
    config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer, policy: Model
) -> Model:
    remote = config.trust_remote_code
    if objects.ref_model is not None:
        if objects.ref_model is objects.model:
            raise RunError(
                "The reference is the policy itself, so it would learn as well. Leave ref_model "
                "out, or load it a second time."
            )
        return load_policy(objects.ref_model)
    if config.ref_model is None and objects.model is not None:  # a copy of what was given
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


def _adapted_reference(
    policy: View, config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer
) -> Model:
    """The policy's base with the adapter off; where the policy goes on with one, with that one."""
    if config.ref_model is not None or objects.ref_model is not None:
        return _load_reference(config, objects, tokenizer, policy)
    if (saved := saved_adapter(objects.model or config.model)) is not None:
        return policy.base.language(saved, "reference", trainable=False)
    return policy.base.reference()


def _load_adapted(
    base: FrozenBase, config: Any, objects: GivenObjects, tokenizer: Tokenizer, world: World
) -> tuple[Model, Rewards]:
    """Critic and rewards of a policy that is an adapter on `base`.

    With a shared base the critic stands on it too, and so does a reward model that is an adapter
    on it. Else the critic has a second base, unless it starts where the policy does; the reward
    model shares that where the two start from the same weights.
    """
    settings, model = adapter_settings(config, objects), objects.model or config.model
    source = config.critic_model or config.reward_model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the settings: said of the policy
        if config.lora is not None and config.lora.shared_base:
            found = _shared_start(source, config, objects, tokenizer)
            critic = base.scalar(found or start_from(model, settings), "critic", seed=config.seed)
            return critic, _load_rewards(config, objects, tokenizer, world, shared=base)
        given = objects.critic_model
        if given is None and not source:
            given = deepcopy(_given_reward(objects, tokenizer))
        if given is not None:
            theirs = open_base(load_scalar, given, config, world)
            critic = theirs.scalar(settings, "critic", seed=config.seed)
            return critic, _load_rewards(config, objects, tokenizer, world)
        if source in ("", config.model):
            critic = base.scalar(start_from(model, settings), "critic", seed=config.seed)
            return critic, _load_rewards(config, objects, tokenizer, world)
        _check_critic(source, config, tokenizer)
        theirs = open_base(load_scalar, source, config, world)
        saved = saved_adapter(source)
        critic = theirs.scalar(saved or settings, "critic", seed=config.seed)
        own: dict[str, Model] = {}
        if source == config.reward_model:
            own[source] = (
                theirs.scalar(saved, "reward", seed=config.seed, trainable=False)
                if saved
                else theirs.frozen_scalar()
            )
    return critic, _load_rewards(config, objects, tokenizer, world, loaded=own)


def _load_rewards_alone(
    base: FrozenBase, config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer, world: World
) -> tuple[None, Rewards]:
    """The rewards of a method without a critic."""
    shared = base if config.lora is not None and config.lora.shared_base else None
    return None, _load_rewards(config, objects, tokenizer, world, shared=shared)


def _shared_start(
    source: str, config: Any, objects: GivenObjects, tokenizer: Tokenizer
) -> Path | None:
    """The saved adapter that a critic on the policy's base starts from; None for a fresh one."""
    if objects.critic_model is not None:
        raise RunError(
            "With lora.shared_base the critic stands on the policy's base, but a critic of its own "
            "is given. Leave it out, or set lora.shared_base: false."
        )
    found = find_adapter(source) if source else None
    if found is not None and (is_scalar_adapter(found) or found == Path(source)):
        _check_critic(source, config, tokenizer)
        return found
    if config.critic_model not in (None, config.model):
        raise RunError(
            f"critic_model {source} is a whole model, which cannot stand on the policy's base. "
            "Train it with `lora` on the model that this run starts from, leave it out, or set "
            "lora.shared_base: false."
        )
    if config.reward_model:
        warn(
            f"the reward model {source} is not an adapter, so it takes memory of its own beside "
            "the shared base, and the critic starts from the policy with a fresh head. Train the "
            "reward model with `lora` on the model that this run starts from to share all."
        )
    return None


def _given_reward(objects: GivenObjects, tokenizer: Tokenizer) -> Model | None:
    """A reward model given as an object, where it reads the policy's tokens."""
    given = objects.reward_funcs or ()
    tokenizers = objects.reward_tokenizers or [None] * len(given)
    for item, own in zip(given, tokenizers):
        same = own is None or same_tokenizer(load_tokenizer(own), tokenizer)
        if isinstance(item, torch.nn.Module) and same:
            return item
    return None


def _load_critic(
    config: Any, objects: GivenObjects, tokenizer: Tokenizer, rewards: Rewards
) -> Model:
    remote, checkpointing = config.trust_remote_code, config.gradient_checkpointing
    if objects.critic_model is not None:
        return load_scalar(objects.critic_model, checkpointing=checkpointing)
    models = [s for _, s, _ in rewards.parts if isinstance(s, RewardModel)]
    path = config.critic_model or config.reward_model
    if not path and models and not models[0].foreign:  # a copy of the reward model given
        copy = type(models[0].model)(models[0].model.config)
        copy.load_state_dict(models[0].model.state_dict())
        return load_scalar(copy, checkpointing=checkpointing)
    if not path and objects.model is not None:
        return load_scalar(_with_head(objects.model, config.seed), checkpointing=checkpointing)
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
    objects: GivenObjects,
    tokenizer: Tokenizer,
    world: World,
    *,
    shared: FrozenBase | None = None,
    loaded: Mapping[str, Model] = MappingProxyType({}),
) -> Rewards:
    """Reward models and functions with their weights.

    An adapter goes on the `shared` base, and what is `loaded` already is not loaded again.
    """
    given = objects.reward_funcs
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
    tokenizers = objects.reward_tokenizers or [None] * len(given)
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
                if isinstance(item, str):  # nothing else is made from it
                    model = _freeze(model, config, world)
            scorer = _reward_model(item, model, own, config, tokenizer, world)
            name = item.rstrip("/").removesuffix("/model") if isinstance(item, str) else "model"
            scorers.append((name.rpartition("/")[2], scorer, weight))
        else:
            function = import_function(item) if isinstance(item, str) else item
            wrapped = SharedFunction(function, tokenizer, world, timeout=config.reward_timeout)
            scorers.append((wrapped.name, wrapped, weight))
    return Rewards(scorers)


def _load_gold(config: RLConfig, tokenizer: Tokenizer, world: World) -> RewardModel:
    """The model behind `eval/gold`. Compiling would take longer than its few passes."""
    path = config.gold_model or ""
    model = load_scalar(path, trust_remote_code=config.trust_remote_code)
    model = _freeze(model, replace(config, compile=False), world)
    return _reward_model(path, model, None, config, tokenizer, world)


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
        processes=world,
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
        with self.world.raise_on_all_ranks():
            found = super().__call__(
                [prompts[i] for i in mine], [responses[i] for i in mine], [rows[i] for i in mine]
            )
        scores[torch.tensor(mine, dtype=torch.int64, device=self.world.device)] = found
        return self.world.sum(scores)
