"""Write a program, see which tests fail, mend it: for rows of MBPP, APPS and HumanEval."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from marlhf.data.code import check_tests
from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import ConversationError, Step
from marlhf.environments.python import shorten
from marlhf.environments.tools import opening
from marlhf.reward.code import Shared, UnitTests, Verdict

SHOWN_TESTS = 3
SHOWN_INPUT = 400
"""Characters of a test."""
SHOWN_ERROR = 1000
WORDS = {
    "compile_error": "The program does not compile.",
    "runtime_error": "The program fails while running",
    "timeout": "The program takes too long",
}


class FixCode:
    """Each reply is a program, judged by the row's tests in the sandbox.

    The reward of a turn is what it adds to the score of `marlhf.reward.code:unit_tests`, so that a
    conversation's rewards sum to the score of its last program. It ends when all tests pass.

    The model reads which tests fail: MBPP's asserts, which its prompt shows, and the inputs of
    others, but never an expected output that the prompt does not have.
    """

    timeout = None  # the sandbox has a time limit of its own, and waiting for one is no fault

    def __init__(
        self, *, seconds: float = 4.0, memory_mb: int = 512, max_tests: int | None = None
    ) -> None:
        self._judges = _judges(seconds, memory_mb, max_tests)

    def reset(self, row: Row, seed: int) -> list[Message]:
        if "tests" not in row.columns:
            raise ConversationError(
                "fix-code needs the column `tests`, as rows of mbpp, apps, humaneval and toy-code "
                "have it"
            )
        self._tests, self._score = check_tests(row.columns["tests"]), 0.0
        with self._judges.borrow() as judge:
            assert judge.layers  # says before the first step where programs cannot be confined
        return opening(row)

    def step(self, reply: str) -> Step:
        with self._judges.borrow() as judge:
            [verdict] = judge.judge([reply], [self._tests])
        if verdict.reward is None:
            raise RuntimeError(f"the sandbox failed: {verdict.message}")
        gained, self._score = verdict.reward - self._score, verdict.reward
        if verdict.result == "passed":
            return Step([_user("All tests pass.")], reward=gained, done=True, success=True)
        return Step([_user(explain(verdict, self._tests))], reward=gained, success=False)


def explain(verdict: Verdict, tests: Mapping[str, Any]) -> str:
    """What a programmer would see of the tests that failed.

    >>> tests = {"kind": "expression", "inputs": ["f(1)", "f(2)"], "outputs": ["1", "4"]}
    >>> print(explain(Verdict("failed", 1, 2, right=(True, False)), tests))
    1 of 2 tests pass. These fail:
    assert f(2) == 4
    Mend the program, and write all of it again.
    """
    again = "Mend the program, and write all of it again."
    if verdict.result != "failed":
        at = f" in this test:\n{_test(tests, verdict.ran - 1)}" if verdict.ran else "."
        first = WORDS[verdict.result] + ("" if verdict.result == "compile_error" else at)
        message = "" if verdict.result == "timeout" else shorten(verdict.message, SHOWN_ERROR)
        return "\n".join(filter(None, (first, message, again)))
    failed = [number for number, right in enumerate(verdict.right) if not right]
    shown = [_test(tests, number) for number in failed[:SHOWN_TESTS]]
    more = [f"... and {len(failed) - len(shown)} more"] if len(failed) > len(shown) else []
    first = f"{verdict.passed} of {verdict.total} tests pass. These fail:"
    return "\n".join([first, *shown, *more, again])


def _test(tests: Mapping[str, Any], number: int) -> str:
    if tests["kind"] == "check":
        return f"assertion {number + 1} of the tests of `{tests['name']}`"
    given = tests["inputs"][number]
    if tests["kind"] == "expression":
        return shorten(f"assert {given} == {tests['outputs'][number]}", SHOWN_INPUT)
    if tests["kind"] == "call":
        return shorten(f"{tests['name']}({', '.join(map(repr, given))})", SHOWN_INPUT)
    return f"the input\n{shorten(given.rstrip(), SHOWN_INPUT)}"


@cache
def _judges(seconds: float, memory_mb: int, max_tests: int | None) -> Shared[UnitTests]:
    return Shared(
        lambda: UnitTests(seconds=seconds, memory_mb=memory_mb, max_tests=max_tests, workers=1)
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
