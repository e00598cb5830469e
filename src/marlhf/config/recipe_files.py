"""Recipes as files: finding them, reading YAML with what it extends, and `key=value` on top.

What comes out is plain data; `marlhf.train.recipe` makes typed settings of it.
"""

from __future__ import annotations

import copy
import difflib
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from marlhf.errors import MarlhfError

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
