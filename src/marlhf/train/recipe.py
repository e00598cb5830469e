"""Recipes: YAML to frozen dataclasses, with every mistake reported at once.

A recipe is either the settings of one stage, or several named stages:

    extends: ../base.yaml          # merged beneath this file; paths relative to this file
    output_dir: runs/mine
    defaults: {seed: 1}            # beneath every stage
    stages:
      sft: {model: gpt2, ...}
      reward: {model: "@sft", ...} # the model that stage `sft` leaves behind
      ppo: {model: "@sft", reward_model: "@reward", ...}
      macro-ppo: {like: ppo, segmenter: {type: ngram, n: 5}}

A stage's kind is its name or its `kind:`; `like:` starts from another stage. `priority: 1` lets a
sweep train it before others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marlhf.config.build import (
    at,
    build,
    field_names,
    make_segmenter,
    raise_problems,
    unknown,
)
from marlhf.config.recipe_files import (
    ConfigError,
    Raw,
    assign,
    find_recipe,
    merge,
    read_override,
    read_recipe,
)
from marlhf.config.stage import StageConfig
from marlhf.data.rows import DataError
from marlhf.errors import quoted
from marlhf.runs.layout import MODEL
from marlhf.train.stages import METHODS


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe, ready to run."""

    name: str
    kind: str
    config: Any
    priority: float = 0.0
    """Where several are trained at a time, those of a higher one begin first."""
    where: str = ""
    """Its place in the recipe."""


def load_recipe(recipe: Path | str, overrides: list[str] | None = None) -> list[Stage]:
    """All stages of a recipe, in order. `ppo.kl_coef=0.1` overrides one stage, `seed=1` all."""
    return next(load_points(recipe, [overrides or []]))


def load_points(recipe: Path | str, points: Iterable[list[str]]) -> Iterator[list[Stage]]:
    """All stages of a recipe with each of several lists of overrides.

    The file is read once, and stages that come out the same are built once, so that a sweep of
    a thousand points is planned in seconds.
    """
    path, raw = _read_with_stages(recipe)
    built: dict[str, Stage] = {}
    made: dict[int, Stage] = {}
    for overrides in points:
        stages = _stages_with(path, raw, overrides, rules=True, built=built)
        new = [stage for stage in stages if id(stage) not in made]
        made |= {id(stage): ready for stage, ready in zip(new, make_segmenters(new))}
        yield [made[id(stage)] for stage in stages]


def load_stage(
    recipe: Path | str, kind: str, overrides: list[str] | None = None, name: str | None = None
) -> Stage:
    """One stage: a flat recipe of that kind, or the stage called `name` (or the kind) in it."""
    return make_segmenters([_read_stage(recipe, kind, overrides, name, rules=True)])[0]


def make_segmenters(stages: list[Stage]) -> list[Stage]:
    """Checked stages with their rules, which takes torch and may import the user's own modules."""
    problems: list[str] = []
    made: list[Stage] = []
    for stage in stages:
        config = make_segmenter(stage.config, at(stage.where, "segmenter"), problems)
        made.append(replace(stage, config=config))
    raise_problems(problems)
    return made


def check_recipe(recipe: Path | str, overrides: list[str] | None = None) -> list[Stage]:
    """All stages of a recipe, validated. Neither torch nor what the recipe names is imported."""
    path, raw = _read_with_stages(recipe)
    return _stages_with(path, raw, overrides or [], rules=False, built={})


def check_stage(
    recipe: Path | str, kind: str, overrides: list[str] | None = None, name: str | None = None
) -> Stage:
    """One stage, validated as `check_recipe` does."""
    return _read_stage(recipe, kind, overrides, name, rules=False)


def _read_with_stages(recipe: Path | str) -> tuple[Path, Raw]:
    path = find_recipe(recipe)
    raw = read_recipe(path)
    if "stages" not in raw:
        raise ConfigError(
            f"{path} has no `stages:`, so it is a single stage. "
            f"Run it by name, e.g. `marlhf ppo {recipe}`."
        )
    _stage_names(raw, path)
    return path, raw


def _stages_with(
    path: Path, raw: Raw, overrides: list[str], *, rules: bool, built: dict[str, Stage]
) -> list[Stage]:
    """The checked stages. Those in `built`, by their settings, are taken from there."""
    raw = {**raw, "stages": dict(raw["stages"])}  # overrides change both, the caller's stay
    problems: list[str] = []
    names = _stage_names(raw, path)
    general = _override_stages(raw, names, overrides)
    for key, value in general:
        if key == "output_dir":
            raw["output_dir"] = value
    stages, root = _stages(raw, path, problems)
    for key, value in general:
        if key == "output_dir":
            continue
        first = key.partition(".")[0]
        known = [n for n, s in stages.items() if first in _stage_keys(n, s)]
        if not known:
            every = {key for n, s in stages.items() for key in _stage_keys(n, s)}
            problems.append(unknown(key, first, {*every, *stages}))
        for name in known:
            assign(stages[name], key, value)
    _check_references(stages, problems)
    for name, stage in stages.items():
        stage["output_dir"] = str(root / name)
    keys = {name: repr((name, stage)) for name, stage in stages.items()}
    for name, stage in stages.items():
        if keys[name] not in built:
            one = _build_stage(name, stage, f"stages.{name}", problems, rules)
            built |= {keys[name]: one} if one else {}
    raise_problems(problems, path)
    return [built[key] for key in keys.values()]


def _read_stage(
    recipe: Path | str, kind: str, overrides: list[str] | None, name: str | None, rules: bool
) -> Stage:
    path = find_recipe(recipe)
    raw = read_recipe(path)
    problems: list[str] = []
    where = ""
    stages: dict[str, Raw] = {}
    if "stages" in raw:
        general = _override_stages(raw, _stage_names(raw, path), overrides)
        stages, root = _stages(raw, path, problems)
        name = name or kind
        if name not in stages:
            raise ConfigError(f"{path} has no stage {name!r}. It has: {', '.join(stages)}.")
        stage = stages[name] | {"output_dir": str(root / name)}
        actual = stage.get("kind", name)
        if actual != kind:
            raise ConfigError(f"Stage {name!r} of {path} is of kind {actual!r}, not {kind!r}.")
        _refuse_other_stages(raw, name, overrides or [])
        where = f"stages.{name}"
    else:
        name, stage = name or kind, raw
        general = list(map(read_override, overrides or []))
    stage["kind"] = kind
    for key, value in general:
        assign(stage, key, value)
    if stages:
        _check_references(stages | {name: stage}, problems)
    built = _build_stage(name, stage, where, problems, rules)
    raise_problems(problems, path)
    assert built
    return built


def kind_class(kind: str) -> type[StageConfig]:
    """The dataclass of a kind of stage."""
    if kind not in METHODS:
        raise ConfigError(unknown("kind", kind, METHODS))
    return METHODS[kind].config


def _stage_names(raw: Raw, path: Path) -> list[str]:
    """The names under `stages:`, once it is sure that they are names."""
    stages = raw["stages"]
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(f"`stages:` of {path} must map names to settings.")
    if not isinstance(raw.get("defaults") or {}, dict):
        raise ConfigError(f"`defaults:` of {path} must be a mapping of names to settings.")
    for name, stage in stages.items():
        if not re.fullmatch(r"\w[\w-]*", str(name)):
            raise ConfigError(
                f"The stage name {name!r} of {path} cannot be a folder's. "
                "Use letters, digits, _ and -."
            )
        if not isinstance(stage or {}, dict):
            raise ConfigError(f"stages.{name} of {path} must be a mapping.")
    return [str(name) for name in stages]


def _override_stages(
    raw: Raw, names: list[str], overrides: list[str] | None
) -> list[tuple[str, Any]]:
    """Put `ppo.batch_size=32` into that stage; what names no stage comes back.

    This is done before `like:` is followed, so that it reaches the stages that are like it.
    """
    general: list[tuple[str, Any]] = []
    for key, value in map(read_override, overrides or []):
        first, _, rest = key.partition(".")
        if first in names and rest:
            raw["stages"][first] = dict(raw["stages"][first] or {})
            assign(raw["stages"][first], rest, value)
        else:
            general.append((key, value))
    return general


def _refuse_other_stages(raw: Raw, name: str, overrides: list[str]) -> None:
    """An override of a stage that is not run, and that this one is not `like`, would do nothing."""
    reached = [name]
    while like := (raw["stages"][reached[-1]] or {}).get("like"):
        reached.append(like)
    for key, _ in map(read_override, overrides):
        first, _, rest = key.partition(".")
        if rest and first in raw["stages"] and first not in reached:
            raise ConfigError(
                f"{key} is a setting of another stage: this command trains {name} alone. Leave it "
                "out, or train all stages with `marlhf run`."
            )


def _stages(raw: Raw, path: Path, problems: list[str]) -> tuple[dict[str, Raw], Path]:
    """Each stage's own mapping over the defaults and what it is `like`."""
    known = {"output_dir", "defaults", "stages"}
    problems += [unknown(key, key, known) for key in raw if key not in known]
    stages = {str(name): stage for name, stage in raw["stages"].items()}

    def resolve(name: str, seen: tuple[str, ...] = ()) -> Raw:
        if name in seen:
            raise ConfigError(f"stages.{name} of {path} is `like` itself.")
        stage = stages[name] or {}
        like = stage.get("like")
        if like is not None and not isinstance(like, str):
            raise ConfigError(f"stages.{name}.like: must be a name (got {quoted(like)})")
        if like is None:
            return {"kind": name, **merge(raw.get("defaults") or {}, stage)}
        if like not in stages:
            raise ConfigError(unknown(f"stages.{name}.like", str(like), stages))
        own = {k: v for k, v in stage.items() if k != "like"}
        return merge(resolve(like, (*seen, name)), own)

    root = raw.get("output_dir", "runs")
    if not isinstance(root, str) or not root:
        raise ConfigError(f"output_dir must be the name of a folder; {path} has {root!r}.")
    return {name: resolve(name) for name in stages}, Path(root)


def _check_references(stages: dict[str, Raw], problems: list[str]) -> None:
    """`@sft` must name a stage that comes before the one that starts from it."""
    names = list(stages)
    for name, stage in stages.items():
        for key, given in stage.items():
            place = f"stages.{name}.{key}"
            for value in given if isinstance(given, list) else [given]:
                if not isinstance(value, str) or not value.startswith("@"):
                    continue
                if value[1:] not in stages:
                    problems.append(unknown(place, value[1:], stages))
                elif names.index(value[1:]) >= names.index(name):
                    problems.append(f"{place}: stage {value[1:]!r} does not come before {name!r}.")


def _build_stage(name: str, raw: Raw, where: str, problems: list[str], rules: bool) -> Stage | None:
    raw = dict(raw)
    kind = raw.pop("kind", name)
    preset = raw.pop("preset", None)
    priority = raw.pop("priority", 0.0)
    if isinstance(priority, bool) or not isinstance(priority, (int, float)):
        problems.append(f"{at(where, 'priority')}: must be a number (got {quoted(priority)})")
        return None
    for key, value in (("kind", kind), ("preset", preset or "")):
        if not isinstance(value, str):
            problems.append(f"{at(where, key)}: must be a name (got {quoted(value)})")
            return None
    if kind not in METHODS:
        problems.append(unknown(at(where, "kind"), str(kind), METHODS))
        return None
    config_class = METHODS[kind].config
    presets = config_class.presets
    if preset is not None and preset not in presets:
        none = "" if presets else f" {kind} has no presets."
        problems.append(unknown(at(where, "preset"), str(preset), presets) + none)
        return None
    root = Path(str(raw.get("output_dir", "runs/stage"))).parent
    for key, value in raw.items():
        if isinstance(value, str) and value.startswith("@"):
            raw[key] = str(root / value[1:] / MODEL)
        elif key == "reward_funcs" and isinstance(value, list):
            raw[key] = [
                str(root / x[1:] / MODEL) if isinstance(x, str) and x.startswith("@") else x
                for x in value
            ]
    missing = [key for key in config_class.required(raw) if not raw.get(key)]
    problems += [f"{at(where, key)}: must be given" for key in missing]
    raw = merge(presets.get(preset or "", {}), raw)
    config = build(config_class, raw, where, problems, rules=rules)
    try:
        if config is not None:
            config.data.check_named()
    except DataError as error:
        problems.append(f"{at(where, 'data')}: {error}")
    return None if config is None else Stage(name, kind, config, priority, where)


def _stage_keys(name: str, stage: Raw) -> set[str]:
    """What may be set in a stage."""
    config = kind_class(str(stage.get("kind", name)))
    return field_names(config) | ({"preset"} if config.presets else set())
