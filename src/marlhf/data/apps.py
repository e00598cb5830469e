"""APPS: programming problems from contests and exercises, with tests.

Read as on the hub (`codeparrot/apps`, where tests and solutions are JSON within text) and in the
original layout, one folder per problem:

    train/0001/question.txt  input_output.json  solutions.json  metadata.json  starter_code.py

The prompt is that of the authors' own code:

    QUESTION:
    <question>
    <starter code>
    Use Standard Input format        (or: Use Call-Based format)

    ANSWER:
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marlhf.data.code import code_row
from marlhf.data.files import Records
from marlhf.data.rows import DataError, Parsed, Source

PROBLEM = "*/*/question.txt"


def is_folder(path: Path) -> bool:
    """Whether a folder is in the original layout: of problems, or of `train` and `test`."""
    return path.is_dir() and any(next(path.glob(p), None) for p in ("*/question.txt", PROBLEM))


def read_folder(path: Path, split: str = "train") -> Records:
    """Every problem of a folder, in order; of its part `split` where it has parts."""
    root = path if next(path.glob("*/question.txt"), None) else path / split
    questions = sorted(root.glob("*/question.txt"))
    if not questions:
        parts = ", ".join(sorted({each.parents[1].name for each in path.glob(PROBLEM)}))
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


def to_row(record: Mapping[str, Any]) -> Parsed:
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
        write_prompt(question, starter, called=bool(called)),
        tests,
        solutions=[solution.strip() for solution in solutions or [] if solution.strip()],
        difficulty=record.get("difficulty") or "",
        starter_code=starter,
        problem_id=record.get("problem_id"),
        url=record.get("url"),
    )
    return row, ""


def write_prompt(question: str, starter_code: str = "", *, called: bool = False) -> str:
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


APPS = Source(
    "apps",
    to_row=to_row,
    forms=("question input_output difficulty",),
    hub_name="codeparrot/apps",
    hub_config="all",
)
