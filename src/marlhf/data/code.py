"""Programming problems: one form for the tests of APPS, MBPP, HumanEval and your own files.

A row of code has these columns: `tests`, `difficulty`, `starter_code`, `solutions`. `tests` is a
mapping that JSON can hold, of one of four kinds:

    {"kind": "stdin", "inputs": ["1 2\\n"], "outputs": ["3\\n"]}
    {"kind": "call", "name": "add", "inputs": [[1, 2]], "outputs": [3]}
    {"kind": "expression", "setup": "", "inputs": ["add(1, 2)"], "outputs": ["3"]}
    {"kind": "check", "name": "add", "prompt": "", "check": "def check(candidate): ..."}

A program reads a text and prints one; or a function, or a method of `Solution`, is called; or
expressions are evaluated after the program and compared with Python literals; or a function full
of asserts gets the program's function `name`, as in HumanEval.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlhf.data.rows import DataError, Row

KINDS = {
    "stdin": ("inputs", "outputs"),
    "call": ("name", "inputs", "outputs"),
    "expression": ("inputs", "outputs"),
    "check": ("name", "prompt", "check"),
}
"""What each kind of tests must have."""


def check_tests(tests: Any) -> Mapping[str, Any]:
    """The tests as they are, or a DataError with what is wrong with them.

    >>> check_tests({"kind": "stdin", "inputs": ["1"], "outputs": []})
    Traceback (most recent call last):
    marlhf.data.rows.DataError: `tests` has 1 inputs but 0 outputs. Give one of each per test.
    """
    kind = tests.get("kind") if isinstance(tests, Mapping) else None
    if kind not in KINDS:
        raise DataError(
            f"`tests` must be a mapping whose `kind` is {', '.join(KINDS)}; got {str(tests)[:80]}."
        )
    missing = [name for name in KINDS[kind] if name not in tests]
    if missing:
        raise DataError(f"`tests` of kind `{kind}` lacks `{missing[0]}`.")
    if kind != "check" and len(tests["inputs"]) != len(tests["outputs"]):
        raise DataError(
            f"`tests` has {len(tests['inputs'])} inputs but {len(tests['outputs'])} outputs. "
            "Give one of each per test."
        )
    return tests


def code_row(
    prompt: str,
    tests: Mapping[str, Any],
    *,
    solutions: list[str],
    difficulty: str = "",
    starter_code: str = "",
    **rest: Any,
) -> Row:
    """A row whose chosen response is the first solution, where there is one."""
    columns = {
        "tests": dict(check_tests(tests)),
        "difficulty": difficulty,
        "starter_code": starter_code,
        "solutions": solutions,
        **rest,
    }
    return Row(prompt, chosen=solutions[0] if solutions else None, columns=columns)
