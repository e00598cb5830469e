"""A Python interpreter as a tool, for questions with a number as their answer.

Each call runs in the sandbox, in a new process that first runs the episode's earlier cells again,
with their output thrown away. So state is kept without a process that waits between turns, the
same cells give the same state, and the time limit is one for all cells of an episode. A cell that
exceeds a limit is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import Step
from marlhf.environments.tools import opening
from marlhf.reward.code import Shared
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
