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

import dataclasses
import difflib
import importlib
import os
import re
import sys
import typing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from marlhf.recipe_files import (
    ConfigError,
    Raw,
    assign,
    find_recipe,
    merge,
    read_override,
    read_recipe,
)
from marlhf.settings import SEGMENTERS, dataclass_in

KINDS = {
    "sft": "marlhf.train.sft:SFTConfig",
    "reward": "marlhf.train.reward:RewardConfig",
    "ppo": "marlhf.train.ppo:PPOConfig",
    "rloo": "marlhf.train.rloo:RLOOConfig",
    "dpo": "marlhf.train.dpo:DPOConfig",
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "official": {"pooling": "mean", "score_clip": 2.5, "split_last": True},
}
"""`paper` is the default. `official` is what the authors' code does, for comparison."""

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe, ready to run."""

    name: str
    kind: str
    config: Any
    priority: float = 0.0
    """Where several are trained at a time, those of a higher one begin first."""


def load_recipe(recipe: Path | str, overrides: list[str] | None = None) -> list[Stage]:
    """All stages of a recipe, in order. `ppo.kl_coef=0.1` overrides one stage, `seed=1` all."""
    path = find_recipe(recipe)
    raw = read_recipe(path)
    if "stages" not in raw:
        raise ConfigError(
            f"{path} has no `stages:`, so it is a single stage. "
            f"Run it by name, e.g. `marlhf ppo {recipe}`."
        )
    problems: list[str] = []
    names = _stage_names(raw, path)
    general: list[tuple[str, Any]] = []
    for key, value in map(read_override, overrides or []):
        first, _, rest = key.partition(".")
        if key == "output_dir":
            raw["output_dir"] = value
        elif first in names and rest:  # before `like:` is followed, so that it reaches those too
            raw["stages"][first] = dict(raw["stages"][first] or {})
            assign(raw["stages"][first], rest, value)
        else:
            general.append((key, value))
    stages, root = _stages(raw, path, problems)
    for key, value in general:
        first = key.partition(".")[0]
        known = [n for n, s in stages.items() if first in _stage_keys(n, s)]
        if not known:
            every = {key for n, s in stages.items() for key in _stage_keys(n, s)}
            problems.append(_unknown(key, first, {*every, *stages}))
        for name in known:
            assign(stages[name], key, value)
    _check_references(stages, problems)
    for name, stage in stages.items():
        stage["output_dir"] = str(root / name)
    built = [
        _build_stage(name, stage, f"stages.{name}", problems) for name, stage in stages.items()
    ]
    _raise(problems, path)
    return [stage for stage in built if stage]


def load_stage(
    recipe: Path | str, kind: str, overrides: list[str] | None = None, name: str | None = None
) -> Stage:
    """One stage: a flat recipe of that kind, or the stage called `name` (or the kind) in it."""
    path = find_recipe(recipe)
    raw = read_recipe(path)
    problems: list[str] = []
    where = ""
    stages: dict[str, Raw] = {}
    if "stages" in raw:
        _stage_names(raw, path)
        stages, root = _stages(raw, path, problems)
        name = name or kind
        if name not in stages:
            raise ConfigError(f"{path} has no stage {name!r}. It has: {', '.join(stages)}.")
        stage = stages[name] | {"output_dir": str(root / name)}
        found = stage.get("kind", name)
        if found != kind:
            raise ConfigError(f"Stage {name!r} of {path} is of kind {found!r}, not {kind!r}.")
        where = f"stages.{name}"
    else:
        name, stage = name or kind, raw
    stage["kind"] = kind
    for key, value in map(read_override, overrides or []):
        assign(stage, key, value)
    if stages:
        _check_references(stages | {name: stage}, problems)
    built = _build_stage(name, stage, where, problems)
    _raise(problems, path)
    assert built
    return built


def load_config(cls: type[T], recipe: Path | str, overrides: list[str] | None = None) -> T:
    """A flat recipe as any dataclass."""
    path = find_recipe(recipe)
    raw = read_recipe(path)
    for key, value in map(read_override, overrides or []):
        assign(raw, key, value)
    problems: list[str] = []
    config = _build(cls, raw, "", problems)
    _raise(problems, path)
    return config


def build_segmenter(raw: Any, where: str = "segmenter") -> Any:
    """A segmenter from `{type: ngram, n: 5}`, `ngram`, or `{type: my_module:MyRule, ...}`."""
    problems: list[str] = []
    built = _segmenter(raw, where, problems)
    _raise(problems)
    return built


def kind_class(kind: str) -> type:
    """The dataclass of a kind of stage."""
    if kind not in KINDS:
        raise ConfigError(_unknown(kind, kind, KINDS))
    module, _, name = KINDS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


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


def _stages(raw: Raw, path: Path, problems: list[str]) -> tuple[dict[str, Raw], Path]:
    """Each stage's own mapping over the defaults and what it is `like`."""
    known = {"output_dir", "defaults", "stages"}
    problems += [_unknown(key, key, known) for key in raw if key not in known]
    stages = {str(name): stage for name, stage in raw["stages"].items()}

    def resolve(name: str, seen: tuple[str, ...] = ()) -> Raw:
        if name in seen:
            raise ConfigError(f"stages.{name} of {path} is `like` itself.")
        stage = stages[name] or {}
        like = stage.get("like")
        if like is None:
            return {"kind": name, **merge(raw.get("defaults") or {}, stage)}
        if like not in stages:
            raise ConfigError(_unknown(f"stages.{name}.like", str(like), stages))
        own = {k: v for k, v in stage.items() if k != "like"}
        return merge(resolve(like, (*seen, name)), own)

    return {name: resolve(name) for name in stages}, Path(str(raw.get("output_dir", "runs")))


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
                    problems.append(_unknown(place, value[1:], stages))
                elif names.index(value[1:]) >= names.index(name):
                    problems.append(f"{place}: stage {value[1:]!r} does not come before {name!r}.")


def _build_stage(name: str, raw: Raw, where: str, problems: list[str]) -> Stage | None:
    raw = dict(raw)
    kind = raw.pop("kind", name)
    preset = raw.pop("preset", "paper")
    priority = raw.pop("priority", 0.0)
    if isinstance(priority, bool) or not isinstance(priority, (int, float)):
        problems.append(f"{_at(where, 'priority')}: must be a number (got {priority!r})")
        return None
    if kind not in KINDS:
        problems.append(_unknown(_at(where, "kind"), str(kind), KINDS))
        return None
    if preset not in PRESETS:
        problems.append(_unknown(_at(where, "preset"), str(preset), PRESETS))
        return None
    if preset != "paper" and kind != "ppo":
        problems.append(f"{_at(where, 'preset')}: only ppo has presets.")
        return None
    root = Path(str(raw.get("output_dir", "runs/stage"))).parent
    for key, value in raw.items():
        if isinstance(value, str) and value.startswith("@"):
            raw[key] = str(root / value[1:] / "model")
        elif key == "reward_funcs" and isinstance(value, list):
            raw[key] = [
                str(root / x[1:] / "model") if isinstance(x, str) and x.startswith("@") else x
                for x in value
            ]
    problems += [
        f"{_at(where, key)}: Field required" for key in _required(kind, raw) if not raw.get(key)
    ]
    config = _build(kind_class(kind), merge(PRESETS[preset], raw), where, problems)
    return None if config is None else Stage(name, kind, config, priority)


def _required(kind: str, raw: Raw) -> list[str]:
    """What a recipe must say, and Python may give as objects instead."""
    samples = kind in ("ppo", "rloo")
    return ["model", "output_dir"] + ["reward_model"] * (samples and not raw.get("reward_funcs"))


def _build(cls: type[T], raw: Any, where: str, problems: list[str]) -> T:
    """Validate with pydantic, after naming unknown keys ourselves with the nearest known one."""
    from pydantic import TypeAdapter, ValidationError

    before = len(problems)
    raw = _walk(cls, raw, where, problems)
    built = None
    try:
        built = TypeAdapter(cls).validate_python(raw)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            place = where
            for part in one["loc"]:
                place = _at(place, str(part))
            whole = one["type"] == "missing" or isinstance(one["input"], dict)
            given = "" if whole else f" (got {one['input']!r})"  # a mapping may hold secrets
            message = one["msg"].removeprefix("Value error, ")
            problems.append(f"{place or 'recipe'}: {message}{given}")
    return typing.cast(T, built if len(problems) == before else None)


def _walk(cls: type, raw: Any, where: str, problems: list[str]) -> Any:
    """Report unknown keys at every level, and build segmenters, which have a `type`."""
    if not isinstance(raw, dict):
        return raw
    hints = typing.get_type_hints(cls)
    known = _names(cls)
    checked = {}
    for key, value in raw.items():
        place = _at(where, key)
        if key not in known:
            problems.append(_unknown(place, key, known))
            continue
        inner = dataclass_in(hints[key])
        if key == "segmenter":
            before = len(problems)
            value = _segmenter(value, place, problems)
            if len(problems) > before:
                continue  # said already; the default stands in
        elif inner is not None and isinstance(value, dict):
            value = _walk(inner, value, place, problems)
        checked[key] = value
    return checked


def _segmenter(raw: Any, where: str, problems: list[str]) -> Any:
    raw = {"type": raw} if isinstance(raw, str) else raw
    if not isinstance(raw, dict):
        if not callable(raw):
            problems.append(f"{where}: write {{type: ngram, n: 5}} or the like (got {raw!r})")
        return raw
    name, rest = str(raw.get("type", "ngram")), {k: v for k, v in raw.items() if k != "type"}
    if ":" in name:
        try:
            cls = _import(name)
            if not dataclasses.is_dataclass(cls):
                if not isinstance(cls, type) and not rest:
                    return cls
                return cls(**rest) if isinstance(cls, type) else partial(cls, **rest)
        except (ImportError, AttributeError, TypeError) as error:
            problems.append(f"{where}.type: cannot use {name}: {error}")
            return None
    elif name in SEGMENTERS:
        cls = getattr(importlib.import_module("marlhf.core"), SEGMENTERS[name])
    else:
        problems.append(_unknown(f"{where}.type", name, SEGMENTERS))
        return None
    return _build(typing.cast(type, cls), rest, where, problems)


def _import(name: str) -> Any:
    """`module:Name`, from the folder of the command as well as from what is installed."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), attribute)


def _stage_keys(name: str, stage: Raw) -> set[str]:
    """What may be set in a stage."""
    kind = str(stage.get("kind", name))
    return _names(kind_class(kind)) | ({"preset"} if kind == "ppo" else set())


def _names(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def _unknown(place: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(known))}."
    return f"{place}: unknown name {name!r}. {hint}"


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _raise(problems: list[str], path: Path | None = None) -> None:
    if problems:
        head = f"{path}: " if path else ""
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        raise ConfigError("\n  ".join([f"{head}{count}", *problems]))
