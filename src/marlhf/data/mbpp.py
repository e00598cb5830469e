"""MBPP: short Python functions, each with one sentence and three asserts.

Read as published (text, code, test_list), and in its sanitised form (prompt, code, test_list,
test_imports). As in its paper, the prompt shows the asserts, which tell a function's name and
arguments:

    QUESTION:
    Write a function to find the similar elements from the given two tuple lists.
    Your code should pass these tests:
    assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)
    ...

    ANSWER:
"""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Mapping
from typing import Any

from marlhf.data.code import code_row
from marlhf.data.rows import Parsed

HUB_NAME, HUB_CONFIG = "google-research-datasets/mbpp", "full"


def recognises(record: Mapping[str, Any]) -> bool:
    return {"code", "test_list"} <= record.keys() and bool({"text", "prompt"} & record.keys())


def to_row(record: Mapping[str, Any]) -> Parsed:
    text, asserts = record.get("text") or record.get("prompt"), record["test_list"]
    if not isinstance(text, str) or not isinstance(record["code"], str):
        return None, "the task or its code is not text"
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    try:
        tests = to_tests(asserts, setup.replace("\r\n", "\n"))
    except SyntaxError:
        return None, "a test is not Python"
    if not asserts or tests is None:
        return None, "there is no test that calls a function"
    code, number = record["code"].replace("\r\n", "\n").strip(), record.get("task_id")
    return code_row(write_prompt(text, asserts), tests, solutions=[code], task_id=number), ""


def write_prompt(text: str, asserts: list[str]) -> str:
    shown = "\n".join(asserts)
    return (
        f"QUESTION:\n{text.strip()}\nYour code should pass these tests:\n{shown}\n\nANSWER:\n"
        if text.strip()
        else ""
    )


def to_tests(asserts: list[str], setup: str = "") -> dict[str, Any] | None:
    """Expressions with their values where each assert is `f(...) == literal`, else a check.

    >>> to_tests(["assert add(1, 2) == 3"])["inputs"]
    ['add(1, 2)']
    """
    inputs, outputs = [], []
    for text in asserts:
        equations = [_equation(statement) for statement in ast.parse(text).body]
        inputs += [each[0] for each in equations if each]
        outputs += [each[1] for each in equations if each]
        if not all(equations):
            break
    else:
        return {"kind": "expression", "setup": setup, "inputs": inputs, "outputs": outputs}
    name = _called("\n".join(asserts))
    if name is None:
        return None
    check = "def check(candidate):\n" + textwrap.indent("\n".join(asserts), "    ")
    return {"kind": "check", "name": name, "prompt": setup, "check": check}


def _equation(statement: ast.stmt) -> tuple[str, str] | None:
    test = statement.test if isinstance(statement, ast.Assert) else None
    if not isinstance(test, ast.Compare) or [type(op) for op in test.ops] != [ast.Eq]:
        return None
    try:
        ast.literal_eval(test.comparators[0])
    except ValueError:
        return None
    return ast.unparse(test.left), ast.unparse(test.comparators[0])


def _called(code: str) -> str | None:
    """The first function in the asserts that Python itself does not have."""
    calls = [node.func for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = [f.id for f in calls if isinstance(f, ast.Name) and not hasattr(builtins, f.id)]
    return names[0] if names else None
