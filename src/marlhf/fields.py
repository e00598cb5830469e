"""Fields of configs: a default, bounds, and facts about the setting, all in one place.

Nothing heavy is imported here: configs load before a command knows what it needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from pathlib import Path
from typing import Any

from marlhf.errors import SettingError


def setting(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    may_change: bool = False,
    affects_identity: bool | None = None,
    on_card: bool = False,
    private: bool = False,
    defines_score: bool = False,
) -> Any:
    """A field of a config, with what is known about the setting.

    `above`, `least` and `most` bound a number. A setting that `may_change` may differ when a run
    resumes: it changes nothing that is learnt, but for the last bits of rounding. Two runs that
    differ in a setting are different trainings, unless it may change or `affects_identity` is
    False.
    `on_card` gives it a line of its own on the model card, `private` leaves it out there.
    `defines_score`: scores of runs that differ in it cannot be compared.
    """
    facts = {
        "above": above,
        "least": least,
        "most": most,
        "may_change": may_change,
        "outside_identity": may_change if affects_identity is None else not affects_identity,
        "on_card": on_card,
        "private": private,
        "defines_score": defines_score,
    }
    metadata = {name: value for name, value in facts.items() if value is not None}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def settings_with(cls: type, fact: str) -> list[str]:
    """The settings of a config that a fact holds for; a field written anew keeps its facts."""
    facts = {f.name: _facts(cls, f.name) for f in dataclasses.fields(cls)}
    return [name for name, known in facts.items() if known.get(fact)]


@functools.cache
def _facts(cls: type, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        field = parent.__dict__.get("__dataclass_fields__", {}).get(name)
        if field is not None:
            facts |= {key: fact for key, fact in field.metadata.items() if fact is not False}
    return facts


def check_settings(config: Any, prefix: str = "") -> None:
    """Refuse unknown choices, and numbers of the wrong kind, out of bounds, infinite or NaN."""
    for name, choices, is_number, is_whole, facts in _checked_fields(type(config)):
        value = getattr(config, name)
        if value in choices or (value is None and is_number):
            continue
        wanted = _wanted(value, is_whole, facts) if is_number else f"one of {', '.join(choices)}"
        if wanted:
            wanted = " or ".join([wanted, *choices]) if is_number else wanted
            raise SettingError(f"{prefix}{name} must be {wanted}; got {value!r}.")


@functools.cache
def _checked_fields(cls: type) -> list[tuple[str, tuple[str, ...], bool, bool, dict[str, Any]]]:
    """Of each setting that is a choice or a number: its name, the words it takes, whether it is
    a number, whether a whole one, and its facts."""
    checked = []
    for field in dataclasses.fields(cls):
        kinds = type_options(type_hints(cls)[field.name])
        choices = tuple(x for kind in kinds for x in typing.get_args(kind) if isinstance(x, str))
        is_choice = all(typing.get_origin(kind) is typing.Literal for kind in kinds)
        is_number = bool({int, float} & set(kinds)) and not {str, tuple} & {
            typing.get_origin(kind) or kind for kind in kinds
        }
        if is_choice or is_number:
            whole = float not in kinds
            checked.append((field.name, choices, is_number, whole, _facts(cls, field.name)))
    return checked


def _wanted(value: Any, is_whole: bool, facts: dict[str, Any]) -> str:
    """What a number must be, where it is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return "a whole number" if is_whole else "a number"
    if not math.isfinite(value):
        return "finite"
    if is_whole and not isinstance(value, numbers.Integral):
        return "a whole number"
    above, least, most = (facts.get(name) for name in ("above", "least", "most"))
    inside = (
        (above is None or value > above)
        and (least is None or value >= least)
        and (most is None or value <= most)
    )
    if inside:
        return ""
    limits = [
        "" if above is None else "positive" if above == 0 else f"larger than {above:g}",
        "" if least is None else f"at least {least:g}",
        "" if most is None else f"at most {most:g}",
    ]
    return " and ".join(filter(None, limits))


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def type_options(hint: Any) -> tuple[Any, ...]:
    """`int | None` as its parts, `int` as itself alone."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


@functools.cache
def read_table(name: str) -> dict[str, Any]:
    """A table of `config/` in YAML; by libyaml where PyYAML has it, in a tenth of the time."""
    import yaml

    text = (Path(__file__).parent / "config" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
