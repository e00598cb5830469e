"""Requests to the sandbox, its results, and values as JSON on their way between the two.

Pickle would let a program run code in the host. JSON has neither tuples nor sets nor keys other
than text, and tests distinguish them, so they are sent as `{"$": type, "v": parts}`. Decoded values
have plain types only, so comparing them runs no code of the program.

The sandbox's own processes import this module, so it needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal[
    "ok", "compile_error", "runtime_error", "timeout", "memory", "output_limit", "sandbox_error"
]


@dataclass(frozen=True)
class Call:
    """A function to call after the program has run.

    Arguments are None, booleans, numbers, text, bytes, lists, tuples, sets and dictionaries.
    `"Solution.solve"` creates a `Solution()` and calls its method; so does plain `"solve"` if the
    program defines it nowhere else. With `args=None` the name is an expression to evaluate.
    """

    name: str
    args: Sequence[Any] | None = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One run of a program: its standard input, and which functions are called."""

    stdin: str | bytes = ""
    calls: Sequence[Call] | None = None

    def input(self) -> bytes:
        if isinstance(self.stdin, bytes):
            return self.stdin
        return self.stdin.encode("utf-8", "surrogatepass")

    def wire(self) -> list[list[Any]] | None:
        if self.calls is None:
            return None
        return [
            [
                call.name,
                None if call.args is None else encode(list(call.args), strict=True),
                encode(dict(call.kwargs), strict=True),
            ]
            for call in self.calls
        ]


@dataclass(frozen=True)
class Program:
    """A source with a single case."""

    source: str
    stdin: str | bytes = ""
    calls: Sequence[Call] | None = None
    seconds: float | None = None
    """Time limit; None for the sandbox's own."""


@dataclass(frozen=True)
class Suite:
    """One source with many cases: compiled once, each case in its own process.

    The first case that does not end with `ok` is the last that runs.
    """

    source: str
    cases: Sequence[Case]
    seconds: float | None = None
    """Time limit per case; None for the sandbox's own."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. The caller judges whether its output is right.

    `ok`: it exited by itself with status 0 and every call returned. `compile_error`: it did not
    compile, for any reason, a timeout included. `sandbox_error`: the sandbox failed, which says
    nothing about the program.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    """The last 8 KiB."""
    returned: list[Any] | None = None
    """Values of the calls that returned, in order; None if there were no calls."""
    seconds: float = 0.0
    """Running time, without compilation."""


@dataclass(frozen=True)
class Opaque:
    """Stands for a returned value of any other type; it equals no expected value."""

    text: str


_PARTS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DEPTH, _MAX_EQUAL_HASHES = 200, 1000


def encode(value: Any, *, strict: bool = False, depth: int = 0) -> Any:
    """Convert a value to JSON types. Subclasses become their base type.

    Other types become opaque, or raise a TypeError if `strict`.
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
        raise TypeError(f"a {type(value).__name__} cannot be sent into the sandbox: {value!r}")
    return {"$": "opaque", "v": repr(value)[:1000]}


def decode(value: Any, depth: int = 0) -> Any:
    """The reverse of `encode`; ValueError, TypeError or KeyError if malformed.

    A program can write to the pipe itself, so its limits are checked again here.
    """

    def inner(parts: Iterable[Any]) -> list[Any]:
        return [decode(part, depth + 1) for part in parts]

    if depth > _DEPTH:
        raise ValueError(f"a value is nested more than {_DEPTH} deep")
    if isinstance(value, list):
        return inner(value)
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
        keys = _checked_hashes(inner(key for key, _ in parts))
        return dict(zip(keys, inner(item for _, item in parts), strict=True))
    decoded = inner(parts)
    return _PARTS[kind](decoded if kind == "tuple" else _checked_hashes(decoded))


def _checked_hashes(keys: list[Any]) -> list[Any]:
    """Refuse keys with deliberately equal hashes: inserting them takes quadratic time."""
    if len(keys) - len({hash(key) for key in keys}) > _MAX_EQUAL_HASHES:
        raise ValueError(f"more than {_MAX_EQUAL_HASHES} keys with the same hash")
    return keys
