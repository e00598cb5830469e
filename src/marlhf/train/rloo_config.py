"""The settings of the methods without a critic: RLOO, GRPO and what lies between."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from marlhf.config.rl import Ratio, RLConfig, Segmenter, ngram
from marlhf.config.settings import to_raw
from marlhf.config.stage import Schedule
from marlhf.errors import SettingError
from marlhf.fields import setting


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(RLConfig):
    """Settings of RLOO, which are the defaults. The paper: rate 1.5e-5, 4 samples per prompt.

    >>> RLOOConfig(model="tiny").num_samples
    4
    """

    num_samples: int = setting(4, on_card=True)
    """Responses to each prompt; batch_size counts prompts. The paper: 4."""
    tree: tuple[int, ...] | None = setting(None, on_card=True)
    """Branch responses at macro boundaries and compare siblings: [4, 4] samples 4 beginnings of a
    response and continues each in 4 ways. The product replaces num_samples. More tokens are
    sampled after branches than before, so late tokens weigh more in the loss."""
    baseline: Literal["leave_one_out", "group", "global_local"] = "leave_one_out"
    """What a response is held against: the mean of the others to its prompt (RLOO), or the mean
    of all of them in units of their deviation (GRPO). `global_local`, for trees alone, is TreeRL's:
    against its siblings and against the whole tree."""
    scale_group: bool = True
    """With `baseline: group`, divide by the deviation; it favours prompts with little spread."""
    group: Literal["prompt", "state"] = setting("prompt", on_card=True)
    """With an environment: compare whole episodes of a prompt (prompt), or also each turn with the
    turns of those episodes that were taken in the same state (state), as GiGPO does."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where kl_coef acts: a penalty on the reward (RLOO), or a term of the loss, by the estimator
    k3 (GRPO)."""
    segmenter: Segmenter = field(default_factory=partial(ngram, n=math.inf))
    """The termination rule of macro actions. One action per response is RLOO; shorter ones are
    credited with the reward still to come: `{type: ngram, n: 5}`."""
    ratio: Ratio = "macro"
    """The ratio by action (RLOO: a response's log-prob is the sum over its tokens), its mean over
    tokens (`macro_mean`), or by token, each token of the batch counting alike (GRPO)."""

    divide_by: Literal["tokens", "max_tokens"] = "tokens"
    """With `ratio: token`, what the sum over tokens is divided by: the tokens of the batch, or
    responses times max_new_tokens, which is the same for every batch (Dr. GRPO)."""
    dynamic_sampling: int = setting(0, least=0, on_card=True)
    """Replace prompts whose responses all have the same score by others, drawn at random, up to so
    many times a step (DAPO). Those that remain are left out of the update."""
    update_share: float = setting(1.0, above=0, most=1, on_card=True)
    """The share of a batch's responses that the update uses: those with the largest advantages."""

    preset_kind = "rloo"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_critic_rules("this method has none")
        if self.divide_by == "max_tokens" and self.ratio != "token":
            raise SettingError(
                f"divide_by: max_tokens counts tokens, and ratio: {self.ratio} is a mean over "
                "macro actions. Set ratio: token."
            )
        if self.dynamic_sampling and (self.tree is not None or self.async_steps):
            other = f"tree: {list(self.tree)}" if self.tree else "async_steps: 1"
            raise SettingError(
                "dynamic_sampling samples again once the responses to a prompt are scored, which "
                f"does not go with {other}. Leave out one of them."
            )
        if self.baseline == "global_local" and (self.tree is None or self.gamma != 1):
            raise SettingError(
                "baseline: global_local compares the branches of a tree by whole returns. Set "
                "tree, such as [6, 5], and leave gamma at 1."
            )
        if self.num_samples < 2:
            raise SettingError(
                "num_samples must be at least 2, for a response is compared with the others to "
                f"its prompt; got {self.num_samples}. For one response a prompt, take ppo with "
                "segmenter: {type: ngram, n: .inf}, which is REINFORCE with a critic's baseline."
            )
        if self.tree is not None:
            self._check_tree(self.tree)

    @property
    def responses_per_prompt(self) -> int:
        """Rows of each prompt in a batch: the leaves of its tree, or `num_samples`."""
        return self.num_samples if self.tree is None else math.prod(self.tree)

    def _check_tree(self, tree: tuple[int, ...]) -> None:
        if not tree or min(tree) < 2:
            raise SettingError(
                "Each level of a tree needs at least 2 branches, for siblings are compared with "
                f"each other; got tree: {list(tree)}. Leave out levels of 1."
            )
        if self.num_samples not in (type(self).num_samples, math.prod(tree)):
            raise SettingError(
                f"tree: {list(tree)} gives {math.prod(tree)} responses to a prompt, but "
                f"num_samples is {self.num_samples}. Leave num_samples out."
            )
        if getattr(self.segmenter, "looks_at", "") == "response":
            raise SettingError(
                "A tree branches where a macro action starts, which must be known by then, and "
                "this segmenter looks at the whole response. Set segmenter: {type: ngram, n: 5}, "
                "sentences or lines."
            )
        if self.environment:
            raise SettingError(
                "A tree continues a response from its middle, where an environment would have to "
                "be put back. Leave out tree, or environment."
            )
        if self.async_steps:
            raise SettingError(
                "A tree is sampled level by level, each after the macro actions of the last are "
                "known, so not ahead. Leave out async_steps, or tree."
            )
        if len(tree) > self.sampling.max_new_tokens:
            raise SettingError(
                f"A response of at most {self.sampling.max_new_tokens} tokens has no room for the "
                f"{len(tree)} levels of tree: {list(tree)}. Raise sampling.max_new_tokens."
            )
        if len(tree) > 1 and to_raw(self.segmenter) == {"type": "ngram", "n": math.inf}:
            raise SettingError(
                f"tree: {list(tree)} branches at macro boundaries, and one action per response has "
                "none. Set segmenter: {type: ngram, n: 5}, or another rule."
            )


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RLOOConfig):
    """RLOO with the settings of group relative policy optimisation, by default those of TRL.

    >>> GRPOConfig().learning_rate, GRPOConfig(clip=(0.2, 0.28)).clip_range
    (1e-06, (0.2, 0.28))
    """

    num_samples: int = 8
    """Responses to each prompt; batch_size counts prompts."""
    learning_rate: float = 1e-6
    """Peak learning rate of the policy."""
    schedule: Schedule = "linear"
    """How the rate falls after warm-up."""
    warmup_ratio: float = 0.0
    """Share of the updates in which the rate rises."""
    baseline: Literal["leave_one_out", "group", "global_local"] = "group"
    """The mean of all responses to the prompt, in units of their deviation."""
    kl_in: Literal["reward", "loss"] = "loss"
    """kl_coef weighs a term of the loss."""
    kl_coef: float = 0.0
    """Weight of the KL term. The GRPO paper: 0.04."""
    ratio: Ratio = "token"
    """The ratio by token, each token of the batch counting alike, which TRL calls `dapo`. With
    `macro_mean` each response counts alike (`grpo`)."""
