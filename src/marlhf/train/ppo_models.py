"""The four models of PPO, loaded and found to fit together."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf.core import Vocabulary
from marlhf.models.load import (
    Model,
    Tokenizer,
    check_vocabulary,
    end_tokens,
    is_scalar,
    load_policy,
    load_scalar,
    load_tokenizer,
    pick_device,
    same_tokenizer,
)
from marlhf.reward import RewardModel
from marlhf.rollout import Engine, NativeEngine
from marlhf.spans import vocabulary
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.progress import warn
from marlhf.train.run import RunError


@dataclass(frozen=True)
class Models:
    """All that a step talks to."""

    policy: Model
    reference: Model
    critic: Model
    reward: RewardModel
    engine: Engine
    tokenizer: Tokenizer
    vocabulary: Vocabulary


def load_models(config: PPOConfig) -> Models:
    """Policy and critic to train, reference and reward model to ask."""
    device = pick_device(config.device)
    remote, checkpointing = config.trust_remote_code, config.gradient_checkpointing
    tokenizer = load_tokenizer(config.model, trust_remote_code=remote)
    policy = load_policy(
        config.model, seed=config.seed, trust_remote_code=remote, checkpointing=checkpointing
    )
    ref_path = config.ref_model or config.model
    reference = load_policy(ref_path, seed=config.seed, trust_remote_code=remote)
    if not same_tokenizer(tokenizer, load_tokenizer(ref_path, trust_remote_code=remote)):
        raise RunError(
            f"The tokenizer of the reference {ref_path} is not that of {config.model}: its "
            "log-probs would be of other tokens. Set ref_model to a model with the policy's "
            "tokenizer, or leave it out."
        )
    critic_path = config.critic_model or config.reward_model
    if not is_scalar(config.reward_model, trust_remote_code=remote):
        warn(
            f"{config.reward_model} is not a reward model but a language model: its scores come "
            "from a head of random weights and mean nothing. Train one with `marlhf reward`."
        )
    critic = load_scalar(
        critic_path, seed=config.seed, trust_remote_code=remote, checkpointing=checkpointing
    )
    if not same_tokenizer(tokenizer, load_tokenizer(critic_path, trust_remote_code=remote)):
        raise RunError(
            f"The critic starts from {critic_path}, whose tokenizer is not that of {config.model}: "
            "it would read other tokens. Set critic_model to a model with the policy's tokenizer, "
            "such as the SFT model."
        )
    reward = RewardModel(
        load_scalar(config.reward_model, trust_remote_code=remote).to(device),
        load_tokenizer(config.reward_model, trust_remote_code=remote),
        tokenizer,
        token_budget=2 * config.token_budget,
        precision=config.precision,
    )
    for name, model in (("the policy", policy), ("the reference", reference), ("critic", critic)):
        check_vocabulary(model, tokenizer, name)
    policy = policy.to(device)
    engine = NativeEngine(
        policy,
        end_tokens(policy, tokenizer),
        tokenizer.pad_token_id,
        token_budget=config.rollout_tokens,
        precision=config.precision,
    )
    size = policy.get_input_embeddings().weight.shape[0]
    table = vocabulary(tokenizer, size)
    return Models(
        policy,
        reference.to(device).requires_grad_(False),
        critic.to(device),
        reward,
        engine,
        tokenizer,
        Vocabulary(**{k: v.to(device) for k, v in vars(table).items()}),
    )
