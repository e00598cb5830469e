"""Evaluation while training: held-out prompts, a fixed seed, every number beside the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from marlhf.configs.rl import RLConfig
from marlhf.data.encode import decode
from marlhf.models.base import Tokenizer
from marlhf.rollout.measure import repetition
from marlhf.runs.write import RunError
from marlhf.train.loop import Loop
from marlhf.train.optim import check_finite
from marlhf.train.progress import say, warn
from marlhf.train.rl_models import Models
from marlhf.train.stage import Example
from marlhf.train.timing import Clock
from marlhf.train.watch import warn_apart

if TYPE_CHECKING:
    from marlhf.train.experience import Credit, Experience

SEED = 20241003  # the same draws at every evaluation of every run


class HeldOutEvaluation:
    """Asks the policy the same held-out questions every time.

    The first evaluation is of the starting policy: what others are compared with, and what
    scores are normalised by.
    """

    def __init__(
        self,
        config: RLConfig,
        models: Models,
        held_out: list[Example],
        loop: Loop,
        collect: Callable[..., Experience],
        credit: Callable[..., Credit],
    ) -> None:
        self.config, self.models, self.loop = config, models, loop
        self.collect, self.credit = collect, credit
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
        self.latest: dict[str, float] = {}
        self.best = 0.0
        self.mean, self.std = 0.0, 1.0
        self.true_score = _true_score(config)

    def normalise(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.std

    @torch.no_grad()
    def __call__(self, step: int, kl_coef: float) -> str:
        """Evaluate, write everything down, and say why to stop, if anything says so."""
        if not self.rows:
            return ""
        seeds = [SEED + i for i in range(len(self.rows))]
        clock = Clock(self.models.world.device)
        found = self.collect(self.rows, self.models, self.config, seeds, self.normalise, clock)
        check_finite(
            [
                ("the held-out scores", found.raw_scores),
                ("the policy's log-probs", found.logprobs),
                ("the reference's log-probs", found.ref_logprobs),
            ]
        )
        if step == 0 and self.config.normalize_scores:
            self.mean = float(found.raw_scores.mean())
            several = len(found.raw_scores) > 1
            self.std = float(found.raw_scores.std()) if several else 0.0
            if self.std < 1e-6:
                self.std = 1.0
                warn("held-out scores are all alike, so they are centred but not scaled.")
            say(f"scores are normalised by mean {self.mean:.4g}, deviation {self.std:.4g}")
        scores = self.normalise(found.raw_scores).tolist()
        kl = (found.logprobs - found.ref_logprobs).sum(dim=1).tolist()
        sequences = found.sequences
        tokens = [row[:n] for row, n in zip(sequences.responses.tolist(), sequences.lengths)]
        texts = [decode(self.models.tokenizer, row) for row in tokens]
        gold = None
        if self.models.gold is not None:
            gold = self.models.gold(self.prompts, tokens).tolist()
        elif self.true_score is not None:
            gold = [self.true_score(str(e.row.prompt), text) for e, text in zip(self.rows, texts)]
        if step == 0:
            self.start_scores = scores
        metrics = {
            "eval/score": _mean(scores),
            "eval/kl": _mean(kl),
            "eval/length": _mean(sequences.lengths),
            "eval/repetition": _mean([repetition(row) for row in tokens]),
            "eval/ended": float(found.ended.float().mean()),
            "eval/win_rate": _wins(scores, self.start_scores),
        }
        if gold:
            metrics["eval/gold"] = _mean(gold)
        self.loop.evaluated(metrics)
        self.loop.run.append(
            "eval.jsonl",
            {
                "step": step,
                "scores": scores,
                "gold": gold,
                "kl": kl,
                "length": list(sequences.lengths),
                "sft_scores": self.start_scores,
            },
        )
        self._samples(step, kl_coef, found, tokens, texts, scores, kl, gold)
        self.latest = metrics
        if step == 0:
            self.start = metrics
            self.best = metrics["eval/score"]
            warn_apart(metrics["eval/kl"], self.config)
            return ""
        if metrics["eval/score"] > self.best:
            self.best = metrics["eval/score"]
            if self.config.keep_best:
                self.loop.keep_model(self.models.policy, "best")
        warnings, verdict = self.config.guards.judge(metrics, self.start)
        for line in warnings:
            warn(f"step {step}: {line}")
        return verdict

    def _samples(
        self,
        step: int,
        kl_coef: float,
        found: Experience,
        tokens: list[list[int]],
        texts: list[str],
        scores: list[float],
        kl: list[float],
        gold: list[float] | None,
    ) -> None:
        plan = self.credit(
            found,
            self.models,
            self.config,
            kl_coef,
            torch.Generator().manual_seed(SEED),
        )
        starts, advantages = plan.segments.starts.tolist(), plan.advantages.tolist()
        for i, row in enumerate(tokens[: self.config.log_samples]):
            self.loop.run.append(
                "samples.jsonl",
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
        names = ("start", "start_scores", "latest", "best", "mean", "std")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The text each token adds, so that the pieces together are the text."""
    pieces, before = [], ""
    for n in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[:n])
        if text.endswith("\ufffd") and n < len(tokens):
            pieces.append("")  # half a character: the token that completes it shows it
            continue
        pieces.append(text[len(before) :])
        before = text
    return pieces


def _true_score(config: RLConfig) -> Callable[[str, str], float] | None:
    """The true score, which only the offline task knows."""
    if config.data.source != "toy":
        return None
    from marlhf.data.toy import gold_score

    return gold_score


def _wins(scores: list[float], others: list[float]) -> float:
    """Share of prompts on which the score is higher; ties count half."""
    return _mean([float(a > b) + 0.5 * (a == b) for a, b in zip(scores, others)])


def _mean(numbers: Any) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers) if numbers else float("nan")
