"""Runs that differ only in their seed, taken together, and what the report asks of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from marlhf.evaluate.runs import Evaluation, Run, number
from marlhf.evaluate.stats import interval, mean_by_position

IGNORED_KEYS = {"seed", "output_dir"}
START_COLOUR = "var(--start)"
NUM_COLOURS = 8


class Point(NamedTuple):
    """One step of a curve over seeds; `low` and `high` are the extreme seeds."""

    step: int
    seconds: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Group:
    """The seeds of one setting. Everything the report shows is about groups, never lone runs."""

    label: str
    runs: list[Run]
    index: int

    @property
    def colour(self) -> str:
        return f"var(--c{self.index % NUM_COLOURS})"

    @property
    def dash(self) -> str:
        """Lines beyond the palette repeat its colours, dashed."""
        return "" if self.index < NUM_COLOURS else "5 3"

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def stage(self) -> str:
        return self.runs[0].stage

    @property
    def num_seeds(self) -> int:
        """The same seed run twice is no second seed."""
        return len({i if run.seed is None else f"{run.seed}" for i, run in enumerate(self.runs)})

    def curve(self, key: str) -> list[Point]:
        """Mean and extremes over the seeds that recorded a step; seconds are averaged too."""
        steps: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            for step, seconds, value in run.curve(key):
                steps.setdefault(step, []).append((seconds, value))
        points: list[Point] = []
        for step in sorted(steps):
            values = [value for _, value in steps[step]]
            seconds = interval([seconds for seconds, _ in steps[step]]).mean
            points.append(Point(step, seconds, interval(values).mean, min(values), max(values)))
        return points

    def finals(self, key: str) -> list[float]:
        """The last value of each seed that has one."""
        return [value for run in self.runs if math.isfinite(value := run.final(key))]

    def final(self, key: str) -> float:
        return interval(self.finals(key)).mean

    def mean(self, key: str) -> float:
        """The mean over all recorded steps of all seeds."""
        return interval([value for run in self.runs for *_, value in run.curve(key)]).mean

    def per_prompt(self, field: str, *, first: bool = False) -> list[float] | None:
        """`field` of the last evaluation (of step 0, where `first`), averaged over seeds."""
        rows: list[list[float]] = []
        for run in self.runs:
            evaluation = start_of(run) if first else (run.evaluations or [None])[-1]
            values = getattr(evaluation, field) if evaluation else None
            if values:
                rows.append(values)
        return mean_by_position(rows)


def start_of(run: Run) -> Evaluation | None:
    """The evaluation of the model the run began with.

    Step 0 where it was evaluated, else the SFT scores that a later evaluation carries.
    """
    for evaluation in run.evaluations:
        if evaluation.step == 0:
            return evaluation
    for evaluation in run.evaluations:
        if evaluation.sft_scores:
            return Evaluation(step=0, scores=evaluation.sft_scores)
    return None


def same_prompts(a: Group, b: Group) -> bool:
    """Whether two groups answered the same held-out prompts, so that pairing means something."""
    counts = {len(run.evaluations[-1].scores) for run in a.runs + b.runs if run.evaluations}
    if len(counts) != 1:
        return False
    prompts: dict[object, object] = {}
    for run in a.runs + b.runs:
        for sample in run.samples:
            if prompts.setdefault(str(sample.get("index")), sample.get("prompt")) != sample.get(
                "prompt"
            ):
                return False
    return True


def group_runs(runs: list[Run]) -> list[Group]:
    """Seeds together, policies before the models behind them, the token-level baseline first.

    Runs without a config stand alone: nothing says what they share.
    """
    together: dict[str, list[Run]] = {}
    for position, run in enumerate(runs):
        key = _setting(run) if run.config else f"alone {position}"
        together.setdefault(key, []).append(run)
    groups = [sorted(seeds, key=lambda run: run.seed or 0) for seeds in together.values()]
    groups.sort(key=lambda seeds: (not seeds[0].is_policy, not is_token_level(seeds[0].config)))
    labels = _labels(groups)
    return [Group(label, seeds, i) for i, (label, seeds) in enumerate(zip(labels, groups))]


def is_token_level(config: dict[str, Any]) -> bool:
    """Whether a config is ordinary PPO: an n-gram of one token."""
    segmenter = config.get("segmenter")
    return (
        isinstance(segmenter, dict)
        and segmenter.get("type") == "ngram"
        and number(segmenter.get("n")) == 1
    )


def describe_segmenter(config: dict[str, Any]) -> str:
    """A segmenter in a few words, for tables."""
    segmenter = config.get("segmenter")
    if not isinstance(segmenter, dict):
        return str(segmenter) if segmenter else ""
    kind = str(segmenter.get("type", "?"))
    if kind == "ngram":
        if is_token_level(config):
            return "single tokens (n = 1)"
        n = segmenter.get("n", 5)
        return "whole response (n = inf)" if n == math.inf else f"n-gram, n = {n}"
    rest = ", ".join(f"{k} = {v}" for k, v in segmenter.items() if k != "type" and v is not None)
    return f"{kind}, {rest}" if rest else kind


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def settings(run: Run) -> dict[str, str]:
    """What was chosen for a run, as text: without its seed and without where it was written.

    Paths beside the run's own folder are given relative to it, so that the same recipe
    run twice into two folders is recognised as the same.
    """
    output = run.config.get("output_dir")
    beside = output.rstrip("/").rpartition("/")[0] + "/" if isinstance(output, str) else "/"
    chosen: dict[str, str] = {}
    for key, value in flatten(run.config).items():
        if key in IGNORED_KEYS:
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if beside != "/" and text.startswith(beside):
            text = "../" + text[len(beside) :]
        chosen[key] = text
    return chosen


def differences(groups: list[Group]) -> list[tuple[str, list[str | None]]]:
    """The settings that are not the same in all groups: (name, one value a group)."""
    chosen = [settings(group.runs[0]) for group in groups if group.config]
    if len(chosen) < len(groups) or len(groups) < 2:
        return []
    keys = list(dict.fromkeys(key for each in chosen for key in each))
    rows = [(key, [each.get(key) for each in chosen]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _setting(run: Run) -> str:
    return json.dumps([run.stage, sorted(settings(run).items())])


def _labels(groups: list[list[Run]]) -> list[str]:
    """One name a group: the runs' own, without the seed's number, told apart by their folder."""
    labels = [_shared_name(seeds) for seeds in groups]
    for style in ("folder", "number"):
        repeated = {label for label in labels if labels.count(label) > 1}
        for i, label in enumerate(labels):
            if label in repeated and style == "folder":
                labels[i] = f"{groups[i][0].path.resolve().parent.name}/{label}"
            elif label in repeated:
                labels[i] = f"{label} ({labels[: i + 1].count(label)})"
    return labels


def _shared_name(seeds: list[Run]) -> str:
    names = {run.name for run in seeds}
    if len(names) > 1:
        names = {re.sub(r"[-_. ]*(seed|s)?[-_. =]*\d+$", "", name) for name in names} - {""}
    return names.pop() if len(names) == 1 else seeds[0].name
