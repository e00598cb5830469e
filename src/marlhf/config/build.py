"""Recipes: from files with what they extend to plain data, with `key=value` on top; and from plain
data to typed settings, with every mistake reported at once and by its place.

Nothing that a recipe names is imported while it is being checked: a segmenter stays a
`SegmenterSpec`, its name and settings, until `build_segmenter` makes the rule of it.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import numbers
import typing
from collections.abc import Iterable
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from marlhf.config.settings import SEGMENTERS, SegmenterSpec, dataclass_in, hint_for, rule_defaults
from marlhf.config.user_code import UserCodeError, check_name, import_named
from marlhf.errors import MarlhfError, quoted
from marlhf.fields import type_hints, type_options

T = TypeVar("T")
EXPECTED = {
    "missing": "must be given",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
}
"""Pydantic's errors by their type, in words of a recipe."""
LEARN = "`marlhf credit RUN --learn-cuts`"
Raw = dict[str, Any]
MAX_VALUES = 100_000
"""Of a recipe; the largest shipped one has a few hundred."""


class ConfigError(MarlhfError, ValueError):
    """One or more mistakes in a recipe, a line each."""


def find_recipe(recipe: Path | str) -> Path:
    """A file, or the name of a recipe that comes with marlhf, with or without `.yaml`."""
    path = Path(recipe)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    wanted = str(recipe).removesuffix(".yaml").removeprefix("recipes/")
    if wanted in shipped:
        return shipped[wanted]
    near = difflib.get_close_matches(wanted, shipped, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else f" Shipped recipes: {', '.join(shipped)}."
    raise ConfigError(f"There is no recipe {str(recipe)!r}.{hint}")


def shipped_recipes() -> dict[str, Path]:
    """Name to file of every recipe that comes with marlhf."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "recipes", package.parents[1] / "recipes"):
        if root.is_dir():
            files = sorted(root.rglob("*.yaml"))
            named = {str(f.relative_to(root).with_suffix("")): f for f in files}
            return {name: f for name, f in named.items() if not name.startswith("base/")}
    return {}


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> Raw:
    """A file's mapping, merged over what it extends."""
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen[seen.index(path) :], path))
        raise ConfigError(f"{path} extends itself: {chain}. Remove one `extends:`.")
    if not path.is_file():
        raise ConfigError(f"{seen[-1] if seen else path} extends {path}, which does not exist.")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        num_values = _num_values(raw, {})
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep to be a recipe.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}).") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if num_values > MAX_VALUES:
        raise ConfigError(
            f"{path} has over {MAX_VALUES:,} values with its aliases (`*name`) written out. "
            "Remove some."
        )
    if raw is None:
        raise ConfigError(f"{path} is empty.")
    if not isinstance(raw, dict) or not all(isinstance(k, str) for k in raw):
        raise ConfigError(f"{path} must be a mapping of names to settings, like `seed: 0`.")
    parents = raw.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(each, str) for each in parents):
        raise ConfigError(f"`extends:` of {path} must be a file name or a list of them.")
    merged: Raw = {}
    for parent in parents:
        merged = merge(merged, read_recipe(path.parent / parent, (*seen, path)))
    return merge(merged, raw)


def _num_values(value: object, known: dict[int, float]) -> float:
    """Values with all aliases written out: a few lines can stand for more than memory holds."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # as long as it is not counted: it holds itself
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(each, known) for each in inner)
    return known[id(value)]


class _Loader(yaml.SafeLoader):
    """Safe, and a key given twice is a mistake rather than the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge_key = "tag:yaml.org,2002:merge"  # `<<: *defaults`, which may be given anew below
        named = [key for key, _ in node.value if key.tag != merge_key]
        keys = [self.construct_object(key, deep=True) for key in named]
        twice = {str(k) for k in keys if isinstance(k, str) and keys.count(k) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {', '.join(sorted(twice))} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def merge(base: Raw, over: Raw) -> Raw:
    """Mappings merge, everything else replaces. Another `type` replaces the whole mapping."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = value
        if isinstance(old, dict) and isinstance(value, dict):
            same = value.get("type", old.get("type")) == old.get("type")
            merged[key] = merge(old, value) if same else value
    return merged


def read_override(text: str) -> tuple[str, Any]:
    """`segmenter.n=3` as a dotted name and a value, which is YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"Cannot read {text!r}. Write key=value, e.g. segmenter.n=3.")
    if value.startswith("@"):
        return key.strip(), value  # a stage's model; YAML has other plans for that sign
    try:
        return key.strip(), copy.deepcopy(_read_value(value))
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"Cannot read the value of {text!r} as YAML.") from None


@lru_cache(maxsize=4096)
def _read_value(text: str) -> Any:
    """A sweep reads the few values of its axes once for every point."""
    return yaml.load(text, _Loader)


def assign(raw: Raw, key: str, value: Any) -> None:
    """Set a dotted name, making what it lies in. Another `type` clears its other settings."""
    *outer, last = key.split(".")
    for part in outer:
        inner = raw.get(part)
        raw[part] = dict(inner) if isinstance(inner, dict) else {}
        raw = raw[part]
    if last == "type" and raw.get("type") != value:
        raw.clear()
    raw[last] = value


def build(cls: type[T], raw: Any, where: str, problems: list[str]) -> T:
    """Validate with pydantic, after naming unknown keys ourselves with the nearest known one."""
    from pydantic import ValidationError

    before = len(problems)
    raw = _check_names(cls, raw, where, problems)
    built = None
    try:
        built = _adapter(cls).validate_python(raw)
    except ValidationError as error:
        for one in _by_setting(cls, error.errors(include_url=False)):
            place = where
            for part in one["loc"]:
                place = at(place, str(part))
            whole = one["type"] == "missing" or isinstance(one["input"], dict)
            given = "" if whole else f" (got {quoted(one['input'])})"  # a mapping may hold secrets
            message = EXPECTED.get(one["type"]) or one["msg"].removeprefix("Value error, ")
            problems.append(f"{place or 'recipe'}: {message}{given}")
    return typing.cast(T, built if len(problems) == before else None)


def _by_setting(cls: type, errors: list[Any]) -> list[dict[str, Any]]:
    """One error per setting: where several types are allowed, pydantic reports each of them."""
    problems: dict[Any, dict[str, Any]] = {}
    for number, error in enumerate(errors):
        place, inner = error["loc"], cls
        while place and inner is not None and place[0] in field_names(inner):
            inner = dataclass_in(type_hints(inner)[place[0]])
            place = place[1:]
        # What is left of the place names one of several types, such as `int` of `int | "auto"`.
        wrong_type = error["type"].endswith(("_type", "_parsing")) or "literal" in error["type"]
        setting = error["loc"][: len(error["loc"]) - len(place)]
        is_option = wrong_type and len(place) == 1 and place[0] != 0
        in_tuple = bool(place) and str(place[0]).startswith("tuple[")
        if not (setting and inner is None and (is_option or in_tuple)):
            problems[number] = error
            continue
        option = error["ctx"]["expected"] if "literal" in error["type"] else place[0]
        if setting in problems:
            problems[setting]["msg"] += f" or {option}"
        else:
            problems[setting] = error | {"type": "", "loc": setting, "msg": f"must be {option}"}
    return list(problems.values())


@cache
def _adapter(cls: type) -> Any:
    """Made once per class: a sweep builds thousands of configs, and this takes milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def make_segmenter(config: T, where: str, problems: list[str]) -> T:
    """The config with the rule itself in place of the segmenter's name and settings."""
    spec = getattr(config, "segmenter", None)
    if not isinstance(spec, SegmenterSpec):
        return config
    rule = _from_spec(spec, where, problems)
    return config if rule is None else dataclasses.replace(typing.cast(Any, config), segmenter=rule)


def build_segmenter(raw: Any, where: str = "segmenter") -> Any:
    """A segmenter from `{type: ngram, n: 5}`, `ngram`, or `{type: my_module:MyRule, ...}`."""
    problems: list[str] = []
    spec = raw if isinstance(raw, SegmenterSpec) else _segmenter_spec(raw, where, problems)
    segmenter = _from_spec(spec, where, problems) if isinstance(spec, SegmenterSpec) else spec
    raise_problems(problems)
    return segmenter


def _from_spec(spec: SegmenterSpec, where: str, problems: list[str]) -> Any:
    if not spec.is_user_code:
        import marlhf.core  # torch loads only when a rule is made

        cls = getattr(marlhf.core, SEGMENTERS[spec.type])
        return build(cls, spec.settings, where, problems)
    try:
        named = import_named(spec.type)
        if not isinstance(named, type):
            return partial(named, **spec.settings) if spec.settings else named
        if dataclasses.is_dataclass(named):
            return build(named, spec.settings, where, problems)
        return named(**spec.settings)
    except (UserCodeError, TypeError) as error:
        problems.append(f"{where}.type: cannot use {spec.type}: {error}")
        return None


def _segmenter_spec(raw: Any, where: str, problems: list[str]) -> Any:
    """A rule's name and settings; a rule that is there already as it is."""
    if callable(raw):
        return raw
    raw = {"type": raw} if isinstance(raw, str) else raw
    if not isinstance(raw, dict):
        problems.append(f"{where}: write {{type: ngram, n: 5}} or the like (got {quoted(raw)})")
        return None
    name = str(raw.get("type", "ngram"))
    settings = {str(k): v for k, v in raw.items() if k != "type"}
    if ":" in name:
        try:
            check_name(name)
        except UserCodeError as error:
            problems.append(f"{where}.type: {error}")
        return SegmenterSpec(name, settings)
    if name not in SEGMENTERS:
        problems.append(unknown(f"{where}.type", name, SEGMENTERS))
        return None
    known = rule_defaults(name)
    if name == "learned":
        settings = _with_learned(settings, where, problems)
    problems += [unknown(at(where, key), key, known) for key in settings if key not in known]
    return SegmenterSpec(name, known | settings)


def _with_learned(settings: dict[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The weights of learned cuts in place of the `path` of their file.

    So the config of a run holds the weights themselves, and the file may go or change.
    """
    given = {key: value for key, value in settings.items() if key != "path"}
    if "path" not in settings:
        if not given:
            problems.append(f"{where}: give `path`, the cuts.json of {LEARN}, or weights")
        return given
    path = Path(str(settings["path"]))
    try:
        learned = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{where}.path: there is no file {path}. {LEARN} writes it")
        return given
    except (OSError, ValueError, RecursionError):
        learned = None
    if not (isinstance(learned, dict) and learned):
        problems.append(f"{where}.path: {path} does not hold learned cuts. {LEARN} writes it anew")
        return given
    return learned | given


def _check_names(cls: type, raw: Any, where: str, problems: list[str]) -> Any:
    """Report unknown keys at every level; segmenters, which have a `type`, become specs."""
    if not isinstance(raw, dict):
        return raw
    hints, known = type_hints(cls), field_names(cls)
    checked: dict[str, Any] = {}
    for key, value in raw.items():
        place = at(where, key)
        if key not in known:
            problems.append(unknown(place, key, known))
        elif key == "segmenter":
            checked[key] = _segmenter_spec(value, place, problems)
        elif isinstance(value, bool) and _is_number(hints[key]):
            problems.append(f"{place}: must be a number (got {quoted(value)})")
        elif (inner := dataclass_in(hints[key])) is not None:
            checked[key] = _check_names(inner, value, place, problems)
        else:
            checked[key] = value
    for field in dataclasses.fields(cls):
        default = field.default_factory
        if field.name == "segmenter" and checked.get("segmenter") is None:
            checked.pop("segmenter", None)
            if isinstance(default, partial):  # of `ngram`, which would import torch
                checked["segmenter"] = SegmenterSpec("ngram", default.keywords)
    return checked


def _is_number(hint: Any) -> bool:
    kinds = [kind for kind in type_options(hint) if isinstance(kind, type)]
    return bool not in kinds and any(issubclass(kind, numbers.Real) for kind in kinds)


@cache
def field_names(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def unknown(place: str, name: str, known: Iterable[str]) -> str:
    """A sentence about a name that is not there, with the nearest that are."""
    names = sorted(known)
    few = f"Known: {', '.join(names)}." if len(names) <= 12 else "`marlhf config` lists all."
    return f"{place}: unknown name {name!r}. {hint_for(name, names) or few}"


def at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def raise_problems(problems: list[str], path: Path | None = None) -> None:
    if problems:
        head = f"{path}: " if path else ""
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        raise ConfigError("\n  ".join([f"{head}{count}", *problems]))
