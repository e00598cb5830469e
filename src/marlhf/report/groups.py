"""Groups of runs that differ only in their seed, and the numbers the report reads from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from marlhf.config.rl import RLConfig
from marlhf.fields import settings_with
from marlhf.intervals import mean, mean_by_position
from marlhf.report.page import NUM_COLOURS
from marlhf.runs.read import Evaluation, Run, chosen, number

START_COLOUR = "var(--start)"


class CurvePoint(NamedTuple):
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
    chosen: dict[str, Any] = field(default_factory=dict)
    """The settings of its runs, and of the runs behind them."""

    @property
    def colour(self) -> str:
        return f"var(--c{self.index})"

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
        """The same seed run twice counts once."""
        return len({i if run.seed is None else f"{run.seed}" for i, run in enumerate(self.runs)})

    @property
    def last_step(self) -> int:
        return max((run.last_step or 0 for run in self.runs), default=0)

    @property
    def seconds(self) -> float:
        """How long a seed took, on average."""
        return mean([run.seconds for run in self.runs if run.seconds is not None])

    def curve(self, key: str) -> list[CurvePoint]:
        """Mean and extremes over the seeds that recorded a step; seconds are averaged too."""
        if len(self.runs) == 1:
            return [CurvePoint(step, at, v, v, v) for step, at, v in self.runs[0].curve(key)]
        steps: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            for step, seconds, value in run.curve(key):
                steps.setdefault(step, []).append((seconds, value))
        points: list[CurvePoint] = []
        for step, pairs in sorted(steps.items()):
            values = [value for _, value in pairs]
            seconds = [at for at, _ in pairs if math.isfinite(at)] or [math.nan]
            points.append(CurvePoint(step, fmean(seconds), fmean(values), min(values), max(values)))
        return points

    def finals(self, key: str) -> list[float]:
        """The last value of each seed that has one."""
        return [value for run in self.runs if math.isfinite(value := run.final(key))]

    def final(self, key: str) -> float:
        return mean(self.finals(key))

    def per_prompt(self, field: str, *, first: bool = False) -> list[float] | None:
        """`field` of the last evaluation (of step 0, where `first`), averaged over seeds."""
        return mean_by_position(self.per_seed(field, first=first))

    def per_seed(
        self, field: str, *, first: bool = False, step: int | None = None
    ) -> list[list[float]]:
        """The same seed by seed, or at a given step; seeds without it are left out."""
        evaluations = [start_of(run) if first else evaluation_of(run, step) for run in self.runs]
        rows = [getattr(evaluation, field) for evaluation in evaluations if evaluation]
        return [row for row in rows if row]

    def all_prompts(self, field: str, *, first: bool = False) -> list[float]:
        """The same for all seeds together: averaging them would narrow the distribution."""
        return [value for row in self.per_seed(field, first=first) for value in row]


def start_of(run: Run) -> Evaluation | None:
    """The evaluation of the model the run began with.

    Step 0 where it was evaluated, else the SFT scores that a later evaluation carries.
    """
    carried = (e.sft_scores for e in run.evaluations if e.sft_scores)
    return evaluation_of(run, 0) or next((Evaluation(0, scores) for scores in carried), None)


def evaluation_of(run: Run, step: int | None) -> Evaluation | None:
    """The evaluation at a step; the last one if no step is given."""
    if step is None:
        return run.evaluations[-1] if run.evaluations else None
    return next((each for each in run.evaluations if each.step == step), None)


def labelled(groups: Sequence[Group]) -> list[tuple[str, Group, Run]]:
    """Every run under the name of its group, its seed added where the group has several."""
    return [
        (group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}", group, run)
        for group in groups
        for run in group.runs
    ]


def groups_by_name(groups: Sequence[Group]) -> dict[str, Group]:
    """Groups by every name under which a judge may know one of their runs, where it is unique."""
    named: dict[str, dict[int, Group]] = {}
    for group in groups:
        for run in group.runs:
            folder = run.path.resolve()
            for name in (group.label, run.name, f"{folder.parent.name}/{folder.name}"):
                named.setdefault(name, {})[group.index] = group
    return {name: next(iter(each.values())) for name, each in named.items() if len(each) == 1}


def same_prompts(a: Group, b: Group) -> bool:
    """Whether two groups were evaluated on the same prompts, so that these can be paired."""
    counts = {len(run.evaluations[-1].scores) for run in a.runs + b.runs if run.evaluations}
    samples = [sample for run in a.runs + b.runs for sample in run.samples]
    prompts = {(str(sample.get("index")), str(sample.get("prompt"))) for sample in samples}
    return len(counts) == 1 and len({index for index, _ in prompts}) == len(prompts)


def group_runs(runs: list[Run]) -> list[Group]:
    """Seeds together, policies before the models behind them, the token-level baseline first.

    A run without a config is a group of its own: nothing says what it shares with others.
    """
    together: dict[str, list[Run]] = {}
    settings_of: dict[str, dict[str, Any]] = {}
    for position, run in enumerate(runs):
        picked = chosen(run)
        key = f"alone {position}"
        if run.config:
            key = json.dumps([run.stage, sorted(_in_text(picked).items())])
        together.setdefault(key, []).append(run)
        settings_of[key] = picked
    policies = [settings_of[key] for key, each in together.items() if each[0].is_policy]

    def place(key: str) -> tuple[Any, ...]:
        runs, picked = together[key], settings_of[key]
        is_baseline = is_token_level(runs[0].config)
        apart = [len(differing([picked, other])) for other in policies if is_baseline]
        return *_place(runs, picked), sum(apart)

    ordered = sorted(together, key=place)
    seeds = [sorted(together[key], key=lambda run: run.seed or 0) for key in ordered]
    picks = [settings_of[key] for key in ordered]
    parts = zip(_labels(seeds, picks), seeds, picks)
    return [Group(label, runs, i, pick) for i, (label, runs, pick) in enumerate(parts)]


def _place(runs: list[Run], picked: dict[str, Any]) -> tuple[Any, ...]:
    """Policies first, single tokens first among them, and longer n-grams after shorter.

    Of several with single tokens, the one with most seeds is the baseline; of as many, the one
    that has most in common with the rest.
    """
    run, n = runs[0], picked.get("segmenter.n")
    size = float(n) if isinstance(n, (int, float)) and not isinstance(n, bool) else math.inf
    return not run.is_policy, not is_token_level(run.config), run.is_policy and size, -len(runs)


def is_token_level(config: dict[str, Any]) -> bool:
    """Whether a config is ordinary PPO: an n-gram of one token."""
    segmenter = config.get("segmenter")
    return (
        isinstance(segmenter, dict)
        and segmenter.get("type") == "ngram"
        and number(segmenter.get("n")) == 1
    )


def scored_by_functions(groups: Sequence[Group]) -> bool:
    """Whether functions or an environment gave the scores, and no reward model that was learnt."""
    configs = [run.config for group in groups for run in group.runs]
    return any(c.get("reward_funcs") or c.get("environment") for c in configs) and not any(
        c.get("reward_model") for c in configs
    )


def describe_segmenter(config: dict[str, Any]) -> str:
    """A segmenter in a few words, for tables; settings that are off or standard are left out."""
    segmenter = config.get("segmenter")
    if not isinstance(segmenter, dict):
        return str(segmenter) if segmenter else ""
    kind = str(segmenter.get("type", "?"))
    if kind == "ngram":
        if is_token_level(config):
            return "single tokens (n = 1)"
        n = segmenter.get("n", 5)
        return "whole response (n = inf)" if n == math.inf else f"n-gram, n = {n}"
    off = (None, False)
    shown = {k: v for k, v in segmenter.items() if k != "type" and not any(v is x for x in off)}
    rest = ", ".join(f"{k} = {v}" for k, v in shown.items() if (k, v) != ("parser", "english"))
    return f"{kind}, {rest}" if rest else kind


def describe_methods(groups: Sequence[Group]) -> list[str]:
    """How each group was trained, in a few words; with the method's name where that differs."""
    rules = [describe_segmenter(group.config) for group in groups]
    if len({group.stage for group in groups}) == 1:
        return rules
    return [": ".join(filter(None, each)) for each in zip((g.stage for g in groups), rules)]


def _in_text(picked: dict[str, Any]) -> dict[str, str]:
    return {key: setting_text(value) for key, value in picked.items()}


def setting_text(value: Any) -> str:
    """A setting as one would write it in a recipe, infinity as .inf."""
    if value == math.inf:
        return ".inf"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str | None]]]:
    """The settings that are not the same in all groups: (name, one value per group)."""
    if len(groups) < 2 or not all(group.config for group in groups):
        return []
    return differing([group.chosen for group in groups])


def differing(picks: Sequence[dict[str, Any]]) -> list[tuple[str, list[str | None]]]:
    texts = [_in_text(picked) for picked in picks]
    keys = list(dict.fromkeys(key for each in texts for key in each))
    rows = [(key, [each.get(key) for each in texts]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


SCORE_SETTINGS = (*settings_with(RLConfig, "defines_score"), "reward")
"""Settings that decide what a score means, those of the reward model's training included."""


def measured_alike(a: Group, b: Group) -> bool:
    """Whether scores of two groups are on one scale: the same reward, on the same data."""
    return not unlike([a, b])


def unlike(groups: Sequence[Group]) -> list[str]:
    """The settings in which groups differ so that their scores cannot be compared."""
    known = [group for group in groups if group.config]
    names = {*SCORE_SETTINGS, "data"}
    if any(group.chosen.get("reward.model") == "@sft" for group in known):
        names.add("sft")  # the reward model grew from it
    return [key for key, _ in differences(known) if key.split(".")[0] in names]


def _labels(groups: list[list[Run]], picks: list[dict[str, Any]]) -> list[str]:
    """One name per group: that of its runs without the number of the seed.

    Where names repeat, as in a sweep, groups are named by what they differ in, else by folder.
    """
    labels = [_shared_name(seeds) for seeds in groups]
    kinds = [(label, seeds[0].stage) for label, seeds in zip(labels, groups)]
    policies = {label for label, seeds in zip(labels, groups) if seeds[0].is_policy}
    for label in {each for each in labels if labels.count(each) > 1}:
        places = [i for i, each in enumerate(labels) if each == label]
        alone = policies == {label} and len({kinds[i] for i in places}) == 1
        words = [_picked_words(picks[i], [picks[j] for j in places]) for i in places]
        if "" not in words and len(set(words)) == len(words):
            for i, name in zip(places, words):
                labels[i] = name if alone else f"{label}, {name}"
    for style in ("folder", "number"):
        repeated = {label for label in labels if labels.count(label) > 1}
        for i, label in enumerate(labels):
            if label in repeated and style == "folder":
                labels[i] = f"{_home(groups[i])}/{label}"
            elif label in repeated:
                labels[i] = f"{label} ({labels[: i + 1].count(label)})"
    return labels


def _home(seeds: list[Run]) -> str:
    """The folder around a run, or around the seeds' folders where there are several."""
    folder = seeds[0].path.resolve().parent
    return folder.parent.name if len(seeds) > 1 and "seed" in folder.name else folder.name


def _picked_words(picked: dict[str, Any], among: list[dict[str, Any]]) -> str:
    """What sets a group apart in a few words, such as n=5; empty where that takes many."""
    keys = [key for key, _ in differing(among)]
    keys.sort(key=lambda key: not key.startswith("segmenter."))
    parts: list[str] = []
    if "segmenter.type" in keys:
        keys = [key for key in keys if not key.startswith("segmenter.")]
        parts.append(describe_segmenter(unflatten(picked)))
    if not 0 < len(keys) + len(parts) <= 3:
        return ""
    shorts = [key.rpartition(".")[2] for key in keys]
    for key, short in zip(keys, shorts):
        name = key if shorts.count(short) > 1 else short
        value = setting_text(picked[key]) if key in picked else "none"
        parts.append(f"{name}={value.removeprefix('.')}")
    return ", ".join(parts) if all(len(each) <= 40 for each in parts) else ""


def unflatten(picked: dict[str, Any]) -> dict[str, Any]:
    """The segmenter of flat settings, as a config has it."""
    inner = {k.partition(".")[2]: v for k, v in picked.items() if k.startswith("segmenter.")}
    return {"segmenter": inner or picked.get("segmenter")}


def _shared_name(seeds: list[Run]) -> str:
    names = {run.name for run in seeds}
    if len(seeds) == 1 and seeds[0].seed is not None:
        return re.sub(rf"[-_. ]+(seed|s)[-_. =]*{seeds[0].seed}$", "", seeds[0].name)
    if len(names) > 1:
        names = {re.sub(r"[-_. ]*(seed|s)?[-_. =]*\d+$", "", name) for name in names} - {""}
    return names.pop() if len(names) == 1 else seeds[0].name
