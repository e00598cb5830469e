"""Settings that every method has which learns from its own samples."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from marlhf.config.stage import Sampling, StageConfig
from marlhf.errors import SettingError
from marlhf.fields import check_settings, setting

# The same as in marlhf.core, which needs torch; a test keeps them equal.
Ratio = Literal["token", "macro", "macro_mean"]
KLEstimator = Literal["k1", "k2", "k3"]
Segmenter = Callable[..., Any]
"""A rule from `Responses` to starts [B, T], as `marlhf.core.Segmenter`."""


def ngram(**settings: Any) -> Segmenter:
    """`NGram`, imported when a config is made: only then torch is needed."""
    from marlhf.core import NGram

    return NGram(**settings)


def is_positive(value: object) -> bool:
    """Whether a value is a positive, finite number."""
    return isinstance(value, numbers.Real) and 0 < float(value) < math.inf


@dataclass(frozen=True)
class Guards:
    """Limits, on held-out responses except for the gap. Past `warn_*` there is a warning, past
    `max_*` the run stops.

    >>> start = {"eval/kl": 0, "eval/repetition": 0.1, "eval/length": 40, "eval/ended": 0.9}
    >>> warnings, verdict = Guards(max_kl=20).judge(start | {"eval/kl": 25.0}, start)
    >>> verdict
    'Stopped early: the KL to the reference is 25, past the limit of 20.'
    """

    warn_kl: float = setting(50.0, least=0)
    """KL of a response to the reference, in nats."""
    max_kl: float | None = setting(None, above=0)
    """Stop beyond this KL."""
    warn_repetition: float = setting(0.2, least=0)
    """Share of repeated 4-grams, above that of the starting policy."""
    max_repetition: float | None = setting(None, least=0)
    """Stop beyond this share, above that of the starting policy."""
    warn_length: float = setting(2.0, least=1)
    """Mean length over that of the starting policy, or the other way round."""
    max_length: float | None = setting(None, least=1)
    """Stop beyond this ratio of lengths."""
    warn_cut: float = setting(0.3, least=0)
    """Share of responses that run to `max_new_tokens`, above that of the starting policy."""
    max_cut: float | None = setting(None, least=0)
    """Stop beyond this share, above that of the starting policy."""
    warn_disagreement: float = setting(1.5, least=1)
    """An ensemble's disagreement over that at the start, where the score has risen since."""
    max_disagreement: float | None = setting(None, least=1)
    """Stop beyond this ratio."""
    warn_logprob_gap: float = 0.1
    """Nats per token between log-probs while sampling and while training, at every step: both are
    of one policy, so more than rounding is a fault."""
    max_logprob_gap: float | None = 1.0
    """Stop beyond this gap; None never stops."""

    def __post_init__(self) -> None:
        check_settings(self, "guards.")

    def judge(self, now: dict[str, float], start: dict[str, float]) -> tuple[list[str], str]:
        """Warnings, and why to stop: empty while nothing is past its limit."""
        repeated = now["eval/repetition"] - start["eval/repetition"]
        ratio = max(now["eval/length"], 1.0) / max(start["eval/length"], 1.0)
        drift = max(ratio, 1 / ratio)
        cut = start["eval/ended"] - now["eval/ended"]
        signs = (
            ("the KL to the reference is", now["eval/kl"], self.warn_kl, self.max_kl),
            ("repetition has risen by", repeated, self.warn_repetition, self.max_repetition),
            ("mean length has changed by a factor of", drift, self.warn_length, self.max_length),
            ("the share of responses cut off has risen by", cut, self.warn_cut, self.max_cut),
            (
                "the score has risen, and the ensemble's disagreement by a factor of",
                *(_disagreement_ratio(now, start), self.warn_disagreement, self.max_disagreement),
            ),
        )
        warnings = []
        for what, value, noticed, limit in signs:
            if limit is not None and value > limit:
                return warnings, f"Stopped early: {what} {value:.3g}, past the limit of {limit:g}."
            if value > noticed:
                warnings.append(f"{what} {value:.3g}: the policy may be gaming the reward model.")
        return warnings, ""


def _disagreement_ratio(now: dict[str, float], start: dict[str, float]) -> float:
    """An ensemble's disagreement over that at the start; 0 without one, or with a lower score."""
    before = start.get("eval/disagreement", 0.0)
    if not before or now["eval/score"] <= start["eval/score"]:
        return 0.0
    return now["eval/disagreement"] / before


def parse_combine(text: str) -> float | Literal["min"]:
    """How an ensemble's scores become one: `min`, or k of `mean - k std`, 0 for `mean`.

    >>> parse_combine("mean - 1.5 std"), parse_combine("min"), parse_combine("mean")
    (1.5, 'min', 0.0)
    """
    if text == "min":
        return "min"
    match = re.fullmatch(r"mean(?:\s*-\s*(\d+\.?\d*|\.\d+)\s*\*?\s*std)?", text.strip())
    if match is None:
        raise SettingError(
            "reward_combine must be mean, min or mean - K std with K not negative, such as "
            f"`mean - 2 std`; got {text!r}."
        )
    return float(match[1] or 0)


@dataclass(frozen=True, kw_only=True)
class RLConfig(StageConfig):
    """Sampling, scoring, the KL penalty, macro actions and evaluation."""

    reward_model: str = setting("", on_card=True, defines_score=True)
    """What scores responses: a reward model's folder or hub name, or `@stage`."""
    reward_funcs: tuple[str, ...] = setting((), on_card=True, defines_score=True)
    """More that score: functions of yours as `module:name`, or further reward models."""
    code: tuple[str, ...] = setting((), may_change=True)
    """Modules of your own whose functions `reward_funcs` may name. Functions that are marked with
    `@marlhf.reward.reward_function`, as marlhf's own are, need no entry."""
    reward_weights: tuple[float, ...] | None = setting(None, on_card=True, defines_score=True)
    """Weights of the reward model and of reward_funcs, in that order; 1 each unless given."""
    process_model: str = setting("", on_card=True, defines_score=True)
    """What scores each step of a response: a process reward model's folder or hub name, or `@prm`.
    Its rewards, from -1 for a wrong step to 1 for a good one, are added to the others."""
    process_pooling: Literal["sum", "min", "last"] = setting(
        "min", on_card=True, defines_score=True
    )
    """What steps earn, each at its end: all their rewards (sum), rewards whose sum is near the
    smallest (min, as PURE does it), or that of the last step alone (last)."""
    process_weight: float = setting(1.0, above=0, on_card=True, defines_score=True)
    """Weight of the process model's rewards."""
    reward_combine: str = setting("mean", on_card=True, defines_score=True)
    """How the scores of an ensemble's members become one: `mean`, `min`, or `mean - K std`, which
    takes K times their standard deviation off where they disagree."""
    random_reward_head: bool = False
    """Accept a language model as a reward model: its scores come from random weights. For tests
    and measurements of speed."""
    reward_timeout: float = setting(600.0, above=0, may_change=True)
    """Seconds that a reward function of yours may take for a batch."""
    gold_model: str | None = None
    """A second reward model that only judges: its scores of held-out responses are `eval/gold`.
    Train it on other pairs, and it shows when the policy games the first one."""
    ref_model: str | None = None
    """What the KL penalty ties the policy to; where the policy started unless given."""
    sampling: Sampling = setting(factory=Sampling, on_card=True)
    """How responses are drawn. The paper: temperature 0.8 and top_k 50, which bends the KL."""
    rollout_tokens: int | Literal["auto"] = setting("auto", above=0, may_change=True)
    """Padded tokens sampled at once: lower it when memory runs out while sampling. `auto` is
    131072, or more where that takes less than a twelfth of a GPU's memory. Changes no result."""
    offload: bool = setting(False, may_change=True)
    """Keep reference and reward models in host memory, and on the GPU only while they score. A
    step then waits for two copies of them. Not for models on a shared base, or with
    `parallel: fsdp`."""
    engine: Literal["native", "vllm"] = "native"
    """What samples: marlhf itself, or vLLM, in this process or as a server."""
    vllm_url: str = setting("", may_change=True)
    """The vLLM server to sample with, such as http://127.0.0.1:8000; in this process if empty."""
    vllm_weights_host: str = setting("127.0.0.1", may_change=True)
    """This machine's address where the server's workers fetch new weights, over TCP."""
    vllm_memory: float = setting(0.3, least=0, most=1, may_change=True)
    """The share of the GPU's memory that vLLM has in this process, for weights and cache."""

    async_steps: int = setting(0, least=0, most=1, on_card=True)
    """Sample the next step's responses while this one trains (1), with the weights from before its
    update, in a process of its own or by a vLLM server; 0 samples after the update."""
    importance_cap: float = setting(2.0, least=1)
    """With `async_steps: 1`: the most that a response of older weights counts, relative to what
    the policy gives it now. 1 never weighs one up."""

    segmenter: Segmenter = field(default_factory=partial(ngram, n=5))
    """The termination rule of macro actions: `{type: ngram, n: 5}`; n: 1 is ordinary PPO."""
    ratio: Ratio = setting("token", on_card=True)
    """PPO's ratio by token (the paper's listing) or by macro action (its equation)."""
    split_last: bool = False
    """Make the last token an action of its own, as the authors' code does."""
    gamma: float = setting(1.0, least=0, most=1, on_card=True)
    """Discount from one macro action to the next."""

    environment: str = setting("", on_card=True, defines_score=True)
    """What answers between the model's turns: guess, python, fix-code, textarena:NAME, or a class
    of yours as `module:Class`. Without one a response is a single turn."""
    environment_options: dict[str, Any] = setting(factory=dict, on_card=True, defines_score=True)
    """Settings of the environment, such as {numbers: 64}."""
    max_turns: int = setting(8, above=0, on_card=True)
    """Turns of the model in a conversation."""
    episode_tokens: int = setting(2048, above=0, on_card=True)
    """Tokens of a conversation, prompt included; `sampling.max_new_tokens` is of one turn."""
    raw_turns: bool = False
    """Accept a chat template that renders earlier turns in another way than they were sampled, such
    as without their thinking: turns stay as sampled, and only what comes between is appended."""
    environment_timeout: float = setting(60.0, above=0, may_change=True)
    """Seconds that an environment may take for one reply; past them its episode ends."""

    kl_coef: float = setting(0.05, least=0, on_card=True)
    """Weight of the KL penalty. The paper: 0.05; 0.1 for 27B and for 7B on WebGPT."""
    kl_estimator: KLEstimator = "k1"
    """How a token's KL is estimated for the penalty."""
    kl_target: float | None = setting(None, above=0, on_card=True)
    """Adapt kl_coef so that the KL of a response comes near this; None leaves it fixed."""
    kl_horizon: int = setting(10000, above=0)
    """Responses over which an adaptive kl_coef moves."""
    score_clip: float | None = setting(None, above=0)
    """Bound scores to plus or minus this. The authors' code: 2.5."""
    normalize_scores: bool = setting(False, defines_score=True)
    """Scale scores to mean 0 and deviation 1 on the starting policy's held-out responses."""
    missing_eos_penalty: float = 0.0
    """Taken from the score of a response that was cut off before it ended."""
    overlong: tuple[float, float] | None = setting(None, on_card=True)
    """Shares of max_new_tokens between which `overlong_penalty` sets in. DAPO: [0.8, 1], nothing up
    to the first length, rising to all of it at the second."""
    overlong_penalty: float = setting(1.0, above=0)
    """The most that `overlong` takes from a score."""

    batch_size: int = 256
    """Prompts in a step. The paper: 256; code: 16."""
    learning_rate: float = 1.5e-5
    """Peak learning rate of the policy. The paper: 1.5e-5 for 2B, 1e-6 for 7B, 7e-7 for 27B."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rates fall after warm-up."""
    warmup_steps: int | None = setting(None, least=0, on_card=True)
    """Steps in which the rates rise; overrides warmup_ratio. The paper: 200; 27B 0; code 20."""
    num_mini_batches: int = setting(1, above=0, on_card=True)
    """Updates in each pass over a batch of responses."""
    clip: float | tuple[float, float] = setting(0.2, on_card=True)
    """How far the ratio may move before its gradient stops; [0.2, 0.28] allows more upwards than
    downwards (DAPO)."""
    dual_clip: float | None = setting(None, above=1)
    """Bound the loss of negative advantages at this multiple; 3 is usual."""

    eval_prompts: int = setting(64, least=0)
    """Held-out prompts for evaluations."""
    log_samples: int = setting(8, least=0, may_change=True)
    """Held-out prompts whose responses are kept at each evaluation."""
    keep_best: bool = setting(True, may_change=True)
    """Keep the policy with the best held-out score in `best/`, beside the last in `model/`."""
    guards: Guards = setting(factory=Guards, may_change=True, affects_identity=True)
    """When to warn of reward hacking, and when to stop."""

    columns = ("prompt",)

    @classmethod
    def required(cls, raw: Mapping[str, Any]) -> list[str]:
        scored = any(map(raw.get, ("reward_funcs", "environment", "process_model")))
        return super().required(raw) + ([] if scored else ["reward_model"])

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.clip if isinstance(self.clip, (tuple, list)) else (self.clip, self.clip)
        if len(bounds) != 2 or not all(is_positive(bound) for bound in bounds):
            raise SettingError(
                f"clip must be a positive number, or two, [low, high]; got {self.clip!r}."
            )
        parse_combine(self.reward_combine)
        if self.sampling.temperature == 0:
            raise SettingError("The policy must explore: set sampling.temperature above 0.")
        if not all(math.isfinite(weight) for weight in self.reward_weights or ()):
            raise SettingError(f"reward_weights must be finite; got {self.reward_weights}.")
        if self.offload and self.parallel == "fsdp":
            raise SettingError(
                "offload: true is for whole models, and parallel: fsdp shards them. Leave one of "
                "them out."
            )
        if self.vllm_url and self.engine != "vllm":
            raise SettingError("vllm_url is set, but vLLM is not asked for. Set engine: vllm.")
        if self.vllm_url:
            check_url(self.vllm_url)
            if self.vllm_weights_host in ("", "0.0.0.0", "::"):
                raise SettingError(
                    "vllm_weights_host must be one address of this machine, by which the vLLM "
                    "server reaches it."
                )
        if self.overlong is not None and not 0 <= self.overlong[0] < self.overlong[1] <= 1:
            raise SettingError(
                "overlong must be two rising shares of max_new_tokens from 0 to 1, such as "
                f"[0.8, 1]; got {list(self.overlong)}."
            )
        if self.async_steps:
            self._check_async()
        if self.environment and self.process_model:
            raise SettingError(
                "A process model scores the steps of a single response, and an environment makes "
                "conversations. Leave out process_model, or environment."
            )
        if self.environment and self.async_steps:
            raise SettingError(
                "With an environment, responses are sampled turn by turn and not ahead of "
                "training. Leave out async_steps, or environment."
            )
        if self.batch_size % self.num_mini_batches:
            raise SettingError(
                f"num_mini_batches ({self.num_mini_batches}) must divide "
                f"batch_size ({self.batch_size})."
            )

    def _check_async(self) -> None:
        if self.engine == "vllm" and not self.vllm_url:
            raise SettingError(
                "async_steps: 1 samples while training, which vLLM in the training process cannot. "
                "Set vllm_url to a vLLM server, or engine: native."
            )
        if self.engine == "vllm" and self.sampling.truncated:
            raise SettingError(
                "async_steps: 1 with vLLM weighs responses by the server's log-probs, which with "
                "top_k or top_p are not of the whole distribution. Leave these out, or set "
                "engine: native."
            )
        if self.engine == "native" and self.lora is not None and self.lora.quantize:
            raise SettingError(
                "async_steps: 1 gives the sampling process a copy of the policy, which does not "
                "work for a quantized one. Leave out lora.quantize, or async_steps."
            )

    def _refuse_critic_rules(self, why: str) -> None:
        """A segmenter that reads a critic's values, where there is no critic."""
        if "values" in getattr(self.segmenter, "needs", ()):
            raise SettingError(
                f"segmenter {self.segmenter} reads the values of a critic, and {why}. Set "
                "segmenter: {type: entropy}, or train with ppo and values: critic."
            )

    def warmup(self, total: int) -> int:
        """Steps of warm-up in a run of `total`."""
        return round(self.warmup_ratio * total) if self.warmup_steps is None else self.warmup_steps

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may move down and up."""
        low, high = self.clip if isinstance(self.clip, (tuple, list)) else (self.clip, self.clip)
        return low, high

    @property
    def needs_rewards(self) -> bool:
        """Whether nothing scores without an outcome reward model or a function."""
        return not (self.environment or self.process_model)

    @property
    def one_update(self) -> bool:
        """Whether each batch makes a single update, so that the old policy is the new one."""
        return self.num_mini_batches == 1

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy's log-probs before its updates take a pass of their own."""
        return not self.one_update or self.async_steps > 0

    @property
    def responses_per_prompt(self) -> int:
        """Rows of each prompt in a batch."""
        return 1


def check_url(url: str) -> None:
    """Refuse what is not the address of a server, and secrets in it, which would get into logs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError("vllm_url must be like http://127.0.0.1:8000.")
    if "@" in parts.netloc:
        raise SettingError("vllm_url holds a password. Put the key into VLLM_API_KEY instead.")
