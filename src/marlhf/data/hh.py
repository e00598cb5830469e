"""HH-RLHF: dialogues with an assistant, and which of two last replies was better.

Read as Anthropic published it (`chosen` and `rejected` are whole dialogues)
and as `Dahoas/full-hh-rlhf` on the hub (`prompt` apart). The prompt keeps the
published turns, without the blank lines before the first:

    Human: What is DVT?

    Assistant:
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlhf.data.rows import Parsed, Row, after_colon

HUB_NAME = "Dahoas/full-hh-rlhf"
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

JOINED = "several assistant's turns in a row, joined into one reply"
DIVERGED = "the two dialogues differ before the last turn, so no two replies can be compared"


def recognises(record: Mapping[str, Any]) -> bool:
    opening = record.get("prompt", record.get("chosen"))
    return (
        isinstance(opening, str)
        and opening.lstrip().startswith("Human:")
        and ASSISTANT in opening
        and {"chosen", "rejected"} <= record.keys()
    )


def to_row(record: Mapping[str, Any]) -> Parsed:
    """A row from either form."""
    names = [name for name in ("prompt", "chosen", "rejected") if name in record]
    if any(not isinstance(record[name], str) for name in names) or len(names) < 2:
        return None, "`prompt`, `chosen` or `rejected` is not text"
    rest = {k: v for k, v in record.items() if k not in names}
    if "prompt" in record:
        return _row(record["prompt"], record["chosen"], record["rejected"], rest), ""
    return from_dialogues(record["chosen"], record["rejected"], rest)


def from_dialogues(chosen: str, rejected: str, columns: dict[str, Any]) -> Parsed:
    """Split two dialogues where the assistant first answers differently.

    About two in a thousand dialogues differ before their last turn. Where the
    assistant only spoke twice in a row, those turns are joined into one reply;
    where the person spoke again, the preference was not between two replies.
    """
    end = shared_prefix(chosen, rejected).rfind(ASSISTANT)
    if end < 0:
        return None, "the two dialogues share no assistant's turn"
    end += len(ASSISTANT)
    replies = chosen[end:], rejected[end:]
    remark = JOINED if any(ASSISTANT in reply for reply in replies) else ""
    first, second = (join_turns(reply) for reply in replies)
    if HUMAN in first or HUMAN in second:
        return None, DIVERGED
    return _row(chosen[:end], first, second, columns), remark


def join_turns(reply: str) -> str:
    return "\n\n".join(turn.strip() for turn in reply.split(ASSISTANT))


def shared_prefix(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _row(prompt: str, chosen: str, rejected: str, columns: dict[str, Any]) -> Row:
    return Row(prompt.strip(), after_colon(chosen), after_colon(rejected), columns)
