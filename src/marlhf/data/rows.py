"""A row: one prompt, and the preferred and the other response to it."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from marlhf.errors import MarlhfError

Message = dict[str, str]
"""One turn of a chat: `{"role": "user", "content": "..."}`."""

Text = str | list[Message]
"""A prompt or a response: plain text, or the messages of a chat."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class DataError(MarlhfError, ValueError):
    """Something about the data that the user has to fix.

    >>> raise DataError("mine.jsonl has no column `prompt`.")
    Traceback (most recent call last):
    marlhf.data.rows.DataError: mine.jsonl has no column `prompt`.
    """


@dataclass(frozen=True)
class Conversation:
    """What followed a prompt where the model spoke several times."""

    messages: list[dict[str, Any]]
    """The model's turns, with `tool_calls` where they made some, and what was said between them."""
    turn_ends: list[int]
    """Where each turn of the model ends, in tokens of the whole response."""
    environment: Any = None
    """What it was played with, where that is an object of this process."""


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
    position: str = field(default="", compare=False, repr=False)
    """Where it was read, such as `mine.jsonl:7`."""
    conversation: Conversation | None = field(default=None, compare=False, repr=False)
    """What a reward sees in place of a response's text, where there were several turns."""


Parsed = tuple[Row | None, str]
"""One record as a source reads it: a row and "", None and the reason why there is no row in it, or
a row and a remark on what had to be repaired."""


@dataclass(frozen=True)
class Source:
    """A published data set, or a task that makes its own rows without a file or a network."""

    name: str
    """As in `data.source`."""
    to_row: Callable[[Mapping[str, Any]], Parsed] = lambda record: (None, "")
    """A row from a record in one of the forms."""
    forms: tuple[str, ...] = ()
    """The columns that a record has, by which it is recognised; for each form their names."""
    fits: Callable[[Mapping[str, Any]], bool] = lambda record: True
    """Whether a record with these columns really is one, where the names alone do not say so."""
    hub_name: str = ""
    hub_config: str | None = None
    """Which configuration to read of a hub data set with several."""
    generate: Callable[..., list[Row]] | None = None
    """Makes the rows, from `num_rows` and `seed`."""
    true_score: Callable[[str, str], float] | None = None
    """How good a response to a prompt really is, for tasks that define it."""

    def recognise(self, record: Mapping[str, Any]) -> int:
        """How many columns say that a record is in one of the forms; 0 if it is not."""
        forms = [form.split() for form in self.forms]
        sizes = [len(form) for form in forms if record.keys() >= set(form)]
        return max(sizes) if sizes and self.fits(record) else 0


def all_text(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), str) for name in names)


def without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The columns but for these."""
    return {name: value for name, value in record.items() if name not in names}


def prompt_key(row: Row) -> str:
    """The identity of a prompt, which does not depend on its white space.

    Splits use it, so that no prompt is trained on in one stage and
    evaluated, or trained on again, in another.

    >>> prompt_key(Row("Why  not? "))
    'Why not?'
    """
    if isinstance(row.prompt, str):
        return collapse_spaces(row.prompt)
    turns = [[message["role"], collapse_spaces(message["content"])] for message in row.prompt]
    return json.dumps(turns, ensure_ascii=False)


def as_chat(row: Row) -> Row:
    """The row with a text prompt as a user's message, and its responses as an assistant's.

    >>> as_chat(Row("2 + 2 = ", chosen=" 4")).prompt
    [{'role': 'user', 'content': '2 + 2 ='}]
    """
    if not isinstance(row.prompt, str) or not row.prompt.strip():
        return row

    def turn(role: str, text: Text | None) -> Text | None:
        return [{"role": role, "content": text.strip()}] if isinstance(text, str) else text

    prompt: list[Message] = [{"role": "user", "content": row.prompt.strip()}]
    chosen, rejected = turn("assistant", row.chosen), turn("assistant", row.rejected)
    return replace(row, prompt=prompt, chosen=chosen, rejected=rejected)


@functools.lru_cache(maxsize=64)  # the rows of one prompt often follow each other
def collapse_spaces(text: str) -> str:
    return " ".join(text.split())


def after_colon(response: str) -> str:
    """A response as it follows a prompt such as `TL;DR:` or `Assistant:`.

    One space in front, so that prompt + response reads naturally and the
    first word is the token a model would produce there.
    """
    text = response.strip()
    return f" {text}" if text else ""


def prompt_fault(row: Row, *, opened: bool = False) -> str | None:
    """Why this prompt cannot be used, or None; `opened` by an environment it may be empty."""
    if is_blank(row.prompt) and not opened:
        return "the prompt is empty"
    if isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant":
        return "the prompt ends with an assistant's turn, so there is nothing to answer"
    if isinstance(row.prompt, list):
        for role in (message["role"] for message in row.prompt):
            if role not in ROLES:
                return f"a message has the role `{role}`, which is not one of {', '.join(ROLES)}"
    return f"the prompt {LONE_SURROGATE}" if _has_lone_surrogate(row.prompt) else None


def steps_fault(row: Row) -> str | None:
    """Why a stage that learns from labelled steps cannot use this row, or None."""
    steps, labels = (row.columns.get(name) for name in ("completions", "labels"))
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        return "`completions` is not a list of steps as text"
    if not steps or not all(step.strip() for step in steps):
        return "`completions` has an empty step" if steps else "`completions` is empty"
    if any(map(_has_lone_surrogate, steps)):
        return f"`completions` {LONE_SURROGATE}"
    if not isinstance(labels, list) or len(labels) != len(steps):
        count = len(labels) if isinstance(labels, list) else "no list of"
        return f"`completions` has {len(steps)} steps, but there are {count} labels"
    for label in labels:
        if not isinstance(label, (bool, int, float)) or not 0 <= label <= 1:
            return f"the label {label!r} is neither true nor false, nor a number from 0 to 1"
    return None


def response_fault(row: Row, needs: Collection[str]) -> str | None:
    """Why a stage cannot use this row, by the responses or steps that it needs; or None."""
    if "labels" in needs and (fault := steps_fault(row)):
        return fault
    for name, response in (("chosen", row.chosen), ("rejected", row.rejected)):
        if name not in needs:
            continue
        if response is None:
            return f"`{name}` is missing"
        if is_blank(response):
            return f"`{name}` is empty"
        if _has_lone_surrogate(response):
            return f"`{name}` {LONE_SURROGATE}"
    if {"chosen", "rejected"} <= set(needs) and _plain(row.chosen) == _plain(row.rejected):
        return "`chosen` equals `rejected`, so there is no preference to learn"
    return None


LONE_SURROGATE = r"holds a lone surrogate such as \ud83d, half a character that no tokenizer reads"


def _has_lone_surrogate(text: Text) -> bool:
    return re.search("[\ud800-\udfff]", _plain(text)) is not None


def is_blank(text: Text | None) -> bool:
    return not _plain(text)


def response_text(response: Text) -> str:
    """A response as text; of a chat, its last message.

    >>> response_text([{"role": "assistant", "content": "A robin."}])
    'A robin.'
    """
    return response if isinstance(response, str) else response[-1]["content"]


def _plain(text: Text | None) -> str:
    if text is None:
        return ""
    if isinstance(text, str):
        return text.strip()
    return "\n".join(message["content"] for message in text).strip()


@dataclass
class Counts:
    """How many rows were read, dropped and repaired, why, and the positions of the first few.

    Bad rows are normal in human data: they are counted and shown, and stop
    a run only when none is left.

    >>> counts = Counts(read=3)
    >>> counts.drop("the prompt is empty", "mine.jsonl:2")
    >>> counts.kept
    2
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def drop(self, reason: str, position: str) -> None:
        self._count(self.dropped, reason, position)

    def note(self, remark: str, position: str) -> None:
        self._count(self.noted, remark, position)

    def _count(self, counter: Counter[str], reason: str, position: str) -> None:
        counter[reason] += 1
        if counter[reason] <= 3:
            self.examples.setdefault(reason, []).append(position)

    def __str__(self) -> str:
        lines = [f"read {self.read:,} rows, kept {self.kept:,}"]
        for label, reasons in (("dropped", self.dropped), ("repaired", self.noted)):
            for reason, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
                more = ", ..." if number > len(self.examples[reason]) else ""
                where = ", ".join(self.examples[reason]) + more
                lines.append(f"  {label} {number:,}: {reason} ({where})")
        return "\n".join(lines)
