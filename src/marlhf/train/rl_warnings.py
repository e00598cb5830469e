"""Warnings of reinforcement learning: settings that bias it, a critic that misleads, and sampling
that disagrees with training."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from marlhf.config.rl import RLConfig
from marlhf.core import NGram, masked_mean
from marlhf.runs.layout import RunError
from marlhf.runtime.progress import warn
from marlhf.train.experience import Experience
from marlhf.train.ppo_config import PPOConfig

MAX_FIRST_KL = 0.5
"""Nats per response that bfloat16 explains: SmolLM2-135M, with activations of 25,000, has 0.04 in
35 tokens."""

MIN_REACH = 0.25
"""Share of a response that credit should reach back over. With 0.12 (chained sums, lambda .95) PPO
fell far behind; with 0.6 (the same with n = 5, TL;DR with lambda .95) nothing is lost."""
MIN_EXPLAINED_VARIANCE = -1.0
"""A critic below this adds more noise than the returns have. Of the runs on
TL;DR (docs/results.md) one was below it for long; after 20 steps all others stay above -0.25."""
MIN_CUT = 8
"""Responses of each kind, cut off and finished, that say something about a judge."""
FIRST_STEPS, WINDOW = 40, 20
"""Steps that a critic has to find its scale, and how many of the last steps count."""


def warn_about_first_kl(kl: float, config: RLConfig) -> None:
    """Before the first step policy and reference are one model, and their KL is rounding."""
    if abs(kl) > MAX_FIRST_KL and config.ref_model is None:
        warn(
            f"before the first step the KL to the reference is {kl:.2g} nats a response. Unless "
            "you gave another model as the reference it should be 0: what samples and what scores "
            "disagree. Try precision: float32, or engine: native where it is vllm."
        )


def warn_about_short_reach(reach: float, length: float, lam: float) -> None:
    """Where credit for the score, which is on the last token, ends long before the first tokens."""
    if reach < MIN_REACH * length:
        warn(
            f"credit reaches {reach:.0f} tokens back (lam: {lam:g}), and responses have "
            f"{length:.0f}: what is written early hardly learns from the score at the end. On sums "
            "of 168 tokens a longer reach took 2.5 times fewer steps (docs/results.md). Try lam: "
            "0.99 or 1, longer macro actions, or credit: auto; `marlhf credit` measures which."
        )


def warn_about_fallen_gold(step: int, gold: Sequence[float], start: Sequence[float]) -> None:
    """Where a judge that trains nobody has fallen since the start, while the score rose.

    Prompt by prompt, and only where the fall is beyond two standard errors.
    """
    falls = [before - now for before, now in zip(start, gold)]
    if len(falls) < 2:
        return
    fall, error = statistics.fmean(falls), statistics.stdev(falls) / len(falls) ** 0.5
    if fall > 2 * error:
        warn(
            f"step {step}: the score has risen since the start, but the independent judge has "
            f"fallen by {fall:.2g} (standard error {error:.1g}): the policy is gaming the reward "
            "model. Take an earlier checkpoint, raise kl_coef, or lower the learning rate."
        )


def warn_about_judge_of_cut_responses(gold: Sequence[float], ended: Sequence[bool]) -> None:
    """Where a judge prefers responses that ran into the limit, by more than two standard errors.

    Training changes how many responses end, and such a judge sees that before all else.
    """
    finished = [score for score, end in zip(gold, ended) if end]
    cut = [score for score, end in zip(gold, ended) if not end]
    if min(len(finished), len(cut)) < MIN_CUT:
        return
    gap = statistics.fmean(cut) - statistics.fmean(finished)
    error = sum(statistics.variance(scores) / len(scores) for scores in (cut, finished)) ** 0.5
    if gap > 2 * error:
        warn(
            f"the independent judge gives responses that were cut off {gap:.2g} more than finished "
            f"ones (standard error {error:.1g}), so eval/gold falls where more responses end. "
            "Compare eval/gold_ended, or raise sampling.max_new_tokens."
        )


class CriticWatch:
    """Warns once when the critic's values have long had a negative explained variance."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.warned = False

    def __call__(self, step: int, explained: float) -> None:
        self.recent.append(explained)
        if self.warned or step < FIRST_STEPS or len(self.recent) < WINDOW:
            return
        middle = statistics.median(self.recent)
        if middle < MIN_EXPLAINED_VARIANCE:
            self.warned = True
            warn(
                f"step {step}: the critic misleads: in the last {WINDOW} steps its values "
                f"explained less than nothing of the returns (explained variance {middle:.2g}), so "
                f"advantages are mostly its mistakes. {self._advice()}"
            )

    def _advice(self) -> str:
        if divides_scores(self.config):
            return "Set split_last: true, or pooling: sum."
        return "Raise critic_learning_rate, or bring scores to unit scale by normalize_scores."


class SamplingWatch:
    """Compares log-probs of sampling with those of training, which are of the same policy.

    Where they differ by more than rounding, the engine or the training pass computes another model
    than the one that is trained, and KL, ratios and advantages are of neither.
    """

    def __init__(self, config: RLConfig) -> None:
        self.guards = config.guards
        self.warned = False

    def __call__(self, step: int, experience: Experience, metrics: Mapping[str, float]) -> None:
        # Where a step has several updates, the metric also has the policy's movement in it.
        old_logprobs = experience.old_logprobs
        gap = metrics["rl/logprob_gap"]
        if old_logprobs is not None:
            difference = (old_logprobs - experience.logprobs).abs()
            gap = float(masked_mean(difference, experience.sequences.mask))
        problem = (
            f"log-probs while sampling and while training differ by {gap:.2g} nats per token. Both "
            "are of one policy, and rounding explains about 0.05. Try engine: native where it is "
            "vllm, precision: float32, or compile: false."
        )
        limit = self.guards.max_logprob_gap
        if limit is not None and gap > limit:
            raise RunError(
                f"Stopped at step {step}: {problem} To train all the same, raise "
                f"guards.max_logprob_gap, which is {limit:g}."
            )
        if gap > self.guards.warn_logprob_gap and not self.warned:
            self.warned = True
            warn(f"step {step}: {problem}")


def divides_scores(config: PPOConfig) -> bool:
    """Whether a mean over the last macro action divides the score, which is on its last token."""
    single_tokens = isinstance(config.segmenter, NGram) and config.segmenter.n == 1
    return config.pooling == "mean" and not config.split_last and not single_tokens


def warn_about_divided_scores(config: PPOConfig) -> None:
    """Warn before the first step: later such a run looks as if it learnt."""
    if divides_scores(config):
        warn(
            "pooling: mean divides the score by the length of the last macro action, which the "
            "critic cannot foresee: on TL;DR critics hardly learnt it (docs/results.md). The "
            "authors' code has split_last: true beside it; pooling: sum divides nothing."
        )


def warn_about_sampling(config: RLConfig) -> None:
    """Warn about settings that bias KL or the ratio."""
    if config.sampling.truncated:
        warn(
            "top_k and top_p draw from part of the distribution while log-probs are of all of it: "
            "the KL penalty and the ratio are then estimates from the wrong samples. The paper "
            "does this; top_k: 0 and top_p: 1 are exact."
        )
