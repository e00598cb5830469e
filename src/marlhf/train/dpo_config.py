"""The settings of direct preference optimisation, online DPO, and labelling alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from marlhf.config.rl import RLConfig, Segmenter, ngram
from marlhf.config.stage import GIVEN, StageConfig
from marlhf.errors import SettingError
from marlhf.fields import setting


@dataclass(frozen=True, kw_only=True)
class DPOConfig(StageConfig):
    """Settings of direct preference optimisation. The paper: rate 2e-7, beta 0.1; HH 0.01.

    >>> DPOConfig(model="tiny", output_dir="runs/dpo", beta=0.05).learning_rate
    2e-07
    """

    ref_model: str | None = None
    """What the policy is tied to; where it started unless given."""
    beta: float = setting(0.1, above=0, on_card=True)
    """How closely: higher stays nearer to the reference. The paper: 0.1 TL;DR, 0.01 HH."""
    label_smoothing: float = 0.0
    """Share of pairs believed to be labelled the wrong way round."""
    learning_rate: float = 2e-7
    """Peak learning rate of AdamW. The paper: 2e-7."""
    max_response_tokens: int = setting(512, above=0)
    """Pairs with a longer response are left out."""
    part: Literal["reward", "ppo"] = "reward"
    """Which part of the data: the reward model's pairs, or those of PPO's prompts (the paper)."""

    columns = ("prompt", "chosen", "rejected")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise SettingError(
                "label_smoothing must be at least 0 and below 0.5, where pairs would teach "
                f"nothing; got {self.label_smoothing}."
            )


# What shapes the credit of tokens or the ratio of a policy gradient, which pairs have no use for.
WITHOUT_EFFECT = ("clip", "dual_clip", "gamma", "kl_estimator", "kl_target", "ratio", "split_last")


@dataclass(frozen=True, kw_only=True)
class PairsConfig(RLConfig):
    """Sampling pairs from a policy, and who says which response is better."""

    num_samples: int = setting(2, on_card=True)
    """Responses to each prompt, of which the best and the worst are a pair."""
    judge: str = setting("", on_card=True, defines_score=True)
    """Who compares responses in place of a reward model, or beside one: openai:MODEL, model:PATH
    or reward:PATH. A response's score is the share of comparisons that it wins; on held-out
    prompts, against the starting policy's response."""
    judge_task: Literal["hh", "tldr", "webgpt"] = setting("hh", defines_score=True)
    """The judge's criteria."""
    judge_url: str = setting("", may_change=True, private=True)
    """The judge's server, ending in /v1; OpenAI's, or that of OPENAI_BASE_URL, if empty."""

    @classmethod
    def required(cls, raw: Mapping[str, Any]) -> list[str]:
        return [x for x in super().required(raw) if x != "reward_model" or not raw.get("judge")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples < 2:
            raise SettingError(
                "num_samples must be at least 2, for a pair is two responses to one prompt; got "
                f"{self.num_samples}."
            )
        known = ("", "openai", "model", "reward")
        if self.judge.partition(":")[0] not in known and not self.judge.startswith(GIVEN):
            raise SettingError(
                f"judge: {self.judge} is unknown. Write openai:MODEL, model:PATH or reward:PATH."
            )
        if self.judge and self.environment:
            raise SettingError(
                "A judge compares single responses, and an environment makes conversations. Leave "
                "out one of them."
            )

    @property
    def needs_rewards(self) -> bool:
        return super().needs_rewards and not self.judge

    @property
    def responses_per_prompt(self) -> int:
        return self.num_samples


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(PairsConfig):
    """Settings of online DPO: TRL's defaults, but that batch_size counts prompts.

    >>> OnlineDPOConfig(model="tiny", num_samples=4).beta
    0.1
    """

    beta: float = setting(0.1, above=0, on_card=True)
    """How closely the policy is tied to the reference, in place of a KL penalty: higher stays
    nearer. For `loss_type: ipo` it is IPO's tau."""
    loss_type: Literal["sigmoid", "ipo"] = setting("sigmoid", on_card=True)
    """DPO's loss, or IPO's squared distance of the margin to 1 / (2 beta)."""
    learning_rate: float = 5e-7
    """Peak learning rate of the policy. TRL: 5e-7."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the rate falls after warm-up."""
    warmup_ratio: float = 0.0
    """Share of the updates in which the rate rises."""
    kl_coef: float = 0.0
    """No KL penalty: `beta` ties the policy to the reference."""
    segmenter: Segmenter = field(default_factory=partial(ngram, n=math.inf))
    """Whole responses are compared, so there is one action per response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {f.name: f.default for f in fields(self)}
        changed = [name for name in WITHOUT_EFFECT if getattr(self, name) != defaults[name]]
        if changed or self.kl_coef:
            raise SettingError(
                f"{', '.join(changed or ['kl_coef'])} would have no effect: online DPO compares "
                "whole responses, and beta ties the policy to the reference. Leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class LabelConfig(PairsConfig):
    """Settings of labelling: of all methods' settings those of sampling and scoring count.

    >>> LabelConfig(model="tiny", votes=100).needs_rewards
    False
    """

    votes: int = setting(0, least=0)
    """Ask people: stop until so many of the pairs have votes of `marlhf annotate`."""

    @classmethod
    def required(cls, raw: Mapping[str, Any]) -> list[str]:
        return [x for x in super().required(raw) if x != "reward_model" or not raw.get("votes")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.environment:
            raise SettingError(
                "Labels are of single responses, and an environment makes conversations. Leave "
                "out environment."
            )
        if self.votes and (self.judge or self.reward_model or self.reward_funcs):
            raise SettingError(
                "votes asks people, and a judge or a reward is named as well. Name one of them."
            )

    @property
    def needs_rewards(self) -> bool:
        return super().needs_rewards and not self.votes
