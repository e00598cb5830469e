"""Evaluation on held-out prompts while training, with KL and length beside the score."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.data.encode import decode
from marlhf.data.toy import gold_score
from marlhf.intervals import win_rate
from marlhf.models.base import Tokenizer
from marlhf.rollout.repetition import repetition
from marlhf.runs.layout import BEST, EVAL, SAMPLES, SCORE_SCALE, RunError
from marlhf.runtime.loop import Loop
from marlhf.runtime.optim import check_finite
from marlhf.runtime.progress import say, warn
from marlhf.runtime.stage import Example
from marlhf.runtime.timing import Clock
from marlhf.train.experience import Credit, Experience, rollout_and_score, sample_responses
from marlhf.train.rl_models import Models
from marlhf.train.rl_warnings import (
    warn_about_fallen_gold,
    warn_about_first_kl,
    warn_about_judge_of_cut_responses,
)

SEED = 20241003  # the same draws at every evaluation of every run


class HeldOutEvaluation:
    """Samples responses to the same held-out prompts every time, with the same seeds.

    The first evaluation is of the starting policy: later ones are compared with it, and scores are
    normalised by its mean and deviation.
    """

    def __init__(
        self,
        config: RLConfig,
        models: Models,
        held_out: list[Example],
        loop: Loop,
        credit: Callable[..., Credit],
    ) -> None:
        self.config, self.models, self.loop = config, models, loop
        self.credit = credit
        self.rows = held_out[: config.eval_prompts]
        if not self.rows:
            if config.normalize_scores:
                raise RunError(
                    "normalize_scores needs held-out prompts to measure scores on, and there are "
                    "none. Raise data.eval_size and eval_prompts, or set normalize_scores: false."
                )
            warn(
                "no prompts are held out (data.eval_size, eval_prompts), so nothing will be "
                "evaluated and no best policy kept."
            )
        self.prompts = [e.prompt for e in self.rows]
        self.start: dict[str, float] = {}
        self.start_scores: list[float] = []
        self.start_gold: list[float] = []
        self.latest: dict[str, float] = {}
        self.best = 0.0
        self.mean, self.std = 0.0, 1.0

    def normalise(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.std

    @torch.no_grad()
    def __call__(self, step: int, kl_coef: float) -> str:
        """Evaluate, log it, keep the best policy. Returns why to stop, or nothing."""
        if not self.rows:
            return ""
        seeds = [SEED + i for i in range(len(self.rows))]
        clock = Clock(self.models.world.device)
        experience = rollout_and_score(
            self.rows, self.models, self.config, seeds, self.normalise, clock
        )
        check_finite(
            [
                ("the held-out scores", experience.raw_scores),
                ("the policy's log-probs", experience.logprobs),
                ("the reference's log-probs", experience.ref_logprobs),
            ]
        )
        if step == 0 and self.config.normalize_scores:
            self._normalise_by(experience.raw_scores)
        scores = self.normalise(experience.raw_scores).tolist()
        kl = (experience.logprobs - experience.ref_logprobs).sum(dim=1).tolist()
        sequences = experience.sequences
        tokens = [row[:n] for row, n in zip(sequences.responses.tolist(), sequences.lengths)]
        texts = [decode(self.models.tokenizer, row) for row in tokens]
        gold = self._gold_scores(tokens, texts)
        ended: list[bool] = experience.ended.tolist()
        if step == 0:
            self.start_scores, self.start_gold = scores, gold or []
        metrics = {
            "eval/score": _mean(scores),
            "eval/kl": _mean(kl),
            "eval/length": _mean(sequences.lengths),
            "eval/repetition": _mean([repetition(row) for row in tokens]),
            "eval/ended": _mean(ended),
            "eval/win_rate": win_rate(self.start_scores, scores),
        }
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
                "length": list(sequences.lengths),
                "ended": ended,
                "sft_scores": self.start_scores,
            },
        )
        self._log_samples(step, kl_coef, experience, tokens, texts, scores, kl, gold)
        self.latest = metrics
        if step == 0:
            self.start = metrics
            self.best = metrics["eval/score"]
            warn_about_first_kl(metrics["eval/kl"], self.config)
            if self.models.gold is not None and gold:
                warn_about_judge_of_cut_responses(gold, ended)
            return ""
        if metrics["eval/score"] > self.best:
            self.best = metrics["eval/score"]
            if self.config.keep_best:
                self.loop.keep_model(self.models.policy, BEST)
        warnings, verdict = self.config.guards.judge(metrics, self.start)
        for line in warnings:
            warn(f"step {step}: {line}")
        if gold and self.start_gold and metrics["eval/score"] > self.start["eval/score"]:
            warn_about_fallen_gold(step, gold, self.start_gold)
        return verdict

    def _normalise_by(self, scores: Tensor) -> None:
        self.mean, self.std = score_scale(scores)
        run = self.loop.run
        run.state[SCORE_SCALE] = [self.mean, self.std]
        run.write_state()
        say(f"scores are normalised by mean {self.mean:.4g}, deviation {self.std:.4g}")

    def _gold_scores(self, tokens: list[list[int]], texts: list[str]) -> list[float] | None:
        """By the second reward model, or by the true score, which only the offline task has."""
        if self.models.gold is not None:
            return self.models.gold(self.prompts, tokens).tolist()
        if self.config.data.source == "toy":
            return [gold_score(str(e.row.prompt), text) for e, text in zip(self.rows, texts)]
        return None

    def _log_samples(
        self,
        step: int,
        kl_coef: float,
        experience: Experience,
        tokens: list[list[int]],
        texts: list[str],
        scores: list[float],
        kl: list[float],
        gold: list[float] | None,
    ) -> None:
        shuffler = torch.Generator().manual_seed(SEED)
        credit = self.credit(experience, self.models, self.config, kl_coef, shuffler)
        starts, advantages = credit.segments.starts.tolist(), credit.advantages.tolist()
        for i, row in enumerate(tokens[: self.config.log_samples]):
            self.loop.run.append(
                SAMPLES,
                {
                    "step": step,
                    "index": i,
                    "prompt": decode(self.models.tokenizer, self.prompts[i]),
                    "response": texts[i],
                    "score": scores[i],
                    "gold": gold[i] if gold else None,
                    "kl": kl[i],
                    "length": len(row),
                    "pieces": _pieces(self.models.tokenizer, row),
                    "starts": starts[i][: len(row)],
                    "advantages": [round(a, 4) for a in advantages[i][: len(row)]],
                },
            )

    def state(self) -> dict[str, Any]:
        names = ("start", "start_scores", "start_gold", "latest", "best", "mean", "std")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@torch.no_grad()
def starting_scale(
    config: RLConfig, models: Models, held_out: list[Example]
) -> tuple[float, float]:
    """What a run that begins with these models will normalise its scores by."""
    rows = held_out[: config.eval_prompts]
    seeds = [SEED + i for i in range(len(rows))]
    rollout = sample_responses([e.prompt for e in rows], models, config.sampling, seeds)
    prompts = [e.prompt for e in rows]
    return score_scale(models.reward(prompts, rollout.responses, [e.row for e in rows]))


def score_scale(scores: Tensor) -> tuple[float, float]:
    """Mean and deviation of scores; a deviation of 1 where all are alike."""
    deviation = float(scores.std()) if len(scores) > 1 else 0.0
    if deviation < 1e-6:
        deviation = 1.0
        warn("held-out scores are all alike, so they are centred but not scaled.")
    return float(scores.mean()), deviation


def _pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The text that each token adds, so that the pieces add up to the text."""
    pieces, before = [], ""
    for n in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[:n])
        if text.endswith("\ufffd") and n < len(tokens):
            pieces.append("")  # part of a character: the token that completes it shows it
            continue
        pieces.append(text[len(before) :])
        before = text
    return pieces


def _mean(numbers: Any) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers) if numbers else float("nan")
