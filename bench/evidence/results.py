"""Runs of the archives by method and reward model, and differences between methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marlhf.intervals import Floats, Interval, mean_over_groups
from marlhf.runs.read import Evaluation, Run, find_runs

BETA = 0.05
OTHER_BETAS = {"-b02": 0.02, "-b10": 0.1}
"""How the names of methods end that were trained with another beta."""
LABELS = {
    "ppo": "PPO, lambda .95",
    "lam1": "PPO, lambda 1",
    "lam99": "PPO, lambda .99",
    "lam90": "PPO, lambda .9",
    "lam80": "PPO, lambda .8",
    "n5-start": "n = 5, `sigma: start`",
    "n5-equal": "n = 5, `sigma: equal`",
    "sentences": "sentences, `sigma: start`",
    "perplexity": "perplexity, `sigma: start`",
    "official": "n = 5, `preset: official`",
    "rloo": "RLOO, 4 samples per prompt",
    "ppo-lr8": "PPO, lr 8e-5",
    "n5-start-lr8": "n = 5, `start`, lr 8e-5",
    "ppo-b02": "PPO, beta .02",
    "ppo-b10": "PPO, beta .1",
    "n5-start-b02": "n = 5, `start`, beta .02",
    "n5-start-b10": "n = 5, `start`, beta .1",
    "lam1-b02": "PPO, lambda 1, beta .02",
    "lam1-b10": "PPO, lambda 1, beta .1",
    "rloo-b02": "RLOO, beta .02",
    "rloo-b10": "RLOO, beta .1",
    "ppo-lr2": "PPO, lr 2e-5",
    "n5-start-lr2": "n = 5, `start`, lr 2e-5",
    "auto": "`credit: auto`",
    "n5-boundary": "n = 5, `credit: boundary`",
    "ppo-lr16": "PPO, lr 1.6e-4",
    "n5-start-lr16": "n = 5, `start`, lr 1.6e-4",
    "n12": "n = 12",
    "random": "n-grams of random lengths",
    "words": "words",
    "surprise": "surprise",
    "constituents": "constituents, `sigma: start`",
}
"""Methods on TL;DR and the offline task, in the order of the tables and of their colours."""
SUMS_LABELS = {
    "ppo": "PPO, lambda .95",
    "lam99": "PPO, lambda .99",
    "lam1": "PPO, lambda 1",
    "unbiased-critic": "PPO, lambda .95, `lam_value: 1`",
    "n5": "n = 5",
    "lines": "lines",
    "lines-lam99": "lines, lambda .99",
    "lines-unbiased": "lines, `lam_value: 1`",
    "boundary": "lines, `credit: boundary`",
    "auto": "`credit: auto`",
    "monte-carlo": "lines, `values: monte_carlo`, lambda 0",
    "rloo": "RLOO, 4 samples per prompt",
    "tree": "RLOO, `tree: [4, 4]` by lines",
}
"""Methods on chained sums."""
_UPDATES = {
    "ppo": "token",
    "n5": "n = 5, `ratio: token`",
    "n5-macro": "n = 5, `macro`",
    "n5-mean": "n = 5, `macro_mean`",
    "lines": "lines, `ratio: token`",
    "lines-macro": "lines, `macro`",
    "lines-mean": "lines, `macro_mean`",
}
UPDATES_LABELS = _UPDATES | {f"{name}-fast": f"{x}, lr 1e-3" for name, x in _UPDATES.items()}
"""Methods on chained sums with eight updates on each batch."""
COARSE_LABELS = {
    "lam1": "PPO, lambda 1",
    "rloo": "RLOO, 4 samples per prompt",
    "lam1-320": "PPO, lambda 1, 320 responses",
    "rloo-320": "RLOO, 320 responses",
    "n28": "n = 28, `values: monte_carlo`",
    "n56": "n = 56, `values: monte_carlo`",
    "whole": "whole responses, `values: monte_carlo`",
}
"""Methods on chained sums around values from continuations of few macro actions."""
QWEN_TASKS = {"gsm8k": "GSM8K", "mbpp": "MBPP"}
QWEN_LABELS = {
    "ppo": "PPO, lambda .95",
    "lam1": "PPO, lambda 1",
    "lines": "lines, lambda .95",
    "rloo": "RLOO, 4 samples per prompt",
    "monte-carlo": "`values: monte_carlo`, lambda 0",
}
"""Methods of the larger model, on each of its tasks."""

Measure = Callable[[Evaluation], Floats]


def score(evaluation: Evaluation) -> Floats:
    return np.array(evaluation.scores)


def solved(evaluation: Evaluation) -> Floats:
    """1 where the reward is all there is to earn: the right answer, or every test passed."""
    return (score(evaluation) > 0.999).astype(float)


def gold(evaluation: Evaluation) -> Floats:
    return np.array(evaluation.gold or [])


def kl(evaluation: Evaluation) -> Floats:
    return np.array(evaluation.kl or [])


def length(evaluation: Evaluation) -> Floats:
    return np.array(evaluation.length or [])


def objective(evaluation: Evaluation) -> Floats:
    """What all methods are trained for, prompt by prompt."""
    return score(evaluation) - BETA * kl(evaluation)


@dataclass(frozen=True)
class Results:
    """Runs of reinforcement learning by method and reward model, each a list of seeds."""

    runs: dict[tuple[str, str], list[Run]]
    reward_models: dict[str, Run]
    """All of them by name, the judge `gold` included."""
    folder: Path = Path()

    @property
    def teachers(self) -> list[str]:
        return sorted({teacher for _, teacher in self.runs})

    def methods(self, teacher: str) -> list[str]:
        return [name for name in LABELS if (name, teacher) in self.runs]

    def at(self, method: str, teacher: str, step: int) -> dict[int | None, Evaluation]:
        """The evaluation after a step of each seed that has come so far."""
        return {
            run.seed: evaluation
            for run in self.runs.get((method, teacher), [])
            for evaluation in run.evaluations
            if evaluation.step == step
        }

    def last_step(self, method: str, teacher: str) -> int:
        """The last evaluation that all its seeds have."""
        runs = self.runs[method, teacher]
        return min(run.evaluations[-1].step for run in runs)

    def mean(self, measure: Measure, method: str, teacher: str, step: int) -> float:
        found = self.at(method, teacher, step).values()
        return float(np.mean([measure(each).mean() for each in found]))

    def differences(
        self, measure: Measure, method: str, base: str, teacher: str, step: int
    ) -> list[Floats]:
        """How far a method is above another, prompt by prompt, for each seed that both have."""
        ours, theirs = (self.at(name, teacher, step) for name in (method, base))
        shared = [seed for seed in ours if seed in theirs]
        return [measure(ours[seed]) - measure(theirs[seed]) for seed in shared]

    def difference(
        self, measure: Measure, method: str, base: str, teachers: Sequence[str], step: int
    ) -> tuple[Interval, int]:
        """The mean difference over reward models, seeds and prompts; over how many reward models.

        One reward model has the interval over its seeds and prompts alone.
        """
        groups = [self.differences(measure, method, base, each, step) for each in teachers]
        groups = [group for group in groups if group]
        return mean_over_groups([[x.tolist() for x in group] for group in groups]), len(groups)

    def gain(self, measure: Measure, method: str, teacher: str, step: int) -> Interval:
        """How far it is above the model that it started from, prompt by prompt."""
        start, end = (self.at(method, teacher, each) for each in (0, step))
        rises = [measure(end[seed]) - measure(start[seed]) for seed in end if seed in start]
        return mean_over_groups([[x.tolist() for x in rises]])


def read_results(folder: Path) -> Results:
    """The runs of an unpacked archive; where the reward is a function, the reward model is ""."""
    found = {run.name: run for run in find_runs([folder])}
    runs: dict[tuple[str, str], list[Run]] = {}
    for name, run in sorted(found.items()):
        if run.is_policy and run.evaluations and run.evaluations[-1].step > 0:
            teacher = Path(str(run.config.get("reward_model") or "")).parent.name
            runs.setdefault((method_of(name), teacher), []).append(run)
    rewards = {name: run for name, run in sorted(found.items()) if run.stage == "reward"}
    return Results(runs, rewards, folder)


def method_of(name: str) -> str:
    """`n5-start-r1-s1` is the method `n5-start` with the reward model `-r1` and seed 1.

    The recipe of the offline task calls it `macro-ppo`.
    """
    return re.sub(r"(-r\d+)?(-s\d+)?$", "", name).replace("macro-ppo", "n5-start")
