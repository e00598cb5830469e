"""Python values as JSON and back: what functions return, and not pickled.

JSON has neither tuples nor sets nor keys other than text, and tests tell them apart; they travel
as `{"$": type, "v": parts}`. What comes back is always made of plain types, so that comparing it
runs no code of the program's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Opaque:
    """Stands for a returned value of another type, which equals no expected value."""

    text: str


_PARTS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DEPTH = 200


def encode(value: Any, depth: int = 0) -> Any:
    """Something that `json.dumps` takes. Subclasses become what they extend."""
    if depth > _DEPTH:
        raise ValueError(f"a returned value is nested more than {_DEPTH} deep")
    if value is None or isinstance(value, (bool, str, float)):
        return value if value is None or isinstance(value, bool) else _plain(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else {"$": "int", "v": hex(value)}
    if isinstance(value, complex):
        return {"$": "complex", "v": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", "v": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(part, depth + 1) for part in value]
    if isinstance(value, dict):
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]
        return {"$": "dict", "v": pairs}
    for name, kind in _PARTS.items():
        if isinstance(value, kind):
            return {"$": name, "v": [encode(part, depth + 1) for part in value]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
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
    if kind == "dict":
        return {decode(k): decode(v) for k, v in parts}
    if kind == "opaque":
        return Opaque(str(parts))
    return _PARTS[kind](decode(part) for part in parts)


def _plain(value: str | float) -> str | float:
    return str.__str__(value) if isinstance(value, str) else float(value)
