"""The settings of every run, as in recipes/smollm2-tldr, recipes/smollm2/hh.yaml and mbpp.yaml.

They are dataclasses and not recipes, so that a machine without pydantic can run them; a test
holds the two against each other.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from evidence.data import data_config
from evidence.settings import Settings
from marlhf.core import Constituents, NGram, Perplexity
from marlhf.rollout import Sampling
from marlhf.train.dpo import DPOConfig
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.reward import RewardConfig
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.sft import SFTConfig

Config = SFTConfig | RewardConfig | PPOConfig | RLOOConfig | DPOConfig
KINDS = {SFTConfig: "sft", RewardConfig: "reward", PPOConfig: "ppo", RLOOConfig: "rloo"} | {
    DPOConfig: "dpo"
}

FAMILIES = {
    "rloo": "rloo",
    "ppo": "ppo",
    "ppo-weak": "ppo",
    "n5-sum": "macro",
    "n5-mean": "macro",
    "ninf-sum": "bandit",
    "ninf-mean": "bandit",
    "perplexity": "macro",
    "parsing": "macro",
    "dpo": "dpo",
    "ppo-horizon": "ppo",
    "n5-short": "macro",
    "n5-split": "macro",
    "n5-start": "macro",
}
"""Each method on TL;DR, and whose learning rate it takes: tries are made with the first of each.
They begin in this order: the longest first, and what may be left out last."""
SEEDED = ("ppo", "n5-sum")
"""Methods with several seeds."""
EXTRA = ("n5-split", "n5-start", "n5-mean", "ppo-weak", "ppo-horizon", "n5-short")
"""Methods that get more seeds with --extras, in this order."""
OPTIONAL = ("n5-split", "n5-start")
"""Methods that only --extras has. The authors' code not only averages the rewards of an action, it
also makes the last token, which carries the score, an action of its own. And the value before an
action, unlike the mean of values inside it, has not seen what it is to judge."""
SMALL = {"hh": ("ppo", "n5-sum"), "mbpp": ("ppo", "n10-sum")}
SMALL_RATE = 2e-5
"""Learning rate on HH and MBPP, where nothing was tried."""
DPO_SLOWER = 8
"""DPO's learning rates are those of reinforcement learning over this."""
RLOO_SAMPLES = 4
"""Responses to a prompt that RLOO compares; the others take one."""
WEAKER = 5
"""By how much mean pooling of 5-grams weakens the KL penalty, and so does the control."""
FAR, NEAR = 0.9898, 0.7738  # 0.95 ** (1 / 5), 0.95 ** 5
"""Lambdas with which single tokens look as far ahead as 5-grams do with 0.95, and 5-grams no
further than single tokens do: the other controls."""
REWARDS = {"reward": (1e-4, 1), "reward-twice": (5e-5, 2)}
"""Learning rate and epochs of the reward model that teaches, and of one to compare it with."""
UNIT_TESTS = "marlhf.reward.code:unit_tests"
RESPONSES = {"tldr": 96, "hh": 96, "mbpp": 256}
"""Longest responses to learn from."""


def tries(settings: Settings) -> dict[str, tuple[str, float]]:
    """Name of each try to its method and learning rate; none where there is nothing to choose."""
    if len(settings.rates) < 2:
        return {}
    firsts: dict[str, str] = {}
    for name, family in FAMILIES.items():
        firsts.setdefault(family, name)
    pairs = [(name, rate) for name in firsts.values() for rate in settings.rates]
    return {f"try-{name}-{rate:g}": (name, rate) for name, rate in pairs}


def sft(settings: Settings, task: str) -> SFTConfig:
    code = task == "mbpp"
    tokens = settings.reward_prompt_tokens if code else settings.prompt_tokens
    return SFTConfig(
        model=settings.model,
        data=data_config(settings, task, tokens),
        batch_size=settings.model_batch // 2 if code else settings.model_batch,
        num_epochs=3 if code else 1,
        learning_rate=5e-5,
        max_response_tokens=RESPONSES[task],
        eval_every=0,
        **_common(settings, f"{task}/sft") | {"compile": False},  # takes longer than so few steps
    )


def reward(settings: Settings, task: str, name: str = "reward") -> RewardConfig:
    rate, epochs = REWARDS[name]
    return RewardConfig(
        model=settings.model_of(f"{task}/sft"),
        data=data_config(settings, task, settings.reward_prompt_tokens),
        batch_size=settings.model_batch,
        num_epochs=epochs,
        learning_rate=rate,
        max_response_tokens=RESPONSES[task],
        eval_every=0,
        **_common(settings, f"{task}/{name}"),
    )


def gold(settings: Settings) -> RewardConfig:
    """The second reward model: other pairs, another seed."""
    data = data_config(settings, "tldr", settings.reward_prompt_tokens, "gold")
    folder = str(settings.folder("tldr/gold"))
    return replace(reward(settings, "tldr"), data=data, seed=1, output_dir=folder)


def method(
    settings: Settings, name: str, rate: float, seed: int, folder: str, steps: int
) -> Config:
    """A method on TL;DR."""
    if name == "dpo":
        return _dpo(settings, rate, seed, folder)
    if name == "rloo":
        rest = _sampled(settings, "tldr", rate, seed, folder, steps)
        return RLOOConfig(
            reward_model=settings.model_of("tldr/reward"), num_samples=RLOO_SAMPLES, **rest
        )
    base = PPOConfig(
        reward_model=settings.model_of("tldr/reward"),
        critic_learning_rate=rate,
        **_sampled(settings, "tldr", rate, seed, folder, steps),
    )
    changes: dict[str, dict[str, Any]] = {
        "ppo": {"segmenter": NGram(1)},
        "ppo-weak": {"segmenter": NGram(1), "kl_coef": settings.beta / WEAKER},
        "n5-sum": {"segmenter": NGram(5)},
        "n5-mean": {"segmenter": NGram(5), "pooling": "mean"},
        "n5-split": {"segmenter": NGram(5), "pooling": "mean", "split_last": True},
        "n5-start": {"segmenter": NGram(5), "sigma": "start"},
        "ninf-sum": {"segmenter": NGram(math.inf)},
        "ninf-mean": {"segmenter": NGram(math.inf), "pooling": "mean"},
        "perplexity": {"segmenter": Perplexity()},
        "parsing": {"segmenter": Constituents()},
        "ppo-horizon": {"segmenter": NGram(1), "lam": FAR},
        "n5-short": {"segmenter": NGram(5), "lam": NEAR},
    }
    return replace(base, **changes[name])


def small(settings: Settings, task: str, name: str, folder: str) -> PPOConfig:
    """The runs on HH and on MBPP, one seed each."""
    config = PPOConfig(
        critic_learning_rate=SMALL_RATE,
        segmenter=NGram({"ppo": 1, "n5-sum": 5, "n10-sum": 10}[name]),
        **_sampled(settings, task, SMALL_RATE, 0, folder, settings.small_steps),
    )
    if task == "hh":
        sampling = Sampling(max_new_tokens=settings.response_tokens * 4 // 3)
        return replace(config, reward_model=settings.model_of("hh/reward"), sampling=sampling)
    return replace(
        config,
        critic_model=settings.model_of("mbpp/sft"),
        reward_funcs=(UNIT_TESTS,),
        data=data_config(settings, task, settings.reward_prompt_tokens),
        sampling=Sampling(max_new_tokens=settings.response_tokens * 4),
        batch_size=settings.batch // 2,
        learning_rate=SMALL_RATE / 2,
        normalize_scores=False,
        missing_eos_penalty=0.0,
        eval_prompts=min(90, settings.eval_prompts),
    )


def _dpo(settings: Settings, rate: float, seed: int, folder: str) -> DPOConfig:
    return DPOConfig(
        model=settings.model_of("tldr/sft"),
        data=data_config(settings, "tldr", settings.prompt_tokens),
        batch_size=settings.model_batch,
        num_epochs=1,
        learning_rate=rate / DPO_SLOWER,
        beta=0.1,
        max_response_tokens=RESPONSES["tldr"],
        eval_every=0,
        seed=seed,
        **_common(settings, folder),
    )


def _sampled(
    settings: Settings, task: str, rate: float, seed: int, folder: str, steps: int
) -> dict[str, Any]:
    """What PPO and RLOO share."""
    return {
        "model": settings.model_of(f"{task}/sft"),
        "data": data_config(settings, task, settings.prompt_tokens, prompts=True),
        "batch_size": settings.batch,
        "num_steps": steps,
        "num_epochs": 100,
        "learning_rate": rate,
        "warmup_steps": 10,
        "kl_coef": settings.beta,
        "normalize_scores": True,
        "missing_eos_penalty": 1.0,
        "sampling": Sampling(max_new_tokens=settings.response_tokens),
        "eval_every": settings.eval_every,
        "eval_prompts": settings.eval_prompts,
        "log_samples": 4,
        "keep_best": False,
        "seed": seed,
        **_common(settings, folder),
    }


def _common(settings: Settings, folder: str) -> dict[str, Any]:
    return {
        "output_dir": str(settings.folder(folder)),
        "token_budget": settings.token_budget,
        "compile": settings.compile,
        "device": settings.device,
        "save_every": settings.save_every,
        "keep_checkpoints": 1,
    }
