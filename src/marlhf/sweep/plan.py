"""Which trainings a sweep consists of: axes, their product, and what points share.

An override with several values is an axis, and the points are the product of all axes. A stage is
trained once for each combination of those axes that reach it, itself or through the models that it
starts from; the folder says which. Seeds are a folder of their own, so that the models which a run
starts from lie beside it under the same name for every seed, and reports take seeds together:

    runs/toy-sweep/seed=0/sft
    runs/toy-sweep/seed=0/ppo,n=5
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from marlhf.config.rl import RLConfig
from marlhf.config.settings import flatten, to_raw
from marlhf.fields import settings_with
from marlhf.runs.layout import CONFIG, MODEL, read_config, read_state
from marlhf.runs.write import is_finished
from marlhf.train.recipe import ConfigError, Stage, check_points, check_recipe

MAY_CHANGE = frozenset(settings_with(RLConfig, "may_change"))
MAX_LABEL = 48
"""Longest name of a value in a folder's name; a longer one is cut and told apart by its digest."""

Place = tuple[int, ...]
"""A point as the number of its value on each axis."""


@dataclass(frozen=True)
class SweepAxis:
    """A setting with several values, each as it was written."""

    key: str
    values: tuple[str, ...]
    name: str
    """What folders call it."""
    is_seed: bool

    @property
    def parsed(self) -> list[Any]:
        return [v if v.startswith("@") else yaml.safe_load(v) for v in self.values]

    def labels(self) -> list[str]:
        """`n=5` and so on, safe as names of files, no two alike."""
        labels: list[str] = []
        for text, value in zip(self.values, self.parsed):
            label = _label(value)
            if len(label) > MAX_LABEL or label.lower() in (each.lower() for each in labels):
                label = f"{label[:MAX_LABEL]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
            labels.append(label)
        return [f"{self.name}={label}" for label in labels]


@dataclass(frozen=True)
class Training:
    """One run folder to fill. Points share it where its settings are the same."""

    folder: Path
    recipe_stage: Stage
    """The stage as the recipe has it at one of the points, its models in the recipe's folder."""
    raw: dict[str, Any]
    """The settings of that stage as plain data."""
    starts_from: dict[str, Path]
    """Models it starts from: their paths in the recipe's folder, and whose they are here."""

    @property
    def stage(self) -> str:
        return self.recipe_stage.name

    @property
    def kind(self) -> str:
        return self.recipe_stage.kind

    @property
    def needs(self) -> list[Path]:
        """Folders of the trainings whose models it starts from."""
        return list(dict.fromkeys(self.starts_from.values()))

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings as plain data, with its own folder and the models of this sweep."""
        return self._moved(self.raw) | {"output_dir": str(self.folder)}

    @property
    def config(self) -> Any:
        """Its settings, typed. Only trainings that are about to run need them."""
        config = self.recipe_stage.config
        moved = self._moved(vars(config))
        changes = {key: value for key, value in moved.items() if value != getattr(config, key)}
        return replace(config, **changes | {"output_dir": str(self.folder)})

    def _moved(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        models = {old: str(new / MODEL) for old, new in self.starts_from.items()}
        return {key: _replaced(value, models) for key, value in settings.items()}

    @cached_property
    def identity(self) -> str:
        return identity(self.kind, self.settings)


@dataclass(frozen=True)
class SweepPoint:
    """One combination of the axes' values."""

    name: str
    settings: dict[str, Any]
    runs: tuple[Path, ...]
    """The folder of every stage, those that are shared with other points included."""


@dataclass(frozen=True)
class Plan:
    """A sweep before it is run. `runs` are in the order of the recipe, each after its needs."""

    recipe: str
    root: Path
    axes: tuple[SweepAxis, ...]
    points: tuple[SweepPoint, ...]
    runs: tuple[Training, ...]
    settings: dict[str, dict[str, Any]]
    """Of each stage, as of the first point."""


def make_plan(recipe: Path | str, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Plan:
    """The points of a sweep and the trainings that they need, each known run in its own folder.

    `only`: stages to keep, as patterns; what they start from is kept with them.

    >>> plan = make_plan("toy", ["ppo.segmenter.n=3,.inf", "num_steps=2"])
    >>> [point.name for point in plan.points]
    ['n=3', 'n=inf']
    >>> [str(run.folder) for run in plan.runs][:3]
    ['runs/toy-sweep/sft', 'runs/toy-sweep/reward', 'runs/toy-sweep/ppo,n=3']
    """
    words = [_split(word) for word in overrides]
    first = check_recipe(recipe, _overrides(words, {}))
    axes = _axes(words, [stage.name for stage in first])
    root = Path(first[0].config.output_dir).parent
    if not any(key == "output_dir" for key, _ in words):
        root = root.with_name(f"{root.name}-sweep")
    places: list[Place] = list(itertools.product(*(range(len(a.values)) for a in axes)))
    labels = [axis.labels() for axis in axes]
    names = [",".join(labels[i][v] for i, v in enumerate(place)) for place in places]
    stages: dict[Place, list[Stage]] = {}
    words.append(("output_dir", [json.dumps(str(root))]))  # the last of equals counts
    loaded = check_points(
        recipe,
        [_overrides(words, {a.key: a.values[v] for a, v in zip(axes, place)}) for place in places],
    )
    for place, name in zip(places, names):
        try:
            stages[place] = next(loaded)
        except ConfigError as error:
            raise ConfigError(f"At the point {name}: {error}" if axes else str(error)) from None
    _check_hub(first)
    folders, runs = _runs(stages, axes, labels, root)
    runs, parsed = _only(runs, only), [axis.parsed for axis in axes]
    kept = {run.folder for run in runs}
    points = tuple(
        SweepPoint(
            name or "the recipe as it is",
            {axis.key: values[i] for axis, values, i in zip(axes, parsed, place)},
            tuple(folder for folder in dict.fromkeys(folders[place]) if folder in kept),
        )
        for place, name in zip(places, names)
    )
    settings = {stage.name: flatten(to_raw(stage.config)) for stage in stages[places[0]]}
    for own in settings.values():
        del own["output_dir"]
    return Plan(str(recipe), root, axes, points, tuple(runs), settings)


def split_values(text: str) -> list[str]:
    """A value at its commas, but for those in brackets, braces and quotes.

    >>> split_values("1,.inf"), split_values("{type: ngram, n: 5},words"), split_values("[2, 3]")
    (['1', '.inf'], ['{type: ngram, n: 5}', 'words'], ['[2, 3]'])
    """
    parts, depth, quote, escaped = [""], 0, "", False
    for char in text:
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and quote == '"' and not escaped
        elif char in "\"'" and (depth or not parts[-1].strip()):  # in a word it is an apostrophe
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += char
    return [part.strip() for part in parts]


def identity(kind: str, raw: Mapping[str, Any]) -> str:
    """What a run learns, as text: its settings without those that change nothing of it."""
    kept = {k: v for k, v in raw.items() if k not in MAY_CHANGE}
    return json.dumps([kind, kept], sort_keys=True, default=str)


def _split(word: str) -> tuple[str, list[str]]:
    key, equals, text = word.partition("=")
    return (key.strip(), split_values(text)) if equals else ("", [word])


def _overrides(words: Sequence[tuple[str, list[str]]], chosen: Mapping[str, str]) -> list[str]:
    """The settings of one point, in the order in which they were given; else the first values."""
    return [f"{k}={chosen.get(k, v[0])}" if k else v[0] for k, v in words]


def _axes(words: Sequence[tuple[str, list[str]]], stages: Sequence[str]) -> tuple[SweepAxis, ...]:
    """Axes under the last part of their keys, where no other is called so."""
    values_of = {key: values for key, values in words if len(values) > 1}
    seeds = {"seed", *(f"{stage}.seed" for stage in stages)}
    short = {
        key: key if key.endswith(".seed") and key not in seeds else key.rpartition(".")[2]
        for key in values_of
    }
    taken = list(short.values())
    axes: list[SweepAxis] = []
    for key, values in values_of.items():
        if key == "output_dir":
            raise ConfigError("output_dir is the folder of the whole sweep: give it one value.")
        if [other for other, _ in words].count(key) > 1:
            raise ConfigError(f"{key} is given twice. Write all of its values in one list.")
        if "" in values:
            raise ConfigError(
                f"{key}={','.join(values)} has a value that is empty. Write null for none."
            )
        name = key if taken.count(short[key]) > 1 else short[key]
        axis = SweepAxis(key, tuple(values), _safe(name), key in seeds)
        seen = [json.dumps(value, default=str) for value in axis.parsed]
        for text, value in zip(values, seen):
            if seen.count(value) > 1:
                raise ConfigError(f"{key} has the value {text} twice.")
        axes.append(axis)
    return tuple(axes)


def _check_hub(stages: Sequence[Stage]) -> None:
    if any(stage.config.push_to_hub for stage in stages):
        raise ConfigError(
            "push_to_hub is set, but the points of a sweep would overwrite each other there. "
            "Set push_to_hub=false, and upload the one you choose."
        )


def _label(value: Any) -> str:
    """A value in a few letters: the name of a rule, the last part of a path."""
    if isinstance(value, dict):
        parts = [_label(v) if k == "type" else f"{k}={_label(v)}" for k, v in value.items()]
        return "-".join(parts) or "none"
    if isinstance(value, list):
        return "-".join(map(_label, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    words = "none" if value is None else str(value).rstrip("/")
    return _safe(words.removesuffix("/model").rpartition("/")[2]) or "empty"


def _safe(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-.")


def _runs(
    stages: Mapping[Place, Sequence[Stage]],
    axes: Sequence[SweepAxis],
    labels: Sequence[Sequence[str]],
    root: Path,
) -> tuple[dict[Place, list[Path]], list[Training]]:
    """The folders of each point's stages, and every training once."""
    # Points share the stages that no axis reaches, so each is looked at once.
    distinct = {id(stage): stage for own in stages.values() for stage in own}
    raw = {key: to_raw(stage.config) for key, stage in distinct.items()}
    references = {key: _references(settings, root) for key, settings in raw.items()}
    identities = {key: identity(stage.kind, raw[key]) for key, stage in distinct.items()}
    reach = _reach(stages, axes, identities, references)
    built: dict[Path, Training] = {}
    homes: dict[Place, dict[str, Path]] = {}
    for place, own in stages.items():
        homes[place] = {}
        for stage in own:
            where = [(axes[i], labels[i][place[i]]) for i in sorted(reach[stage.name])]
            seeds = [label for axis, label in where if axis.is_seed]
            others = [label for axis, label in where if not axis.is_seed]
            parent = root / ",".join(seeds) if seeds else root
            folder = parent / ",".join([stage.name, *others])
            homes[place][stage.name] = folder
            if folder not in built:
                needed = {_model(root, name): homes[place][name] for name in references[id(stage)]}
                built[folder] = Training(folder, stage, raw[id(stage)], needed)
    stand_in = _same(built, reach)
    known = _known(root)
    runs: dict[Path, Training] = {}

    def settle(folder: Path) -> Path:
        """Where the training that belongs into a folder really is; those that it needs first."""
        folder = stand_in[folder]
        if folder not in runs:
            run = built[folder]
            settled = {model: settle(path) for model, path in run.starts_from.items()}
            if settled != run.starts_from:
                run = replace(run, starts_from=settled)
            # The same training may have begun under another name, before an axis came or went.
            home = known.get(run.identity, folder) if known else folder
            runs[folder] = run if home == folder else replace(run, folder=home)
        return runs[folder].folder

    by_point = {
        place: [settle(homes[place][stage.name]) for stage in own] for place, own in stages.items()
    }
    return by_point, list({run.folder: run for run in runs.values()}.values())


def _only(runs: list[Training], patterns: Sequence[str]) -> list[Training]:
    """The trainings of those stages, and what they need."""
    stages = list(dict.fromkeys(run.stage for run in runs))
    for pattern in patterns:
        if not fnmatch.filter(stages, pattern):
            raise ConfigError(f"No stage is called {pattern}. There are: {', '.join(stages)}.")
    kept: set[Path] = set()
    for run in reversed(runs):  # what is needed comes earlier in the list
        if run.folder in kept or any(fnmatch.fnmatch(run.stage, p) for p in patterns or ["*"]):
            kept |= {run.folder, *run.needs}
    return [run for run in runs if run.folder in kept]


def _reach(
    stages: Mapping[Place, Sequence[Stage]],
    axes: Sequence[SweepAxis],
    identities: Mapping[int, str],
    references: Mapping[int, Sequence[str]],
) -> dict[str, set[int]]:
    """The axes on which each stage depends, itself or through the models it starts from."""
    reach: dict[str, set[int]] = {}
    for number, name in enumerate(stage.name for stage in next(iter(stages.values()))):
        at = {place: identities[id(own[number])] for place, own in stages.items()}
        reach[name] = {
            axis
            for axis in range(len(axes))
            if any(at[place] != at[*place[:axis], 0, *place[axis + 1 :]] for place in at)
        }
        for own in stages.values():
            for before in references[id(own[number])]:
                reach[name] |= reach[before]
    return reach


def _same(built: Mapping[Path, Training], reach: Mapping[str, set[int]]) -> dict[Path, Path]:
    """Each folder's stand-in: stages whose settings come out equal are trained once.

    Such as `ppo` and `macro-ppo` of one recipe at the same n. The one that names more axes stays.
    """
    equal: dict[str, list[Path]] = {}
    for folder, run in built.items():
        equal.setdefault(run.identity, []).append(folder)
    final: dict[Path, Path] = {}
    for folders in equal.values():
        best = max(folders, key=lambda folder: len(reach[built[folder].stage]))
        final |= dict.fromkeys(folders, best)
    return final


def _known(root: Path) -> dict[str, Path]:
    """Runs that are there already, by what they learn."""
    known: dict[str, Path] = {}
    for file in sorted([*root.glob(f"*/{CONFIG}"), *root.glob(f"*/*/{CONFIG}")]):
        config, state = read_config(file.parent), read_state(file.parent)
        if config and "stage" in state:  # else it is damaged, and its own stage will say so
            known.setdefault(identity(state["stage"], config), file.parent)
    return known


def _references(raw: Mapping[str, Any], root: Path) -> list[str]:
    """The stages whose models a stage starts from."""
    values = [x for v in raw.values() for x in (v if isinstance(v, list) else [v])]
    models = [x for x in values if isinstance(x, str) and x.endswith(MODEL)]  # few are
    names = [Path(x).parent.name for x in models if x == _model(root, Path(x).parent.name)]
    return list(dict.fromkeys(names))


def _model(root: Path, stage: str) -> str:
    """How a recipe in the folder `root` names the model of a stage."""
    return str(root / stage / MODEL)


def _replaced(value: Any, paths: Mapping[str, str]) -> Any:
    """A setting, or each item of a list of them, with paths replaced."""
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(each, paths) for each in value)
    return paths.get(value, value) if isinstance(value, str) else value


def describe_plan(plan: Plan) -> list[str]:
    """What `--dry-run` prints: the points, and what is left to train for each."""
    width = max(len(point.name) for point in plan.points)
    finished = {run.folder for run in plan.runs if is_finished(run.folder)}
    left = len(plan.runs) - len(finished)
    lines = [f"{len(plan.points)} points in {plan.root}: {len(plan.runs)} runs, {left} left"]
    printed: set[Path] = set()
    for point in plan.points:
        shown = [
            f"{folder.relative_to(plan.root)}{' (finished)' if folder in finished else ''}"
            for folder in point.runs
            if folder not in printed
        ]
        printed |= set(point.runs)
        lines.append(f"{point.name:{width}}  {'  '.join(shown)}".rstrip())
    return lines
