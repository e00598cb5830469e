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
    tells_apart: bool | None = None,
    on_card: bool = False,
    private: bool = False,
    defines_score: bool = False,
) -> Any:
    """A field of a config, with what is known about the setting.

    `above`, `least` and `most` bound a number. A setting that `may_change` may differ when a run
    resumes: it changes nothing that is learnt, but for the last bits of rounding. Two runs that
    differ in a setting are different trainings, unless it may change or `tells_apart` is False.
    `on_card` gives it a line of its own on the model card, `private` leaves it out there.
    `defines_score`: scores of runs that differ in it cannot be compared.
    """
    facts = {
        "above": above,
        "least": least,
        "most": most,
        "may_change": may_change,
        "idle": not tells_apart if tells_apart is not None else may_change,
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
    hints = type_hints(type(config))
    for field in dataclasses.fields(config):
        value, kinds = getattr(config, field.name), type_options(hints[field.name])
        choices = typing.get_args(hints[field.name])
        if typing.get_origin(hints[field.name]) is typing.Literal and value not in choices:
            listed = ", ".join(map(str, choices))
            raise SettingError(f"{prefix}{field.name} must be one of {listed}; got {value!r}.")
        if value is None or not {int, float} & set(kinds) or set(kinds) & {str, tuple}:
            continue
        words = [x for kind in kinds for x in typing.get_args(kind)]  # such as "auto"
        if value in words:
            continue
        wanted = _wanted(value, float in kinds, _facts(type(config), field.name))
        if wanted:
            wanted = " or ".join([wanted, *words])
            raise SettingError(f"{prefix}{field.name} must be {wanted}; got {value!r}.")


def _wanted(value: Any, fractions: bool, facts: dict[str, Any]) -> str:
    """What a number must be, where it is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return "a number" if fractions else "a whole number"
    if not math.isfinite(value):
        return "finite"
    if not fractions and not isinstance(value, numbers.Integral):
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
