"""Numbers from the unpacked archive: runs, answers to test prompts, and what follows from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from evidence.jobs import TEST_SEED, normaliser, read_jsonl
from evidence.settings import Settings, read
from evidence.timing import read_timing
from marlhf.intervals import (
    NO_INTERVAL,
    Curve,
    CurveBootstrap,
    Floats,
    Interval,
    first_reaching,
    interval,
    mean,
    mean_by_position,
    quantiles,
    score_at_kl,
    wilson,
)
from marlhf.report.comparison import seed_curve
from marlhf.report.groups import Group
from marlhf.runs.read import Run, read_run

Line = dict[str, Any]
SHARE = 0.9
"""Of PPO's final gain over SFT, what counts as having reached it."""
LABELS = {
    "sft": "SFT",
    "ppo": "PPO (n = 1)",
    "ppo-weak": "PPO, a fifth of beta",
    "n5-sum": "n = 5, sum",
    "n5-mean": "n = 5, mean",
    "n5-split": "n = 5, mean, last token apart",
    "n5-start": "n = 5, sum, sigma start",
    "n10-sum": "n = 10, sum",
    "ninf-sum": "n = inf, sum",
    "ninf-mean": "n = inf, mean",
    "perplexity": "perplexity rule",
    "parsing": "parsing rule",
    "ppo-horizon": "PPO, lambda 0.99",
    "n5-short": "n = 5, sum, lambda 0.77",
    "rloo": "RLOO",
    "dpo": "DPO",
    "best-of-8": "best of 8",
}


@dataclass(frozen=True)
class Method:
    """The seeds of one method: its runs, and its answers to the test prompts."""

    name: str
    runs: list[Run]
    answers: list[list[Line]]

    @property
    def label(self) -> str:
        return LABELS[self.name]

    @property
    def finished(self) -> bool:
        return bool(self.answers)

    @cached_property
    def curves(self) -> dict[int, Floats]:
        """Scores of held-out prompts by step: [seeds, prompts], of steps that all seeds have."""
        each = [{e.step: e.scores for e in run.evaluations} for run in self.runs]
        shared = sorted(set.intersection(*map(set, each))) if each else []
        return {step: np.array([one[step] for one in each]) for step in shared}

    @cached_property
    def kls(self) -> dict[int, Floats]:
        each = [{e.step: e.kl for e in run.evaluations if e.kl} for run in self.runs]
        shared = sorted(set.intersection(*map(set, each))) if each else []
        return {step: np.array([one[step] for one in each]) for step in shared}


class Results:
    """Everything in one unpacked archive, or in the --out it was made from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: Settings = read(folder)
        self.timing = read_timing(self.settings)
        self.tasks = [t for t in self.settings.tasks if (folder / t).is_dir()]

    def method(self, name: str, task: str = "tldr") -> Method:
        """A method's finished seeds."""
        seeds = [p for p in (self.folder / task).glob(f"{name}-s*") if _is(p, name)]
        runs = [read_run(p) for p in sorted(seeds) if (p / "run.json").is_file()]
        runs = [run for run in runs if run.status == "finished"]
        return Method(name, runs, [a for run in runs if (a := self.answers(run.path))])

    def methods(self, task: str = "tldr") -> list[Method]:
        names = [name for name in LABELS if name not in ("sft", "best-of-8")]
        found = [self.method(name, task) for name in names]
        return [each for each in found if each.runs]

    def answers(self, folder: Path) -> list[Line]:
        """The answers to test prompts, in the order of their keys."""
        files = sorted((folder / "evaluation").glob(f"t1-m*-s{TEST_SEED}-test*.jsonl"))
        return sorted(read_jsonl(files[0]), key=_key) if files else []

    @cached_property
    def sft(self) -> list[Line]:
        return self.answers(self.folder / "tldr" / "sft")

    @cached_property
    def best(self) -> list[Line]:
        return sorted(read_jsonl(self.folder / "tldr/best-of-8/evaluation/best.jsonl"), key=_key)

    @cached_property
    def scale(self) -> dict[str, tuple[float, float]]:
        """Mean and deviation of the SFT model's scores, by reward model.

        The reward model's are those of validation prompts, as in training; the second one was
        never asked about those, so its own are of the test prompts.
        """
        gold = [line["scores"]["gold"] for line in self.sft]
        scale = {"gold": (float(np.mean(gold)), float(np.std(gold, ddof=1)))}
        return scale | {"reward": normaliser(self.settings)}

    def scores(self, lines: Sequence[Line], judge: str) -> list[float]:
        mean, deviation = self.scale[judge]
        return [(line["scores"][judge] - mean) / deviation for line in lines]

    def score(self, answers: Sequence[Sequence[Line]], judge: str) -> Interval:
        """The mean over seeds of each prompt's score, with its interval over prompts."""
        return interval(self.by_prompt(answers, judge))

    def by_prompt(self, answers: Sequence[Sequence[Line]], judge: str) -> list[float]:
        return mean_by_position([self.scores(lines, judge) for lines in answers]) or []

    def objective(self, answers: Sequence[Sequence[Line]]) -> list[float]:
        """By prompt, what all methods are trained for: the score less beta times the KL."""
        kl = mean_by_position([[line["kl"] for line in lines] for lines in answers]) or []
        scores = self.by_prompt(answers, "reward")
        return [score - self.settings.beta * each for score, each in zip(scores, kl)]

    def step_seconds(self, name: str) -> float:
        """Seconds of a step alone; n-grams that were not timed cost what PPO's step costs."""
        times = self.timing.get(name) or self.timing.get("ppo") or {}
        return times.get("time/step", math.nan)


def _is(path: Path, name: str) -> bool:
    return re.fullmatch(rf"{re.escape(name)}-s\d+", path.name) is not None


def _key(line: Line) -> str:
    return line["key"]


def measure(answers: Sequence[Sequence[Line]], key: str) -> float:
    return mean([line[key] for lines in answers for line in lines if line.get(key) is not None])


def win_rate(ours: Sequence[Sequence[Line]], theirs: Sequence[Line], judge: str) -> Interval:
    """How often an answer scores above another to the same prompt, a tie counting half.

    Seeds share their prompts, so they are averaged and the interval is that of one set of prompts.
    """
    other = {line["key"]: line["scores"][judge] for line in theirs}
    wins: list[float] = []
    for lines in ours:
        pairs = [(x["scores"][judge], other[x["key"]]) for x in lines if x["key"] in other]
        wins.append(sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs))
    return wilson(round(float(np.mean(wins))), len(theirs)) if wins else wilson(0, 0)


def groups(methods: Sequence[Method]) -> list[Group]:
    """Methods as the report's figures take them."""
    return [Group(method.label, method.runs, i) for i, method in enumerate(methods)]


def draw(methods: Sequence[Method], statistic: Callable[[list[Curve]], Floats]) -> Interval:
    """The median of a statistic of methods' curves, with its interval over prompts and seeds."""
    bootstrap = CurveBootstrap([[seed_curve(run) for run in m.runs] for m in methods])
    found = statistic(bootstrap.resampled)
    if np.isnan(found).mean() > 0.1:  # mostly undefined, such as a KL that is seldom passed
        return NO_INTERVAL
    low, middle, high = quantiles(found, (0.025, 0.5, 0.975))
    return Interval(middle, low, high, bootstrap.num_runs)


def target_of(curve: Curve, share: float) -> Floats:
    """A share of the gain from the start to the mean of the last three evaluations.

    Less than all of it, where curves are flat and noise would decide who is there first.
    """
    start = curve.scores[:, 0]
    return start + share * (curve.scores[:, -3:].mean(axis=1) - start)


def first_step(curve: Curve, target: Floats | float) -> Floats:
    """The first evaluation after the start at or above a score; infinity where there is none."""
    after = Curve(*(x[:, 1:] for x in (curve.steps, curve.seconds, curve.scores, curve.kls)))
    return first_reaching(after, target)[0]


def steps_to(base: Method, method: Method, share: float = SHARE) -> Interval:
    """Steps to a share of the base's final gain."""

    def statistic(curves: list[Curve]) -> Floats:
        return first_step(curves[1], target_of(curves[0], share))

    return draw([base, method], statistic)


def speed(base: Method, method: Method) -> Interval:
    """How many times fewer steps the method takes to most of the base's gain than the base."""

    def statistic(curves: list[Curve]) -> Floats:
        target = target_of(curves[0], SHARE)
        with np.errstate(invalid="ignore"):  # inf / inf is NaN: neither got there
            return first_step(curves[0], target) / first_step(curves[1], target)

    return draw([base, method], statistic)


def ahead_at(base: Method, method: Method, level: float) -> Interval:
    """How far the method's score is above the base's where both first pass a KL."""

    def statistic(curves: list[Curve]) -> Floats:
        theirs, own = (score_at_kl(curve.scores, curve.kls, level) for curve in curves)
        return own - theirs

    return draw([base, method], statistic)


def common_kl(*methods: Method) -> float:
    """A KL that all the methods pass: nine tenths of the lowest of their highest."""
    return 0.9 * min(max(float(kl.mean()) for kl in m.kls.values()) for m in methods)
