"""What goes into the sandbox and what comes out."""

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
    """A function to call once the program has run.

    Arguments are made of None, booleans, numbers, text, bytes, lists, tuples, sets and
    dictionaries.
    `"Solution.solve"` makes a `Solution()` and calls its method; so does plain `"solve"` where
    the program defines it nowhere else. With `args=None` the name is an expression to evaluate.
    """

    name: str
    args: Sequence[Any] | None = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One run of a program: what it reads, and which functions are called."""

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
    """A source with its one case."""

    source: str
    stdin: str | bytes = ""
    calls: Sequence[Call] | None = None
    seconds: float | None = None
    """Limit of its run; the sandbox's own without it."""


@dataclass(frozen=True)
class Suite:
    """One source and many cases: compiled once, each case in a process of its own."""

    source: str
    cases: Sequence[Case]
    seconds: float | None = None
    """Limit of each case; the sandbox's own without it."""
    stop_early: bool = False
    """Leave out what follows the first case that does not end in `ok`."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program. Whether that is right is for the caller to judge.

    `ok` says that it ended by itself with exit status 0 and that every call returned. Whatever
    keeps a program from compiling, be it the clock, is a `compile_error`. `sandbox_error` is no
    fault of the program's and says nothing about it.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    """The last 8 KiB."""
    returned: list[Any] | None = None
    """Values of the calls that returned, in order; None without calls."""
    seconds: float = 0.0
    """From compiled to ended."""
