"""Environments that run programs in the sandbox: an interpreter as a tool, and mending a program.

Each call of the interpreter runs in the sandbox, in a new process that first runs the episode's
earlier cells again, with their output thrown away. So state is kept without a process that waits
between turns, the same cells give the same state, and the time limit is one for all cells of an
episode. A cell that exceeds a limit is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from marlhf.data.code import check_tests
from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import ConversationError, Step, from_user
from marlhf.environments.tools import opening
from marlhf.reward.code import Shared, UnitTests, Verdict
from marlhf.reward.gsm8k import right_answer
from marlhf.reward.sandbox import Outcome, Program, Sandbox

OUTPUT_BYTES = 1 << 16
RUN = """
import ast, contextlib, random, sys, traceback
class Nowhere:
    def write(self, text): return len(text)
    def flush(self): pass
def run(cell, space):
    tree, last = ast.parse(cell), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, "cell", "exec"), space)
    value = None if last is None else eval(compile(last, "cell", "eval"), space)
    if value is not None:
        print(repr(value))
def run_all(earlier, cell):
    random.seed(0)
    space = {"__name__": "__main__"}
    for each in earlier:
        with contextlib.redirect_stdout(Nowhere()), contextlib.redirect_stderr(Nowhere()):
            with contextlib.suppress(BaseException):
                run(each, space)
    try:
        run(cell, space)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != "cell":
            trace = trace.tb_next
        print("".join(traceback.format_exception(type(error), error, trace, limit=-5)))
"""
"""Defines `run_all`: as in a notebook, the value of a last expression is printed."""
LIMITS = {
    "timeout": "the time limit of {seconds:g} seconds for all cells so far",
    "memory": "the memory limit",
    "output_limit": "the limit of the output",
}
SHOWN_TESTS = 3
SHOWN_INPUT = 400
"""Characters of a test."""
SHOWN_ERROR = 1000
WORDS = {
    "compile_error": "The program does not compile.",
    "runtime_error": "The program fails while running",
    "timeout": "The program takes too long",
}


class Python:
    """Answer a question with the help of an interpreter.

    The reward is 1 where the last reply ends with the number in the row's column `answer`, as
    for `marlhf.reward.gsm8k:right_answer`. Rows without the column are left to reward functions.
    The `instruction` is added to the question: small models often ignore a tool that only the chat
    template describes.
    """

    timeout = None  # the sandbox has a time limit of its own, and waiting for one is no fault

    def __init__(
        self,
        *,
        answer: str = "answer",
        instruction: str = "",
        seconds: float = 5.0,
        memory_mb: int = 512,
        output_chars: int = 2000,
    ) -> None:
        self._column, self._seconds, self._output_chars = answer, seconds, output_chars
        self._more = f"\n{instruction}" if instruction else ""
        self._sandboxes = _sandboxes(memory_mb)
        self.tools: list[Callable[..., Any]] = [self.python]

    def reset(self, row: Row, seed: int) -> list[Message]:
        self._cells: list[str] = []
        self._final = ""
        self._answer = row.columns.get(self._column)
        with self._sandboxes.borrow():
            pass  # says before the first step where this machine cannot confine programs
        return opening(row, self._more)

    def python(self, code: str) -> str:
        """
        Run Python code and see its output. Variables and functions are kept for later calls.

        Args:
            code: The code. What it prints is shown, and so is the value of a last expression.

        Returns:
            The output, or the error.
        """
        if not isinstance(code, str):
            raise TypeError("code is a text")
        source = f"{RUN}\nrun_all({self._cells!r}, {code!r})\n"
        with self._sandboxes.borrow() as sandbox:
            [outcome] = sandbox.run([Program(source, seconds=self._seconds)])
        if outcome.status == "ok":
            self._cells.append(code)
        return self._shown(outcome)

    def _shown(self, outcome: Outcome) -> str:
        text = shorten(outcome.stdout.strip(), self._output_chars)
        if outcome.status in ("ok", "runtime_error"):
            return text or "(no output)"
        what = LIMITS.get(outcome.status, "what the sandbox allows").format(seconds=self._seconds)
        return f"{text}\nerror: this exceeds {what}; the code was not kept".strip()

    def step(self, reply: str) -> Step:
        self._final = reply
        return Step(done=True)

    def get_reward(self) -> float | None:
        if self._answer is None:
            return None
        return right_answer([self._final], [self._answer])[0]


def shorten(text: str, limit: int) -> str:
    """The two ends of a long text.

    >>> shorten("abcdefghij", 6)
    'abc\\n...\\nhij'
    """
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n...\n{text[-half:]}"


@cache
def _sandboxes(memory_mb: int) -> Shared[Sandbox]:
    return Shared(lambda: Sandbox(workers=1, memory_mb=memory_mb, output_bytes=OUTPUT_BYTES))


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
            return Step([from_user("All tests pass.")], reward=gained, done=True, success=True)
        return Step([from_user(explain(verdict, self._tests))], reward=gained, success=False)


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
