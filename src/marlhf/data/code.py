"""Programming problems: one form for their tests; APPS, MBPP, HumanEval; a task without a download.

A row of code has these columns: `tests`, `difficulty`, `starter_code`, `solutions`. `tests` is a
mapping that JSON can hold, of one of four kinds:

    {"kind": "stdin", "inputs": ["1 2\\n"], "outputs": ["3\\n"]}
    {"kind": "call", "name": "add", "inputs": [[1, 2]], "outputs": [3]}
    {"kind": "expression", "setup": "", "inputs": ["add(1, 2)"], "outputs": ["3"]}
    {"kind": "check", "name": "add", "prompt": "", "check": "def check(candidate): ..."}

A program reads a text and prints one; or a function, or a method of `Solution`, is called; or
expressions are evaluated after the program and compared with Python literals; or a function full
of asserts gets the program's function `name`, as in HumanEval.

APPS has problems from contests and exercises. It is read as on the hub (`codeparrot/apps`, where
tests and solutions are JSON within text) and in the original layout, one folder per problem:

    train/0001/question.txt  input_output.json  solutions.json  metadata.json  starter_code.py

The prompt is that of the authors' own code:

    QUESTION:
    <question>
    <starter code>
    Use Standard Input format        (or: Use Call-Based format)

    ANSWER:

MBPP has short functions, each with one sentence and three asserts. It is read as published (text,
code, test_list), and in its sanitised form (prompt, code, test_list, test_imports). As in its
paper, the prompt shows the asserts, which tell a function's name and arguments:

    QUESTION:
    Write a function to find the similar elements from the given two tuple lists.
    Your code should pass these tests:
    assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)
    ...

    ANSWER:

HumanEval has 164 functions to complete, for evaluation. It is read as published (prompt,
canonical_solution, test, entry_point). The prompt is the beginning of the program, and the response
continues it; it may also write the whole function again. On the hub they are the split `test`.

`toy-code` makes one-line programs, for a very small model:

    Read a number and add 3.
    print(int(input())+3)

Its solutions to imitate are right two times in five. The others use another number or sign, forget
`int`, or do not compile, so that the unit tests have something to reward.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marlhf.data.files import Records
from marlhf.data.rows import DataError, Parsed, Row, Source, all_text

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


APPS_PROBLEM = "*/*/question.txt"


def is_apps_folder(path: Path) -> bool:
    """Whether a folder is in the original layout: of problems, or of `train` and `test`."""
    return path.is_dir() and any(next(path.glob(p), None) for p in ("*/question.txt", APPS_PROBLEM))


def read_apps_folder(path: Path, split: str = "train") -> Records:
    """Every problem of a folder, in order; of its part `split` where it has parts."""
    root = path if next(path.glob("*/question.txt"), None) else path / split
    questions = sorted(root.glob("*/question.txt"))
    if not questions:
        parts = ", ".join(sorted({each.parents[1].name for each in path.glob(APPS_PROBLEM)}))
        raise DataError(f"{path} has no split `{split}`. It has: {parts}.")
    for question in questions:
        folder = question.parent
        meta = json.loads(_text(folder / "metadata.json") or "{}")
        yield (
            {
                "problem_id": folder.name,
                "question": _text(question),
                "solutions": _text(folder / "solutions.json"),
                "input_output": _text(folder / "input_output.json"),
                "difficulty": meta.get("difficulty", ""),
                "url": meta.get("url", ""),
                "starter_code": _text(folder / "starter_code.py"),
            },
            str(folder),
        )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def apps_row(record: Mapping[str, Any]) -> Parsed:
    question, starter = record["question"], record.get("starter_code") or ""
    if not isinstance(question, str):
        return None, "`question` is not text"
    try:
        given, solutions = (_json(record.get(name)) for name in ("input_output", "solutions"))
    except (ValueError, RecursionError):  # also numbers with more digits than Python converts
        return None, "`input_output` or `solutions` is not JSON"
    if not given or not given.get("inputs"):
        return None, "the problem has no tests"
    if len(given["inputs"]) != len(given.get("outputs", [])):
        return None, "not as many outputs as inputs"
    called, inputs, outputs = given.get("fn_name"), given["inputs"], given["outputs"]
    if called:
        tests = {"kind": "call", "name": called, "inputs": [*map(_arguments, inputs)]}
        tests["outputs"] = outputs
    else:
        tests = {"kind": "stdin", "inputs": [*map(_lines, inputs)]}
        tests["outputs"] = [*map(_lines, outputs)]
    row = code_row(
        write_problem(question, starter, called=bool(called)),
        tests,
        solutions=[solution.strip() for solution in solutions or [] if solution.strip()],
        difficulty=record.get("difficulty") or "",
        starter_code=starter,
        problem_id=record.get("problem_id"),
        url=record.get("url"),
    )
    return row, ""


def write_problem(question: str, starter_code: str = "", *, called: bool = False) -> str:
    """The prompt a program follows; empty for an empty question, so that it is dropped."""
    if not question.strip():
        return ""
    way = "Use Call-Based format" if called else "Use Standard Input format"
    starter = f"{starter_code.rstrip()}\n" if starter_code.strip() else ""
    return f"QUESTION:\n{question.strip()}\n{starter}{way}\n\nANSWER:\n"


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value


def _lines(value: Any) -> str:
    """A text, which some problems have as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """JSON turns a dictionary's keys into text; those that are numbers become numbers again."""
    return [
        {int(k) if k.lstrip("-").isdecimal() else k: v for k, v in each.items()}
        if isinstance(each, dict)
        else each
        for each in (value if isinstance(value, list) else [value])
    ]


def mbpp_row(record: Mapping[str, Any]) -> Parsed:
    text, asserts = record.get("text") or record.get("prompt"), record["test_list"]
    if not isinstance(text, str) or not all_text(record, "code"):
        return None, "the task or its code is not text"
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    try:
        tests = to_tests(asserts, setup.replace("\r\n", "\n"))
    except SyntaxError:
        return None, "a test is not Python"
    if not asserts or tests is None:
        return None, "there is no test that calls a function"
    shown = "\n".join([text.strip(), "Your code should pass these tests:", *asserts])
    prompt = f"QUESTION:\n{shown}\n\nANSWER:\n" if text.strip() else ""
    code = record["code"].replace("\r\n", "\n").strip()
    return code_row(prompt, tests, solutions=[code], task_id=record.get("task_id")), ""


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


def humaneval_row(record: Mapping[str, Any]) -> Parsed:
    if not all_text(record, "prompt", "canonical_solution", "test", "entry_point"):
        return None, "`prompt`, `canonical_solution`, `test` or `entry_point` is not text"
    prompt, name = record["prompt"], record["entry_point"]
    tests = {"kind": "check", "name": name, "prompt": prompt, "check": record["test"]}
    row = code_row(
        prompt,
        tests,
        solutions=[record["canonical_solution"].rstrip()],
        starter_code=prompt,
        task_id=record.get("task_id"),
    )
    return row, ""


TOY_SIGNS = {"+": "add", "-": "subtract", "*": "multiply by"}
TOY_REQUESTS = (
    "Read a number and {what} {n}.",
    "Please read a number, then {what} {n}.",
    "Take the number, {what} {n}, and print.",
    "Input: a number. Output: {what} {n}.",
)
TOY_INPUTS = (2, 7)


def toy_rows(num_rows: int = 2000, seed: int = 0) -> list[Row]:
    """Some tasks with a solution each, right or wrong; the same for the same seed."""
    draw = random.Random(f"toy code {seed}")
    return [_toy_row(draw) for _ in range(num_rows)]


def _toy_row(draw: random.Random) -> Row:
    sign, n = draw.choice(list(TOY_SIGNS)), draw.randint(1, 9)
    prompt = draw.choice(TOY_REQUESTS).format(what=TOY_SIGNS[sign], n=n) + "\n"
    outputs = [str({"+": x + n, "-": x - n, "*": x * n}[sign]) for x in TOY_INPUTS]
    tests = {"kind": "stdin", "inputs": [f"{x}\n" for x in TOY_INPUTS], "outputs": outputs}
    program = _toy_solution(draw, sign, n)
    return code_row(prompt, tests, solutions=[program], difficulty=TOY_SIGNS[sign])


def _toy_solution(draw: random.Random, sign: str, n: int) -> str:
    chance = draw.random()
    if chance < 0.4:
        return f"print(int(input()){sign}{n})"
    if chance < 0.55:
        return f"print(int(input()){sign}{draw.randint(1, 9)})"
    if chance < 0.7:
        return f"print(int(input()){draw.choice(list(TOY_SIGNS))}{n})"
    if chance < 0.85:
        return f"print(input(){sign}{n}.0)"
    return f"print(int(input(){sign}{n})"


APPS = Source(
    "apps",
    to_row=apps_row,
    forms=("question input_output difficulty",),
    hub_name="codeparrot/apps",
    hub_config="all",
)
MBPP = Source(
    "mbpp",
    to_row=mbpp_row,
    forms=("code test_list text", "code test_list prompt"),
    hub_name="google-research-datasets/mbpp",
    hub_config="full",
)
HUMANEVAL = Source(
    "humaneval",
    to_row=humaneval_row,
    forms=("prompt canonical_solution test entry_point",),
    hub_name="openai/openai_humaneval",
)
TOY_CODE = Source("toy-code", generate=toy_rows)
