"""The settings of PPO over macro actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from marlhf.core import NGram, Responses
from marlhf.core.advantages import Pooling
from marlhf.core.losses import Level, Ratio
from marlhf.core.rewards import KLEstimator
from marlhf.core.segments import Sigma
from marlhf.rollout import Sampling
from marlhf.train.guards import Guards
from marlhf.train.stage import StageConfig, check_numbers


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StageConfig):
    """Settings of PPO. The defaults are the paper's for Gemma-2B, but for sampling."""

    reward_model: str
    """What scores responses: a reward model's folder or hub name, or `@stage`."""
    critic_model: str | None = None
    """Where the critic starts; the reward model unless given."""
    ref_model: str | None = None
    """What the KL penalty ties the policy to; where the policy started unless given."""
    sampling: Sampling = field(default_factory=Sampling)
    """How responses are drawn. The paper: temperature 0.8 and top_k 50, which bends the KL."""
    rollout_tokens: int = 131072
    """Padded tokens sampled at once: lower it when memory runs out while sampling. Other batches
    mean other random draws, from the same distribution."""

    segmenter: Callable[[Responses], Tensor] = field(default_factory=NGram)
    """The termination rule of macro actions: `{type: ngram, n: 5}`; n: 1 is ordinary PPO."""
    sigma: Sigma = "equal"
    """How a macro action's value weighs its tokens' values."""
    pooling: Pooling = "sum"
    """Macro reward as a sum (the paper's equation) or a mean (the authors' code: a weaker KL)."""
    ratio: Ratio = "token"
    """PPO's ratio by token (the paper's listing) or by macro action (its equation)."""
    value_level: Level = "token"
    """What the critic learns: each token's value, or that of the macro action."""
    split_last: bool = False
    """Make the last token an action of its own, as the authors' code does."""
    rho: float = 1.0
    """Discount of rewards inside a macro action."""
    gamma: float = 1.0
    """Discount from one macro action to the next."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""

    kl_coef: float = 0.05
    """Weight of the KL penalty. The paper: 0.05; 0.1 for 27B and for 7B on WebGPT."""
    kl_estimator: KLEstimator = "k1"
    """How a token's KL is estimated for the penalty."""
    kl_target: float | None = None
    """Adapt kl_coef so that the KL of a response comes near this; None leaves it fixed."""
    kl_horizon: int = 10000
    """Responses over which an adaptive kl_coef moves."""
    score_clip: float | None = None
    """Bound scores to plus or minus this. The authors' code: 2.5."""
    normalize_scores: bool = False
    """Scale scores to mean 0 and deviation 1 on the starting policy's held-out responses."""
    missing_eos_penalty: float = 0.0
    """Taken from the score of a response that was cut off before it ended."""
    whiten: Literal["tokens", "macros", "none"] = "tokens"
    """Scale advantages to mean 0 and deviation 1 over the batch, counting tokens or actions."""

    batch_size: int = 256
    """Prompts in a step. The paper: 256; code: 16."""
    learning_rate: float = 1.5e-5
    """Peak learning rate of the policy. The paper: 1.5e-5 for 2B, 1e-6 for 7B, 7e-7 for 27B."""
    critic_learning_rate: float = 1.5e-5
    """Peak learning rate of the critic. The paper: 1.5e-5 for 2B, 1e-6 for 7B and 27B."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rates fall after warm-up."""
    warmup_steps: int | None = None
    """Steps in which the rates rise; overrides warmup_ratio. The paper: 200; 27B 0; code 20."""
    num_ppo_epochs: int = 1
    """Passes over each batch of responses."""
    num_mini_batches: int = 1
    """Updates in each pass."""
    clip: float = 0.2
    """How far the ratio may move before its gradient stops."""
    value_clip: float | None = 0.2
    """How far a value may move in an update; None for no limit."""
    dual_clip: float | None = None
    """Bound the loss of negative advantages at this multiple; 3 is usual."""

    eval_prompts: int = 64
    """Held-out prompts for evaluations."""
    log_samples: int = 8
    """Held-out prompts whose responses are kept at each evaluation."""
    keep_best: bool = True
    """Keep the policy with the best held-out score in `best/`, beside the last in `model/`."""
    guards: Guards = field(default_factory=Guards)
    """When to warn of reward hacking, and when to stop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("num_ppo_epochs", "num_mini_batches", "critic_learning_rate", "clip")
        optional = ("kl_target", "kl_horizon", "value_clip", "score_clip", "rollout_tokens")
        check_numbers(self, (*positive, *optional), positive=True)
        check_numbers(self, ("kl_coef", "warmup_steps", "eval_prompts", "log_samples"), least=0)
        check_numbers(self, ("gamma", "lam", "rho"), least=0, most=1)
        check_numbers(self, ("missing_eos_penalty",))
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be larger than 1; got {self.dual_clip}.")
        if self.batch_size % self.num_mini_batches:
            raise ValueError(
                f"num_mini_batches ({self.num_mini_batches}) must divide "
                f"batch_size ({self.batch_size})."
            )

    @property
    def one_update(self) -> bool:
        """Whether each batch makes a single update, so that the old policy is the new one."""
        return self.num_ppo_epochs * self.num_mini_batches == 1
