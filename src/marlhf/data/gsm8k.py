"""GSM8K: word problems of grade school, each with a worked solution and a number as the answer.

Read as published (question, answer). The response to imitate is the solution without the marks for
a calculator (`<<48/2=24>>`), which ends as the prompt asks for:

    Natalia sold clips to 48 of her friends in April, and then she sold half as many ...
    Think step by step. End with the answer as a number after ####.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from marlhf.data.rows import Parsed, Row, Source, all_text

MARK = "####"
REQUEST = f"Think step by step. End with the answer as a number after {MARK}."


def to_row(record: Mapping[str, Any]) -> Parsed:
    question, answer = record["question"], record["answer"]
    if not all_text(record, "question", "answer"):
        return None, "`question` or `answer` is not text"
    solution, _, number = answer.rpartition(MARK)
    solution = re.sub(r"<<[^<>\n]*>>", "", solution).strip()
    chosen = f"{solution}\n{MARK} {number.strip()}"
    return Row(write_prompt(question), chosen=chosen, columns={"answer": number.strip()}), ""


def write_prompt(question: str) -> str:
    return f"{question.strip()}\n{REQUEST}\n" if question.strip() else ""


GSM8K = Source(
    "gsm8k",
    to_row=to_row,
    forms=("question answer",),
    fits=lambda record: MARK in str(record["answer"]),
    hub_name="openai/gsm8k",
    hub_config="main",
)
