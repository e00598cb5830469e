"""Runs of the archives by method and reward model, and differences between methods."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from marlhf.intervals import Floats, Interval, interval, mean, t_quantile
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
    "n5-start": "n = 5",
    "n5-equal": "n = 5, `sigma: equal`",
    "sentences": "sentences",
    "perplexity": "perplexity",
    "official": "n = 5, `preset: official`",
    "rloo": "RLOO",
    "ppo-lr8": "PPO, lr 8e-5",
    "n5-start-lr8": "n = 5, lr 8e-5",
    "ppo-b02": "PPO, beta .02",
    "ppo-b10": "PPO, beta .1",
    "n5-start-b02": "n = 5, beta .02",
    "n5-start-b10": "n = 5, beta .1",
    "lam1-b02": "PPO, lambda 1, beta .02",
    "lam1-b10": "PPO, lambda 1, beta .1",
    "rloo-b02": "RLOO, beta .02",
    "rloo-b10": "RLOO, beta .1",
    "ppo-lr2": "PPO, lr 2e-5",
    "n5-start-lr2": "n = 5, lr 2e-5",
    "auto": "`credit: auto`",
    "n5-boundary": "n = 5, `credit: boundary`",
    "ppo-lr16": "PPO, lr 1.6e-4",
    "n5-start-lr16": "n = 5, lr 1.6e-4",
    "n12": "n = 12",
    "random": "random lengths",
    "words": "words",
    "surprise": "surprise",
    "constituents": "constituents",
}
"""Methods on TL;DR and the offline task, in the order of their colours.

With `sigma: start` unless they say otherwise."""
SUMS_LABELS = {
    "ppo": "PPO, lambda .95",
    "lam99": "PPO, lambda .99",
    "lam1": "PPO, lambda 1",
    "rloo": "RLOO",
    "n5": "n = 5",
    "lines": "lines",
    "lines-lam99": "lines, lambda .99",
    "boundary": "lines, `credit: boundary`",
    "auto": "`credit: auto`",
    "unbiased-critic": "PPO, lambda .95, `lam_value: 1`",
    "lines-unbiased": "lines, `lam_value: 1`",
    "tree": "RLOO, `tree: [4, 4]` by lines",
    "monte-carlo": "lines, `values: monte_carlo`",
}
"""Methods on chained sums."""
UPDATES_LABELS = {
    "ppo": "token",
    "n5": "n = 5, `ratio: token`",
    "n5-macro": "n = 5, `macro`",
    "n5-mean": "n = 5, `macro_mean`",
    "lines": "lines, `ratio: token`",
    "lines-macro": "lines, `macro`",
    "lines-mean": "lines, `macro_mean`",
}
"""Methods on chained sums with eight updates on each batch."""
FAST_LABELS = {f"{name}-fast": f"{text}, lr 1e-3" for name, text in UPDATES_LABELS.items()}
"""The same at about three times the learning rate."""
COARSE_LABELS = {
    "lam1": "PPO, lambda 1",
    "rloo": "RLOO",
    "lam1-320": "PPO, lambda 1, 320 responses",
    "rloo-320": "RLOO, 320 responses",
    "n28": "n = 28, `values: monte_carlo`",
    "n56": "n = 56, `values: monte_carlo`",
    "whole": "whole responses, `values: monte_carlo`",
}
"""Methods on chained sums around values from continuations of few macro actions."""
PROCESS_LABELS = {
    "outcome": "the outcome alone",
    "outcome-scaled": "the outcome alone, times 3",
    "process-sum": "`process_pooling: sum`",
    "process-min": "`process_pooling: min`",
}
"""Rewards on chained sums, with a process model and without."""
REACH_LABELS = {
    "tokens-80": "tokens, lambda .8",
    "tokens-95": "tokens, lambda .95",
    "tokens-100": "tokens, lambda 1",
    "lines-80": "lines, lambda .8",
    "lines-95": "lines, lambda .95",
    "lines-100": "lines, lambda 1",
}
"""PPO on chained sums; with `-pre` its critic was trained before the first step."""
GAIN_STARTS = {
    "all": "all lines right",
    "share": "share of right lines",
    "tenth": "all lines right, a worse start",
}
"""Rewards on chained sums, and the SFT models that PPO and RLOO begin with."""
GAIN_METHODS = {
    "tokens-95": "tokens, lambda .95",
    "tokens-100": "tokens, lambda 1",
    "lines-80": "lines, lambda .8",
    "lines-95": "lines, lambda .95",
    "lines-100": "lines, lambda 1",
    "lines-80-pre": "lines, lambda .8, pretrained critic",
    "lines-100-pre": "lines, lambda 1, pretrained critic",
    "rloo": "RLOO",
}
"""What was trained from each of them; with a pretrained critic where headroom is large."""
QWEN_TASKS = {"gsm8k": "GSM8K", "mbpp": "MBPP"}
QWEN_LABELS = {
    "ppo": "PPO, lambda .95",
    "lam1": "PPO, lambda 1",
    "rloo": "RLOO",
    "lines": "lines, lambda .95",
    "monte-carlo": "`values: monte_carlo`, lambda 0",
}
"""Methods of the larger model, on each of its tasks."""
SHOWN: dict[str, dict[str, str]] = {
    "identify": {
        "reward": "ppo lam1 lam99 n5-start n5-equal sentences perplexity official rloo",
        "reward-r1": "ppo n5-start n5-equal",
    },
    "betas": {"reward": "ppo ppo-b02 ppo-b10 n5-start n5-start-b02"},
    "auto": {"reward": "ppo auto rloo rloo-b02"},
    "seeds": {"reward": "ppo n5-start ppo-lr8 n5-start-lr8"},
    "three": dict.fromkeys(("reward", "reward-r1", "reward-r2"), "ppo n5-start"),
    "rules": {
        "reward": "ppo lam1 n5-start n5-equal random words constituents",
        "reward-r1": "ppo lam1 lam99 n5-start n12",
        "reward-r2": "ppo n5-start",
    },
    "offline": {"reward": "ppo auto"},
}
"""By archive and reward model: the methods in the tables of runs. All share the spread."""

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


def less_kl(beta: float) -> Measure:
    """The reward less the KL penalty, prompt by prompt: what runs with this beta train for."""
    return lambda evaluation: score(evaluation) - beta * kl(evaluation)


objective = less_kl(BETA)


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

    def by_seed(
        self, measure: Measure, method: str, teacher: str, step: int | None
    ) -> dict[int | None, Floats]:
        """The numbers of each prompt after a step, for each seed that has come so far.

        Without a step: the mean over all evaluations, before training included.
        """
        found: dict[int | None, Floats] = {}
        for run in self.runs.get((method, teacher), []):
            here = [e for e in run.evaluations if step in (None, e.step)]
            if here:
                found[run.seed] = np.mean([measure(each) for each in here], axis=0)
        return found

    def without_seeds(self, seeds: Collection[int]) -> Results:
        kept = {
            key: [run for run in runs if run.seed not in seeds] for key, runs in self.runs.items()
        }
        return replace(self, runs=kept)

    def last_step(self, method: str, teacher: str) -> int:
        """The last evaluation that all its seeds have."""
        runs = self.runs[method, teacher]
        return min(run.evaluations[-1].step for run in runs)

    def mean(self, measure: Measure, method: str, teacher: str, step: int | None) -> float:
        found = self.by_seed(measure, method, teacher, step).values()
        return float(np.mean([each.mean() for each in found]))

    def seconds_per_step(self, method: str, teacher: str) -> float:
        """Training and evaluation, of the runs that finished; NaN where none did."""
        runs = [run for run in self.runs[method, teacher] if run.status == "finished"]
        return mean([(run.seconds or 0.0) / run.evaluations[-1].step for run in runs])

    def spread(
        self, measure: Measure, teacher: str, step: int | None, methods: Collection[str]
    ) -> tuple[float, int]:
        """The variance of runs around the mean of their method, pooled, and its degrees of freedom.

        A variance of two or three runs alone says nearly nothing, so all methods share one.
        """
        squares, df = 0.0, 0
        for method, each in self.runs:
            if each == teacher and method in methods:
                found = self.by_seed(measure, method, teacher, step)
                means = np.array([x.mean() for x in found.values()])
                if len(means) > 1:
                    squares += float(((means - means.mean()) ** 2).sum())
                    df += len(means) - 1
        return (squares / df if df else 0.0), df

    def differences(
        self, measure: Measure, method: str, base: str, teacher: str, step: int | None
    ) -> list[Floats]:
        """How far a method is above another, prompt by prompt, for each seed that both have."""
        ours, theirs = (self.by_seed(measure, name, teacher, step) for name in (method, base))
        return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]

    def difference(
        self,
        measure: Measure,
        method: str,
        base: str,
        teacher: str,
        step: int | None,
        methods: Collection[str] = (),
    ) -> Interval | None:
        """The mean difference with one reward model, over seeds and prompts; None without a pair.

        `methods` share their variance over seeds: the two compared, unless others are named.
        """
        rows = self.differences(measure, method, base, teacher, step)
        if not rows:
            return None
        variance, df = self.spread(measure, teacher, step, methods or (method, base))
        return over_runs(rows, 2 * variance, df)

    def gain(
        self, measure: Measure, method: str, teacher: str, step: int, methods: Collection[str] = ()
    ) -> Interval:
        """How far it is above the model that it started from, prompt by prompt."""
        start, end = (self.by_seed(measure, method, teacher, each) for each in (0, step))
        rises = [end[seed] - start[seed] for seed in end if seed in start]
        variance, df = self.spread(measure, teacher, step, methods or (method,))
        return over_runs(rises, variance, df)


def over_runs(rows: Sequence[Floats], variance: float, df: int) -> Interval:
    """The mean over runs and prompts, with a 95% interval over both.

    `variance` is that of one row's mean from run to run, known with `df` degrees of freedom. With
    none the interval is over prompts alone.
    """
    by_prompt = interval(np.mean(rows, axis=0))
    if not df:
        return by_prompt
    runs = t_quantile(df) * math.sqrt(variance / len(rows))
    half = math.hypot(runs, by_prompt.high - by_prompt.mean)
    return Interval(by_prompt.mean, by_prompt.mean - half, by_prompt.mean + half, by_prompt.size)


def over_reward_models(groups: Sequence[Sequence[Floats]]) -> Interval:
    """The mean over reward models, each a list of rows, with Student's interval over them.

    One or two reward models have no interval: they say nothing about another one.
    """
    rows = [np.mean(group, axis=0) for group in groups]
    means = np.array([row.mean() for row in rows])
    if len(rows) < 3:
        return Interval(float(means.mean()), math.nan, math.nan, len(rows[0]))
    return over_runs(rows, float(means.var(ddof=1)), len(means) - 1)


def read_results(folder: Path) -> Results:
    """The runs of an unpacked archive; where the reward is a function, the reward model is ""."""
    found = sorted(((run.name, run) for run in find_runs([folder])), key=lambda pair: pair[0])
    runs: dict[tuple[str, str], list[Run]] = {}
    for name, run in found:
        if run.is_policy and run.evaluations and run.evaluations[-1].step > 0:
            teacher = Path(str(run.config.get("reward_model") or "")).parent.name
            runs.setdefault((method_of(name), teacher), []).append(run)
    rewards = {name: run for name, run in found if run.stage == "reward"}
    return Results(runs, rewards, folder)


def method_of(name: str) -> str:
    """`n5-start-r1-s1` is the method `n5-start` with the reward model `-r1` and seed 1.

    The recipe of the offline task calls it `macro-ppo`.
    """
    return re.sub(r"(-r\d+)?(-s\d+)?$", "", name).replace("macro-ppo", "n5-start")
