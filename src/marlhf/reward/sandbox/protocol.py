"""Requests to the sandbox and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from marlhf.reward.sandbox.wire_format import encode

Status = Literal[
    "ok",
    "compile_error",
    "runtime_error",
    "timeout",
    "memory",
    "output_limit",
    "sandbox_error",
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
    """One source with many cases: compiled once, each case in its own process."""

    source: str
    cases: Sequence[Case]
    seconds: float | None = None
    """Time limit per case; None for the sandbox's own."""
    stop_early: bool = False
    """Skip the cases after the first one that does not end with `ok`."""


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
