"""WebGPT: questions with two answers from the web, scored by people.

Read as on the hub (`openai/webgpt_comparisons`: question, answer_0, answer_1,
score_0, score_1, quotes) and in the form of two whole texts with two scores
(text, score). Ties say nothing about preference and are dropped. The prompt:

    Human: Why do our voices sound different in a recording?

    Assistant:

The hub's quotes, the text an answer cites, are kept in `columns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlhf.data.rows import Parsed, Row, after_colon

HUB_NAME = "openai/webgpt_comparisons"
HUMAN, ASSISTANT = "## Human:", "## Assistant:"

TIE = "a tie: both answers have the same score"


def recognises(record: Mapping[str, Any]) -> bool:
    if {"question", "answer_0", "answer_1", "score_0", "score_1"} <= record.keys():
        return True
    text = record.get("text")
    return (
        isinstance(text, list)
        and isinstance(record.get("score"), list)
        and all(isinstance(each, str) and each.startswith(HUMAN) for each in text)
    )


def to_row(record: Mapping[str, Any]) -> Parsed:
    return from_texts(record) if "text" in record else from_answers(record)


def from_answers(record: Mapping[str, Any]) -> Parsed:
    """The hub's form. Scores lie in [-1, 1]; the higher wins."""
    question, scores = record["question"], (record["score_0"], record["score_1"])
    text = question.get("full_text") if isinstance(question, Mapping) else question
    answers = record["answer_0"], record["answer_1"]
    used = ("question", "answer_0", "answer_1", "quotes_0", "quotes_1", "score_0", "score_1")
    rest = {k: v for k, v in record.items() if k not in used}
    rest["question"] = text
    quotes = record.get("quotes_0"), record.get("quotes_1")
    return _preference(text, answers, scores, rest, quotes)


def from_texts(record: Mapping[str, Any]) -> Parsed:
    """Question and answer in one text each, under `## Human:` and `## Assistant:`."""
    texts, scores = record["text"], record["score"]
    if len(texts) != 2 or len(scores) != 2:
        return None, "not two texts with two scores"
    parts = [text.partition(ASSISTANT) for text in texts]
    questions = [part[0].removeprefix(HUMAN).strip() for part in parts]
    if questions[0] != questions[1] or not all(part[1] for part in parts):
        return None, "the two texts do not answer one question"
    rest = {k: v for k, v in record.items() if k not in ("text", "score")}
    rest["question"] = questions[0]
    return _preference(questions[0], (parts[0][2], parts[1][2]), scores, rest)


def _preference(
    question: Any,
    answers: tuple[Any, Any],
    scores: Sequence[Any],
    columns: dict[str, Any],
    quotes: tuple[Any, Any] | None = None,
) -> Parsed:
    if not all(isinstance(text, str) for text in (question, *answers)):
        return None, "the question or an answer is not text"
    if not all(isinstance(score, int | float) for score in scores):
        return None, "a score is not a number"
    if scores[0] == scores[1]:
        return None, TIE
    won = 0 if scores[0] > scores[1] else 1
    if quotes is not None:
        columns |= {"chosen_quotes": quotes[won], "rejected_quotes": quotes[1 - won]}
    columns |= {"chosen_score": scores[won], "rejected_score": scores[1 - won]}
    row = Row(
        prompt=write_prompt(question),
        chosen=after_colon(answers[won]),
        rejected=after_colon(answers[1 - won]),
        columns=columns,
    )
    return row, ""


def write_prompt(question: str) -> str:
    """The prompt an answer follows; empty for an empty question, so that it is dropped."""
    return f"Human: {question.strip()}\n\nAssistant:" if question.strip() else ""
