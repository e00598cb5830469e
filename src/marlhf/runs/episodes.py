"""Conversations as run folders keep them: an `EpisodeRecord` as a dictionary. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]


def opening_length(messages: Sequence[Message], num_turns: int) -> int:
    """How many messages the model saw before its first turn.

    >>> opening_length([{"role": "user"}, {"role": "assistant"}, {"role": "user"}], num_turns=1)
    1
    """
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return said[-num_turns] if num_turns else len(messages)


def as_text(messages: Sequence[Message]) -> str:
    """Messages as one text, each after its role.

    >>> as_text([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    'user: Hi\\n\\nassistant: Hello'
    """
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


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
