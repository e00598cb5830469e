"""Evaluation on held-out prompts while training, with KL and length beside the score."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.data.encode import decode
from marlhf.data.sources import SOURCES
from marlhf.environments import episode_metrics
from marlhf.evaluate.score import repetition
from marlhf.intervals import win_rate
from marlhf.models.base import Tokenizer
from marlhf.rollout.engine import Rollout
from marlhf.runs.layout import BEST, EVAL, SCORE_SCALE, RunError
from marlhf.runtime.loop import Loop
from marlhf.runtime.optim import check_finite
from marlhf.runtime.progress import say, warn
from marlhf.runtime.stage import Example
from marlhf.train.experience import Credit, Experience, RolloutScorer
from marlhf.train.rl_models import Models
from marlhf.train.sampling import sample_examples

SEED = 20241003  # the same draws at every evaluation of every run
MAX_FIRST_KL = 0.5
"""Nats per response that bfloat16 explains: SmolLM2-135M, with activations of 25,000, has 0.04 in
35 tokens."""
MIN_CUT = 8
"""Responses of each kind, cut off and finished, that say something about a judge."""


class HeldOutEvaluation:
    """Samples responses to the same held-out prompts every time, with the same seeds.

    The first evaluation is of the starting policy: later ones are compared with it, and scores are
    normalised by its mean and deviation.
    """

    def __init__(
        self,
        config: RLConfig,
        score: RolloutScorer,
        rows: list[Example],
        loop: Loop,
        credit: Callable[..., Credit],
    ) -> None:
        self.score, self.models, self.rows, self.loop = score, score.models, rows, loop
        self.credit, self.normalises = credit, config.normalize_scores
        self.guards, self.log_samples = config.guards, config.log_samples
        self.keep_best, self.own_reference = config.keep_best, config.ref_model is None
        source = SOURCES.get(config.data.source)  # None for rows of the user's own
        self.true_score = source.true_score if source else None
        if not rows:
            if config.normalize_scores:
                raise RunError(
                    "normalize_scores needs held-out prompts to measure scores on, and there are "
                    "none. Raise data.eval_size and eval_prompts, or set normalize_scores: false."
                )
            warn(
                "no prompts are held out (data.eval_size, eval_prompts), so nothing will be "
                "evaluated and no best policy kept."
            )
        self.start: dict[str, float] = {}
        self.start_scores: list[float] = []
        self.start_gold: list[float] = []
        self.latest: dict[str, float] = {}
        self.best = 0.0

    @torch.no_grad()
    def __call__(self, step: int, kl_coef: float) -> str:
        """Evaluate, log it, keep the best policy. Returns why to stop, or nothing."""
        if not self.rows:
            return ""
        examples, rollout = sample_held_out(self.rows, self.models)
        experience = self.score(examples, rollout)
        check_finite(
            [
                ("the held-out scores", experience.raw_scores),
                ("the policy's log-probs", experience.logprobs),
                ("the reference's log-probs", experience.ref_logprobs),
            ]
        )
        if step == 0 and self.normalises:
            self._normalise_by(experience.raw_scores)
        scores = self.score.normalise(experience.raw_scores).tolist()
        kl = (experience.logprobs - experience.ref_logprobs).sum(dim=1).tolist()
        lengths = experience.mask.sum(dim=1).tolist()
        tokens = experience.response_tokens()
        texts = [decode(self.models.tokenizer, row) for row in tokens]
        gold = self._gold_scores(examples, tokens, texts)
        ended: list[bool] = experience.ended.tolist()
        if step == 0:
            self.start_scores, self.start_gold = scores, gold or []
        metrics = {
            "eval/score": _mean(scores),
            "eval/kl": _mean(kl),
            "eval/length": _mean(lengths),
            "eval/repetition": _mean([repetition(row) for row in experience.sampled_tokens()]),
            "eval/ended": _mean(ended),
            "eval/win_rate": win_rate(self.start_scores, scores),
        }
        if experience.episodes is not None:
            metrics |= episode_metrics(experience.episodes, "eval/")
        if (disagreement := self.models.reward.disagreement) is not None:
            metrics["eval/disagreement"] = float(disagreement)
        if gold:
            metrics["eval/gold"] = _mean(gold)
            metrics["eval/gold_ended"] = _mean(compress(gold, ended))
        self.loop.evaluated(metrics)
        self.loop.run.append(
            EVAL,
            {
                "step": step,
                "scores": scores,
                "gold": gold,
                "kl": kl,
                "length": lengths,
                "ended": ended,
                "sft_scores": self.start_scores,
                **_earned_by_tenth(experience),
            },
        )
        prompts = [e.prompt for e in examples[: self.log_samples]]
        columns = {
            "prompt": [decode(self.models.tokenizer, prompt) for prompt in prompts],
            "response": texts,
            "score": scores,
            "gold": gold or [None] * len(scores),
            "kl": kl,
            "length": lengths,
        }
        self._log_pieces(step, kl_coef, experience, tokens, columns)
        self.latest = metrics
        if step == 0:
            self.start = metrics
            self.best = metrics["eval/score"]
            if self.own_reference:
                warn_about_first_kl(metrics["eval/kl"])
            if self.models.gold is not None and gold:
                warn_about_judge_of_cut_responses(gold, ended)
            return ""
        if metrics["eval/score"] > self.best:
            self.best = metrics["eval/score"]
            if self.keep_best:
                self.loop.keep_model(self.models.policy, BEST)
        warnings, verdict = self.guards.judge(metrics, self.start)
        for line in warnings:
            warn(f"step {step}: {line}")
        if gold and self.start_gold and metrics["eval/score"] > self.start["eval/score"]:
            warn_about_fallen_gold(step, gold, self.start_gold)
        return verdict

    def _normalise_by(self, scores: Tensor) -> None:
        mean, std = self.score.mean, self.score.std = score_scale(scores)
        run = self.loop.run
        run.state[SCORE_SCALE] = [mean, std]
        run.write_state()
        say(f"scores are normalised by mean {mean:.4g}, deviation {std:.4g}")

    def _gold_scores(
        self, examples: list[Example], tokens: list[list[int]], texts: list[str]
    ) -> list[float] | None:
        """By the second reward model, or by the true score, where the task has one."""
        if self.models.gold is not None:
            return self.models.gold([e.prompt for e in examples], tokens).tolist()
        if self.true_score is None:
            return None
        return [self.true_score(str(e.row.prompt), text) for e, text in zip(self.rows, texts)]

    def _log_pieces(
        self,
        step: int,
        kl_coef: float,
        experience: Experience,
        tokens: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> None:
        shuffler = torch.Generator().manual_seed(SEED)
        credit = self.credit(experience, self.models, kl_coef, shuffler)
        episodes = experience.episodes
        starts, advantages = credit.segments.starts.tolist(), credit.advantages.tolist()
        ends = [{turn.stop for turn in e.turns} for e in episodes or []]
        self.loop.log_samples(
            [
                {
                    "step": step,
                    "index": i,
                    **{name: column[i] for name, column in columns.items()},
                    "pieces": _pieces(self.models.tokenizer, row, ends[i] if ends else set()),
                    "starts": starts[i][: len(row)],
                    "advantages": [round(a, 4) for a in advantages[i][: len(row)]],
                    **({"episode": episodes[i].to_dict()} if episodes else {}),
                }
                for i, row in enumerate(tokens[: self.log_samples])
            ]
        )

    def state(self) -> dict[str, Any]:
        names = ("start", "start_scores", "start_gold", "latest", "best")
        scale = {"mean": self.score.mean, "std": self.score.std}
        return {name: getattr(self, name) for name in names} | scale

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self.score if name in ("mean", "std") else self, name, value)


def _earned_by_tenth(experience: Experience) -> dict[str, list[float]]:
    """What a response earns in each tenth of its length, where rewards have places."""
    earned, mask = experience.earned, experience.mask
    if earned is None:
        return {}
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    tenth = (mask.cumsum(dim=1) - 1) * 10 // length
    by_tenth = [torch.where(mask & (tenth == n), earned, 0.0).sum(dim=1).mean() for n in range(10)]
    return {"earned": [round(float(x), 6) for x in by_tenth]}


def sample_held_out(rows: list[Example], models: Models) -> tuple[list[Example], Rollout]:
    """A response to each held-out prompt, with the same seeds in every evaluation."""
    return sample_examples(rows, models, [SEED + i for i in range(len(rows))])


def score_scale(scores: Tensor) -> tuple[float, float]:
    """Mean and deviation of scores; a deviation of 1 where all are alike."""
    deviation = float(scores.std()) if len(scores) > 1 else 0.0
    if deviation < 1e-6:
        deviation = 1.0
        warn("held-out scores are all alike, so they are centred but not scaled.")
    return float(scores.mean()), deviation


def warn_about_first_kl(kl: float) -> None:
    """Before the first step policy and reference are one model, and their KL is rounding."""
    if abs(kl) > MAX_FIRST_KL:
        warn(
            f"before the first step the KL to the reference is {kl:.2g} nats a response. Unless "
            "you gave another model as the reference it should be 0: what samples and what scores "
            "disagree. Try precision: float32, or engine: native where it is vllm."
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


def _pieces(tokenizer: Tokenizer, tokens: list[int], ends: Collection[int] = ()) -> list[str]:
    """The text that each token adds, so that the pieces add up to the text.

    After `ends` tokens somebody else speaks, who completes no character.
    """
    pieces, before = [], ""
    for n in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[:n])
        if text.endswith("\ufffd") and n < len(tokens) and n not in ends:
            pieces.append("")  # part of a character: the token that completes it shows it
            continue
        pieces.append(text[len(before) :])
        before = text
    return pieces


def _mean(numbers: Any) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers) if numbers else float("nan")
