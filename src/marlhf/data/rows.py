"""A row: one prompt, and what people thought of the answers to it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from marlhf.errors import MarlhfError

Message = dict[str, str]
"""One turn of a chat: `{"role": "user", "content": "..."}`."""

Text = str | list[Message]
"""A prompt or a response: plain text, or the messages of a chat."""


class DataError(MarlhfError, ValueError):
    """Something about the data that the user has to put right.

    >>> raise DataError("mine.jsonl has no column `prompt`.")
    Traceback (most recent call last):
    marlhf.data.rows.DataError: mine.jsonl has no column `prompt`.
    """


@dataclass(frozen=True)
class Row:
    """One training example, whatever the file it came from looked like.

    >>> Row("2 + 2 =", chosen=" 4", columns={"level": 1}).rejected is None
    True
    """

    prompt: Text
    chosen: Text | None = None
    """The preferred response, without the prompt."""
    rejected: Text | None = None
    """The other response, without the prompt."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Everything else the file had, for reward functions that need a reference."""


Parsed = tuple[Row | None, str]
"""What a source makes of one record: a row and "" when all is well, None and the
reason when there is no row in it, a row and a remark when it had to be mended."""


def prompt_key(row: Row) -> str:
    """The identity of a prompt, the same however its white space was written.

    Splits go by this, so that no prompt is trained on in one stage and
    judged, or trained on again, in another.

    >>> prompt_key(Row("Why  not? "))
    'Why not?'
    """
    if isinstance(row.prompt, str):
        return collapse_spaces(row.prompt)
    turns = [[message["role"], collapse_spaces(message["content"])] for message in row.prompt]
    return json.dumps(turns, ensure_ascii=False)


def collapse_spaces(text: str) -> str:
    return " ".join(text.split())


def after_colon(response: str) -> str:
    """A response ready to stand behind a prompt such as `TL;DR:` or `Assistant:`.

    One space in front, so that prompt + response reads naturally and the
    first word is the token a model would produce there.
    """
    text = response.strip()
    return f" {text}" if text else ""


def prompt_fault(row: Row) -> str | None:
    """Why nothing can be done with this prompt, or None."""
    if is_blank(row.prompt):
        return "the prompt is empty"
    if isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant":
        return "the prompt ends with an assistant's turn, so there is nothing to answer"
    return f"the prompt {HALF_PAIR}" if _has_half_pair(row.prompt) else None


def response_fault(row: Row, needs: Collection[str]) -> str | None:
    """Why this row cannot serve a stage that needs `chosen`, `rejected`, or both."""
    for name, response in (("chosen", row.chosen), ("rejected", row.rejected)):
        if name not in needs:
            continue
        if response is None:
            return f"`{name}` is missing"
        if is_blank(response):
            return f"`{name}` is empty"
        if _has_half_pair(response):
            return f"`{name}` {HALF_PAIR}"
    if {"chosen", "rejected"} <= set(needs) and _plain(row.chosen) == _plain(row.rejected):
        return "`chosen` equals `rejected`, so there is no preference to learn"
    return None


HALF_PAIR = r"holds half a character (a lone surrogate such as \ud83d), which no tokenizer takes"


def _has_half_pair(text: Text) -> bool:
    return re.search("[\ud800-\udfff]", _plain(text)) is not None


def is_blank(text: Text | None) -> bool:
    return not _plain(text)


def _plain(text: Text | None) -> str:
    if text is None:
        return ""
    if isinstance(text, str):
        return text.strip()
    return "\n".join(message["content"] for message in text).strip()
