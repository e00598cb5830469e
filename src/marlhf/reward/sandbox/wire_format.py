"""Python values as JSON and back: what functions return, and not pickled.

JSON has neither tuples nor sets nor keys other than text, and tests tell them apart; they travel
as `{"$": type, "v": parts}`. What comes back is always made of plain types, so that comparing it
runs no code of the program's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Opaque:
    """Stands for a returned value of another type, which equals no expected value."""

    text: str


_PARTS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DEPTH, _ALIKE = 200, 1000


def encode(value: Any, *, strict: bool = False, depth: int = 0) -> Any:
    """Something that `json.dumps` takes. Subclasses become what they extend.

    Other types become opaque, or a TypeError if `strict`.
    """

    def inner(parts: Iterable[Any]) -> list[Any]:
        return [encode(part, strict=strict, depth=depth + 1) for part in parts]

    if depth > _DEPTH:
        raise ValueError(f"a value is nested more than {_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else {"$": "int", "v": hex(value)}
    if isinstance(value, complex):
        return {"$": "complex", "v": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", "v": bytes(value).hex()}
    if isinstance(value, list):
        return inner(value)
    if isinstance(value, dict):
        return {"$": "dict", "v": [inner(pair) for pair in value.items()]}
    for name, kind in _PARTS.items():
        if isinstance(value, kind):
            return {"$": name, "v": inner(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), strict=strict, depth=depth + 1)
    if strict:
        raise TypeError(f"a {type(value).__name__} cannot go into the sandbox: {value!r}")
    return {"$": "opaque", "v": repr(value)[:1000]}


def decode(value: Any) -> Any:
    """The value again. ValueError, TypeError, KeyError or RecursionError if it is malformed."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind, parts = value["$"], value["v"]
    if kind == "int":
        return int(parts, 16)
    if kind == "complex":
        return complex(*parts)
    if kind == "bytes":
        return bytes.fromhex(parts)
    if kind == "opaque":
        return Opaque(str(parts))
    if kind == "dict":
        keys = _spread([decode(key) for key, _ in parts])
        return dict(zip(keys, [decode(item) for _, item in parts], strict=True))
    decoded = [decode(part) for part in parts]
    return _PARTS[kind](decoded if kind == "tuple" else _spread(decoded))


def _spread(keys: list[Any]) -> list[Any]:
    """The same, unless their hashes were chosen to be alike, which would take the host for ever."""
    if len(keys) - len({hash(key) for key in keys}) > _ALIKE:
        raise ValueError(f"more than {_ALIKE} keys with the same hash")
    return keys
