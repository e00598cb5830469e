"""Conversations as run folders keep them: an `EpisodeRecord` as a dictionary. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""As in marlhf.data.rows, which needs torch; a test keeps them equal."""


def opening_length(messages: Sequence[Message], num_turns: int) -> int:
    """How many messages the model saw before its first turn.

    >>> opening_length([{"role": "user"}, {"role": "assistant"}, {"role": "user"}], num_turns=1)
    1
    """
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return said[-num_turns] if num_turns else len(messages)


def as_text(messages: Sequence[Message]) -> str:
    """Messages as one text, each after its role; only roles begin at the margin.

    >>> as_text([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A\\n\\nB"}])
    'user: Hi\\n\\nassistant: A\\n  \\n  B'
    """
    indented = (message["content"].replace("\n", "\n  ") for message in messages)
    return "\n\n".join(f"{m['role']}: {content}" for m, content in zip(messages, indented))


def split_turns(text: str) -> list[dict[str, str]]:
    """The messages of a text made by `as_text`; none where it was not.

    >>> split_turns("assistant: A\\n  B\\n\\nuser: go on")
    [{'role': 'assistant', 'content': 'A\\nB'}, {'role': 'user', 'content': 'go on'}]
    """
    parts = [re.fullmatch(r"(\w+): (.*)", part, re.S) for part in text.split("\n\n")]
    messages = [
        {"role": part[1], "content": part[2].replace("\n  ", "\n")} for part in parts if part
    ]
    made = len(messages) == len(parts) and all(m["role"] in ROLES for m in messages)
    return messages if made and as_text(messages) == text else []


def read_episode(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """The episode of a line, if it has one with all that is shown of it."""
    episode = line.get("episode")
    if not isinstance(episode, dict):
        return None
    messages, turns = episode.get("messages"), episode.get("turns")
    if not isinstance(messages, list) or not isinstance(turns, list):
        return None
    readable = all(
        isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content"))
        for m in messages
    )
    placed = all(
        isinstance(t, dict) and all(isinstance(t.get(k), int) for k in ("start", "stop"))
        for t in turns
    )
    said = sum(m["role"] == "assistant" for m in messages) if readable else 0
    return episode if readable and placed and len(turns) <= said else None
