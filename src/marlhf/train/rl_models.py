"""Everything that a step of reinforcement learning uses, loaded and checked to fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.config.stage import Precision, Sampling
from marlhf.core import Vocabulary
from marlhf.data import Row
from marlhf.data.collate import TokenRows
from marlhf.environments import ChatTokens, Conversations, find_environment
from marlhf.models.base import Model, Tokenizer, autocast
from marlhf.models.forward import token_stats, token_values
from marlhf.models.load import check_vocabulary, end_tokens
from marlhf.models.logprobs import TokenScores
from marlhf.models.sequences import Sequences
from marlhf.reward import RewardFunction, RewardModel, Rewards, import_function
from marlhf.reward.functions import at_last_tokens
from marlhf.reward.process import ProcessModel
from marlhf.rollout.engine import AsyncEngine, Engine
from marlhf.rollout.native import NativeEngine
from marlhf.rollout.sampler_process import SamplerProcess
from marlhf.rollout.vllm import VLLMEngine
from marlhf.rollout.vllm_server import VLLMServer
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.model_loader import load_sources
from marlhf.runtime.progress import say
from marlhf.runtime.sources import PROCESS, RLSources, rl_sources
from marlhf.runtime.stage import (
    Example,
    GivenObjects,
    check_positions,
    each_prompt_once,
    load_examples,
)
from marlhf.spans import vocabulary
from marlhf.spans.apply import Parsing, open_parsing

T = TypeVar("T")


@dataclass(frozen=True)
class Models:
    """Policy and critic, which train, and the frozen rest."""

    policy: Model
    reference: Model
    critic: Model  # None for methods without one
    reward: Rewards
    engine: Engine
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    world: World
    sampling: Sampling
    pass_tokens: int = 16384  # of a pass with gradients
    precision: Precision = "auto"
    parsing: Parsing | None = None  # for rules that follow constituents
    gold: RewardModel | None = None  # judges held-out responses, and teaches nobody
    ahead: AsyncEngine | None = None  # samples while the policy trains, with `async_steps: 1`
    conversations: Conversations | None = None  # with an environment

    def sequences(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        sampled: Tensor | None = None,
    ) -> Sequences:
        pad_id = self.tokenizer.pad_token_id
        return Sequences.from_lists(prompts, responses, pad_id, self.world.device, sampled)

    def fit_memory(self, compute: Callable[[], T], *trained: Model) -> T:
        """What `compute` returns, whose passes are made to fit into memory."""
        return fit_memory(self.world, compute, *trained)

    def logprobs(
        self, model: Model, sequences: Sequences, scores: TokenScores | None = None
    ) -> Tensor:
        """Log-probs of response tokens at the sampling temperature, [B, T]."""
        with autocast(self.world.device, self.precision):
            return token_stats(model, sequences, self.sampling.scale, scores=scores).logprobs

    def entropy(self, sequences: Sequences) -> Tensor:
        """Of the policy's choice of each response token, in nats: [B, T]."""
        with autocast(self.world.device, self.precision):
            stats = token_stats(self.policy, sequences, self.sampling.scale, entropy=True)
        assert stats.entropy is not None
        return stats.entropy

    def values(self, sequences: Sequences) -> Tensor:
        """The critic's value of the state before each token, [B, T]."""
        with autocast(self.world.device, self.precision):
            return token_values(self.critic, sequences)


def load_models(config: RLConfig, objects: GivenObjects, world: World, *, critic: bool) -> Models:
    """Load every role's model, and refuse what does not belong together."""
    with world.raise_on_all_ranks():
        sources = rl_sources(config, objects, critic=critic)
        tokenizer = sources.tokenizer
        models = load_sources(sources.roles, {"policy", "critic"}, config, world)
        for role in ("policy", "reference", "critic"):
            if role in models:
                check_vocabulary(models[role], tokenizer, f"the {role}")
        policy = models["policy"]
        ends, pad = end_tokens(policy, tokenizer), tokenizer.pad_token_id
        options: dict[str, Any] = {"token_budget": 2 * config.pass_tokens}
        options |= {"precision": config.precision, "processes": world}
        rewards = _rewards(config, sources, models, options, world)
        gold = None
        if "gold" in models:
            gold = RewardModel(models["gold"], sources.tokenizers["gold"], tokenizer, **options)
        parsing = open_parsing(config.segmenter, tokenizer)
        conversations = _open_conversations(config, objects, tokenizer)
        engine, ahead = _load_engine(config, policy, ends, pad, world)
    table = vocabulary(tokenizer, policy.config.get_text_config().vocab_size)
    return Models(
        policy,
        models["reference"],
        models.get("critic"),
        rewards,
        engine,
        tokenizer,
        Vocabulary(**{k: v.to(world.device) for k, v in vars(table).items()}),
        world,
        config.sampling,
        config.pass_tokens,
        config.precision,
        parsing,
        gold,
        ahead,
        conversations,
    )


def load_prompts(
    config: RLConfig, models: Models, objects: GivenObjects
) -> tuple[list[Example], list[Example]]:
    """Prompts to train on and to evaluate on, each once, and short enough for every model."""
    with models.world.raise_on_all_ranks():
        name, tokenizer = Path(config.output_dir).name, models.tokenizer
        loaded = load_examples(
            config.data, "ppo", tokenizer, objects, name=name, needs=config.columns
        )
        # Of an environment prompts are only a beginning: what is played is in the columns.
        examples, held_out = loaded if models.conversations else map(each_prompt_once, loaded)
        readers = {"policy": models.policy, "reference": models.reference, "critic": models.critic}
        for name, scorer, _ in models.reward.parts:
            if isinstance(scorer, RewardModel) and not scorer.foreign:  # else it counts others
                readers[f"reward model {name}"] = scorer.model
        for name, model in readers.items():
            if model is not None and models.conversations is not None:
                models.conversations.check_positions(model, name)
            elif model is not None:
                check_positions(model, examples + held_out, config.sampling.max_new_tokens, name)
        models.reward.check([e.row for e in examples + held_out])
        if models.conversations is not None:
            models.conversations.check(examples[0].row)
    return examples, held_out


def _open_conversations(
    config: RLConfig, objects: GivenObjects, tokenizer: Tokenizer
) -> Conversations | None:
    """Those that the config asks for, checked; None where a response is a single turn."""
    if not config.environment:
        return None
    make = objects.environment
    if make is None:
        make = find_environment(config.environment, config.code, **config.environment_options)
    limits = config.max_turns, config.episode_tokens, config.environment_timeout
    return Conversations(make, ChatTokens(tokenizer, raw=config.raw_turns), *limits)


def _load_engine(
    config: RLConfig, policy: Model, ends: list[int], pad: int, world: World
) -> tuple[Engine, AsyncEngine | None]:
    """What samples, the policy itself or vLLM with a copy of it; and what samples ahead."""
    precision = config.precision
    if config.engine == "native":
        options: dict[str, Any] = {"token_budget": config.rollout_tokens, "precision": precision}
        engine = NativeEngine(policy, ends, pad, **options)
        if not config.async_steps:
            return engine, None
        if world.size > 1 and config.parallel == "fsdp":
            raise RunError(
                "async_steps: 1 gives the process that samples a copy of the policy, of which no "
                "process has the whole with parallel: fsdp. Set engine: vllm and vllm_url to a "
                "vLLM server, which takes it weight by weight, or set parallel: data."
            )
        return engine, SamplerProcess(policy, ends, pad, **options)
    options = {"token_budget": 2 * config.pass_tokens, "precision": precision}
    if config.vllm_url:
        options |= {"folder": config.output_dir, "weights_host": config.vllm_weights_host}
        server = VLLMServer(config.vllm_url, policy, ends, pad, processes=world, **options)
        return server, server if config.async_steps else None
    if world.size > 1:
        raise RunError(
            "vLLM in the training process works with one process, not with several. Set "
            "vllm_url to a vLLM server, leave engine out, or start without torchrun."
        )
    return VLLMEngine(policy, ends, pad, memory=config.vllm_memory, **options), None


def _rewards(
    config: RLConfig,
    sources: RLSources,
    models: Mapping[str, Model],
    options: Mapping[str, Any],
    world: World,
) -> Rewards:
    """Reward models and functions with their weights."""
    if config.code and world.main:
        say(f"rewards: functions of {', '.join(config.code)}")
    scorers: list[tuple[str, Any, float]] = []
    for reward in sources.rewards:
        item, role = reward.item, reward.role
        if not reward.is_model:
            function = import_function(item, config.code) if isinstance(item, str) else item
            timeout = config.reward_timeout
            scorer = SharedFunction(function, sources.tokenizer, world, timeout=timeout)
            scorers.append((scorer.name, scorer, reward.weight))
            continue
        kind, name = RewardModel, "model"
        if reward.is_process:
            separator = models[role].config.step_separator  # checked before it was loaded
            kind = partial(ProcessModel, separator=separator, pooling=config.process_pooling)
            name = PROCESS
        elif isinstance(item, str):
            name = item.rstrip("/").removesuffix("/model").rpartition("/")[2]
        own, combine = sources.tokenizers[role], config.reward_combine
        scorer = kind(models[role], own, sources.tokenizer, combine=combine, **options)
        scorers.append((name, scorer, reward.weight))
    ensembles = [s for _, s, _ in scorers if isinstance(s, RewardModel) and s.members > 1]
    if config.reward_combine != "mean" and not ensembles:
        raise RunError(
            f"reward_combine: {config.reward_combine} needs an ensemble, and there is none among "
            "the rewards. Train one with `members: 4` in the reward stage, or leave it out."
        )
    return Rewards(scorers)


class SharedFunction(RewardFunction):
    """A reward function whose rows are divided over processes; if one fails, all stop."""

    def __init__(self, function: Any, tokenizer: Tokenizer, world: World, **options: Any) -> None:
        super().__init__(function, tokenizer, device=world.device, **options)
        self.world = world

    def __call__(self, prompts: TokenRows, responses: TokenRows, rows: Sequence[Row]) -> Tensor:
        mine = self.world.share([len(r) for r in responses])
        device, world = self.world.device, self.world
        with world.raise_on_all_ranks():
            own_scores = super().__call__(
                [prompts[i] for i in mine], [responses[i] for i in mine], [rows[i] for i in mine]
            )
        if world.size == 1:
            return own_scores
        index = torch.tensor(mine, dtype=torch.int64, device=device)
        width = max(map(len, responses), default=0)
        if not world.sum(torch.tensor(float(own_scores.ndim == 2), device=device)):
            return world.sum(torch.zeros(len(rows), device=device).index_copy(0, index, own_scores))
        if own_scores.ndim == 1:  # rewards have places on another rank
            own_scores = at_last_tokens(own_scores, [len(responses[i]) for i in mine], width)
        scores = torch.zeros(len(rows), width, device=device)
        scores[index, : own_scores.shape[1]] = own_scores
        return world.sum(scores)
