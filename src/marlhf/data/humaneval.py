"""HumanEval: functions to complete from their header and docstring.

Read as published (prompt, canonical_solution, test, entry_point). The prompt is the beginning of
the program, and the response continues it; it may also write the whole function again.
It has 164 problems, for evaluation; on the hub they are the split `test`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlhf.data.code import code_row
from marlhf.data.rows import Parsed

HUB_NAME = "openai/openai_humaneval"
FIELDS = ("prompt", "canonical_solution", "test", "entry_point")


def recognises(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(FIELDS)


def to_row(record: Mapping[str, Any]) -> Parsed:
    if not all(isinstance(record[name], str) for name in FIELDS):
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
