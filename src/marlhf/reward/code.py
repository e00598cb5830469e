"""Unit tests as a reward: programs run in the sandbox, and the host compares their answers.

    reward_funcs: ["marlhf.reward.code:unit_tests"]

The paper's reward: -1 for what does not compile, -0.6 for an error or a timeout while running,
else -0.3 + 1.3 * passed / (passed + failed). If the sandbox itself fails there is no reward, and an
error in the log: that says nothing about the program.

Expected outputs never enter the program's process. Texts, returned values and literals are compared
here. A check in HumanEval's format runs twice, in its own processes: once to record the arguments
it calls the function with, and once with the answers that the program gave to those.
"""

from __future__ import annotations

import ast
import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from marlhf.data.code import check_tests
from marlhf.data.rows import Text, response_text
from marlhf.reward.answers import (
    complete,
    extract_code,
    same_output,
    same_value,
    with_body,
    within_function,
)
from marlhf.reward.functions import reward_function
from marlhf.reward.sandbox import Call, Case, Opaque, Outcome, Program, Sandbox, Suite

log = logging.getLogger(__name__)

Result = Literal["passed", "failed", "runtime_error", "timeout", "compile_error", "sandbox_error"]
Tests = Mapping[str, Any]
"""See `marlhf.data.code`."""

COMPILE, RUNTIME, LEAST, RANGE = -1.0, -0.6, -0.3, 1.3
DEPTH = 100
"""Answers nested deeper than this are wrong: they are not sent back into the sandbox."""
RETURN = "SyntaxError: 'return' outside function"
"""Some solutions of APPS need this: its authors run programs within a function."""

PREAMBLE = (
    "import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, "
    "operator, random, re, string, sys, time\n"
    "from bisect import *; from collections import *; from functools import *; "
    "from heapq import *; from itertools import *; from math import *\n"
    "from typing import *\n"
)
"""Imports that contest sites, and APPS, provide to programs that define a function."""

CHECK = """
import random as _random
_random.seed(0)
{prompt}
{check}
def _replay(answers, name):
    import copy
    known, recorded, verdicts = {{}}, [], []
    for args, kwargs, answer in answers:
        known.setdefault(repr([args, kwargs]), []).append(answer)
    def candidate(*args, **kwargs):
        recorded.append(copy.deepcopy([list(args), kwargs]))
        answers = known.get(repr(recorded[-1]), [None])
        return answers.pop(0) if len(answers) > 1 else copy.deepcopy(answers[0])
    def _verdict(test):
        try:
            verdicts.append(bool(test()))
        except Exception:
            verdicts.append(False)
    globals().update({{"_verdict": _verdict, name: candidate}})
    complete = True
    try:
        check(candidate)
    except Exception:
        complete = False
    return [recorded, verdicts, complete]
"""


@dataclass(frozen=True)
class Verdict:
    """The result of a response: the worst that happened, and how many tests it passed."""

    result: Result
    passed: int = 0
    total: int = 0
    message: str = ""
    right: tuple[bool, ...] = field(default=(), compare=False)
    """Each test's result, where the program ran to its end."""
    ran: int = field(default=0, compare=False)
    """How many cases were run; where the program failed, the last of them is the one."""

    @property
    def reward(self) -> float | None:
        """The paper's reward; None if the sandbox failed.

        >>> Verdict("failed", passed=0, total=2).reward
        -0.3
        """
        if self.result == "sandbox_error":
            return None
        if self.result == "compile_error":
            return COMPILE
        if self.result in ("runtime_error", "timeout"):
            return RUNTIME
        return LEAST + RANGE * self.passed / self.total


@reward_function
class UnitTests:
    """A reward function with settings: create an object and name it in `reward_funcs`.

    # my_rewards.py
    tests = UnitTests(seconds=2, max_tests=10)

    The sandbox starts at the first call and stops with the process.
    """

    __name__ = "unit_tests"

    def __init__(
        self,
        *,
        seconds: float = 4.0,
        memory_mb: int = 512,
        workers: int | None = None,
        max_tests: int | None = None,
        allow_weak: bool = False,
    ) -> None:
        self.seconds, self.memory_mb, self.workers = seconds, memory_mb, workers
        self.max_tests, self.allow_weak = max_tests, allow_weak
        self._sandbox: Sandbox | None = None
        self._owner = 0
        self._recorded: dict[tuple[str, str, str], list[Any] | None] = {}
        """The arguments that each check calls the function with; None if it cannot be run."""

    def __call__(self, completions: Sequence[Text], tests: Sequence[Tests]) -> list[float | None]:
        verdicts = self.judge([response_text(each) for each in completions], tests)
        return [verdict.reward for verdict in verdicts]

    @property
    def layers(self) -> dict[str, bool | str]:
        """The layers of the sandbox."""
        return dict(self._open().layers)

    def judge(self, responses: Sequence[str], tests: Sequence[Tests]) -> list[Verdict]:
        """One verdict per response; failures of the sandbox itself are tried once more."""
        verdicts = self._judge(responses, tests)
        again = [i for i, v in enumerate(verdicts) if v.result == "sandbox_error"]
        if again:
            retried = self._judge([responses[i] for i in again], [tests[i] for i in again])
            for i, verdict in zip(again, retried):
                verdicts[i] = verdict
                if verdict.result == "sandbox_error":
                    log.error("No verdict and no reward: %s", verdict.message)
        return verdicts

    def close(self) -> None:
        if self._sandbox is not None and self._owner == os.getpid():
            self._sandbox.close()
        self._sandbox = None

    def _open(self) -> Sandbox:
        # A fork cannot use its parent's sandbox.
        if self._sandbox is None or self._owner != os.getpid():
            self._sandbox = Sandbox(
                workers=self.workers or processors_per_rank(),
                memory_mb=self.memory_mb,
                seconds=self.seconds,
                allow_weak=self.allow_weak,
            )
            self._owner = os.getpid()
            atexit.register(self.close)
            log.info("sandbox layers: %s", self._sandbox.layers)
        return self._sandbox

    def _judge(self, responses: Sequence[str], tests: Sequence[Tests]) -> list[Verdict]:
        sandbox = self._open()
        for each in tests:
            check_tests(each)
        self._record([each for each in tests if each["kind"] == "check"])
        suites = [self._suite(text, each) for text, each in zip(responses, tests, strict=True)]
        outcomes = sandbox.run_suites(suites)
        to_wrap = [
            i
            for i, cases in enumerate(outcomes)
            if tests[i]["kind"] == "stdin" and cases and RETURN in cases[0].stderr
        ]
        wrapped = [replace(suites[i], source=within_function(suites[i].source)) for i in to_wrap]
        for i, cases in zip(to_wrap, sandbox.run_suites(wrapped)):
            outcomes[i] = cases
        verdicts = [
            _fault(cases) or self._compare(cases, each) for cases, each in zip(outcomes, tests)
        ]
        answered = zip(outcomes, tests, verdicts)
        checked = iter(self._replay([(cases[0], each) for cases, each, v in answered if v is None]))
        return [verdict or next(checked) for verdict in verdicts]

    def _suite(self, response: str, tests: Tests) -> Suite:
        kind, name = tests["kind"], tests.get("name")
        code = extract_code(response, name)
        if kind == "check":
            recorded = self._recorded.get(_key(tests)) or []
            calls = [Call(tests["name"], args, kwargs) for args, kwargs in recorded]
            source = complete(tests["prompt"], code, tests["name"])
            return Suite(source, [Case(calls=calls)])
        if kind == "stdin":
            cases = [Case(each) for each in tests["inputs"]]
        elif kind == "call":
            cases = [Case(calls=[Call(tests["name"], each)]) for each in tests["inputs"]]
            code = code if "from __future__" in code else PREAMBLE + code
        else:
            cases = [Case(calls=[Call(each, None)]) for each in tests["inputs"]]
            code = f"{code}\n{tests.get('setup', '')}"
        return Suite(code, cases[: self.max_tests])

    def _compare(self, outcomes: Sequence[Outcome], tests: Tests) -> Verdict | None:
        """Compare answers with the expected ones; None if a check has to do that."""
        if tests["kind"] == "check":
            if not self._recorded.get(_key(tests)):
                return Verdict("sandbox_error", message="the check itself cannot be run")
            return None
        return _counted(
            [_is_right(o, e, tests["kind"]) for o, e in zip(outcomes, tests["outputs"])]
        )

    def _record(self, tests: Sequence[Tests]) -> None:
        """Record the arguments of each check, in a process without any program."""
        new = list(
            {_key(each): each for each in tests if _key(each) not in self._recorded}.values()
        )
        programs = [Program(_check_source(each), calls=[_replaying(each, [])]) for each in new]
        for each, outcome in zip(new, self._open().run(programs)):
            if outcome.status == "sandbox_error":
                continue
            returned = outcome.returned if outcome.status == "ok" else None
            recorded = returned[0][0] if returned else None
            if not recorded:
                reason = outcome.stderr or "it never calls the function"
                log.error("The check of `%s` cannot be run: %s", each["name"], reason)
            self._recorded[_key(each)] = recorded

    def _replay(self, answered: Sequence[tuple[Outcome, Tests]]) -> list[Verdict]:
        """Run each check with the answers that the program gave."""
        programs = []
        for outcome, each in answered:
            pairs = zip(self._recorded[_key(each)] or [], outcome.returned or [])
            answers = [[args, kwargs, _plain(answer)] for (args, kwargs), answer in pairs]
            programs.append(Program(_check_source(each), calls=[_replaying(each, answers)]))
        verdicts = []
        for outcome in self._open().run(programs):
            if outcome.status == "sandbox_error":
                verdicts.append(Verdict("sandbox_error", message=outcome.stderr))
                continue
            _, right, complete = (outcome.returned or [[None, [], False]])[0]
            verdicts.append(_counted(right if complete and right else [*right, False]))
        return verdicts


unit_tests = UnitTests()
"""The reward with its default settings."""


def processors_per_rank() -> int:
    """Processors that this process may use, shared fairly with the other ranks of the machine."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _fault(outcomes: Sequence[Outcome]) -> Verdict | None:
    """A verdict for a program that failed before any answer could be compared."""
    counted = Counter(outcome.status for outcome in outcomes)
    message = outcomes[-1].stderr.strip() if outcomes else "no tests"
    if not outcomes or counted["sandbox_error"]:
        return Verdict("sandbox_error", message=message)
    if counted["compile_error"]:
        return Verdict("compile_error", message=message)
    if counted["timeout"]:
        return Verdict("timeout", message="timeout", ran=len(outcomes))
    if counted["ok"] < len(outcomes):
        message = message or outcomes[-1].status
        return Verdict("runtime_error", message=message, ran=len(outcomes))
    return None


def _is_right(outcome: Outcome, expected: Any, kind: str) -> bool:
    if kind == "stdin":
        return same_output(outcome.stdout, expected)
    returned = outcome.returned[0] if outcome.returned else None
    if kind == "call":
        return same_value(returned, expected)
    return returned == ast.literal_eval(expected)


def _counted(right: Sequence[bool]) -> Verdict:
    passed, total = sum(right), len(right)
    return Verdict("passed" if passed == total else "failed", passed, total, right=tuple(right))


def _key(tests: Tests) -> tuple[str, str, str]:
    return tests["name"], tests["prompt"], tests["check"]


def _replaying(tests: Tests, answers: Sequence[Any]) -> Call:
    return Call("_replay", [answers, tests["name"]])


def _plain(value: Any, depth: int = 0) -> Any:
    """An answer that can be sent back into the sandbox; other types become a text."""
    if isinstance(value, Opaque) or depth > DEPTH:
        return f"<{value.text if isinstance(value, Opaque) else 'nested too deep'}>"
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_plain(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return {_plain(key, depth + 1): _plain(each, depth + 1) for key, each in value.items()}
    return value


class _Asserts(ast.NodeTransformer):
    """Turns `assert test` into `_verdict(lambda: test)`: all are counted, none ends the check."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):
            return ast.Pass()
        nothing = ast.arguments([], [], None, [], [], None, [])
        test = ast.Lambda(nothing, node.test)
        return ast.Expr(ast.Call(ast.Name("_verdict", ast.Load()), [test], []))


def _check_source(tests: Tests) -> str:
    try:
        tree = ast.fix_missing_locations(_Asserts().visit(ast.parse(tests["check"])))
    except SyntaxError:
        return tests["check"]  # the sandbox reports it
    return CHECK.format(prompt=PREAMBLE + with_body(tests["prompt"]), check=ast.unparse(tree))


T = TypeVar("T")


class Shared(Generic[T]):
    """As many objects as there are processors, each made when it is first needed.

    A fork of this process makes its own: it cannot use its parent's sandboxes.

    >>> lists = Shared(list)
    >>> with lists.borrow() as borrowed:
    ...     borrowed
    []
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self._owner, self._idle = os.getpid(), list[T]()
        self._slots = threading.Semaphore(processors_per_rank())

    @contextmanager
    def borrow(self) -> Iterator[T]:
        """An object for this thread alone, once there is one."""
        if self._owner != os.getpid():
            self._begin()
        with self._slots:
            try:
                one = self._idle.pop()
            except IndexError:
                one = self._make()
            try:
                yield one
            finally:
                self._idle.append(one)
