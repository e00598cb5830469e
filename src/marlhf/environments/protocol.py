"""What an environment is, and what an episode leaves behind, for rewards and reports.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from marlhf.data.rows import Conversation, Message, Row
from marlhf.errors import MarlhfError
from marlhf.runs.evaluations import opening_length


class ConversationError(MarlhfError, ValueError):
    """An environment, a tool or a chat template that cannot be used, with what to do about it.

    >>> raise ConversationError("`max_turns: 0` leaves nothing to play.")
    Traceback (most recent call last):
    marlhf.environments.protocol.ConversationError: `max_turns: 0` leaves nothing to play.
    """


def from_user(text: str) -> Message:
    """What the world says to a model, as templates know it."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Step:
    """The environment's answer to a turn of the model.

    >>> Step([{"role": "user", "content": "higher"}]).done
    False
    """

    messages: list[Message] = field(default_factory=list)
    """What the model reads before it speaks again. None at all is allowed: it just continues."""
    reward: float = 0.0
    """For this turn."""
    done: bool = False
    """Whether the episode is over. The messages are then only kept in its record."""
    state: str | None = None
    """A name for the state in which the next turn is taken; None for the last message's text."""
    success: bool | None = None
    """Whether the task is solved so far, where the environment knows."""


class Environment(Protocol):
    """One object per episode, built anew and reset from a seed.

    Five more members are used where a class has them:

    - `tools`: functions that the model may call; `step` then gets only replies without a call
    - `get_reward() -> float`: added to the last turn when the episode is over; None for no opinion
    - `timeout`: seconds for a call, in place of the run's; None where it limits itself
    - `close()`
    - `own_process = True`: each episode runs in a process of its own, which a timeout ends

    >>> class Echo:
    ...     def reset(self, row, seed):
    ...         return [{"role": "user", "content": "Say something."}]
    ...     def step(self, reply):
    ...         return Step([{"role": "user", "content": reply}], reward=len(reply))
    >>> environment: Environment = Echo()
    """

    def reset(self, row: Row, seed: int) -> list[Message]:
        """What the model sees first."""
        ...

    def step(self, reply: str) -> Step:
        """Answer the text of a turn."""
        ...


@dataclass(frozen=True)
class Turn:
    """A turn of the model.

    >>> Turn(0, 4, reward=1.0, state="1-32").stop
    4
    """

    start: int
    stop: int
    """Its tokens, counted in the response: the model's and the world's tokens after the prompt."""
    reward: float
    state: str
    """The state in which it was taken."""


@dataclass(frozen=True)
class EpisodeRecord:
    """What is known of an episode when it is over: plain data, for training and for people.

    >>> record = EpisodeRecord([{"role": "user", "content": "Hi"}], [Turn(0, 4, 1.0, "Hi")], "done")
    >>> EpisodeRecord.from_dict(record.to_dict()) == record
    True
    """

    messages: list[Message]
    """The whole conversation."""
    turns: list[Turn]
    reason: str
    """Why it ended: `done`, `max_turns`, `episode_tokens`, `timeout` or `error: ...`."""
    tool_calls: int = 0
    tool_errors: int = 0
    success: bool | None = None
    environment: Any = field(default=None, compare=False, repr=False)
    """The object that was played with, for reward functions to look at. It is not saved."""
    calls: list[list[dict[str, Any]]] = field(default_factory=list, compare=False, repr=False)
    """The tool calls that were read in each turn, for reward functions too. They are not saved."""

    def to_dict(self) -> dict[str, Any]:
        values = asdict(replace(self, environment=None, calls=[]))
        del values["environment"], values["calls"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EpisodeRecord:
        return cls(**{**values, "turns": [Turn(**turn) for turn in values["turns"]]})


def count_endings(records: Sequence[EpisodeRecord]) -> dict[str, int]:
    """How many episodes ended for each reason, errors by their text.

    >>> count_endings([EpisodeRecord([], [], "done"), EpisodeRecord([], [], "done")])
    {'done': 2}
    """
    return dict(Counter(record.reason for record in records))


def scored_row(row: Row, record: EpisodeRecord | None) -> Row:
    """The row as rewards see it: of a conversation its first messages, and what followed."""
    if record is None:
        return row
    first = opening(record)
    ends = [turn.stop for turn in record.turns]
    calls, messages = iter(record.calls), list[dict[str, Any]]()
    for message in record.messages[first:]:
        made = next(calls, []) if message["role"] == "assistant" else []
        messages.append({**message, "tool_calls": made} if made else dict(message))
    said = Conversation(messages, ends, record.environment)
    return replace(row, prompt=record.messages[:first], conversation=said)


def opening(record: EpisodeRecord) -> int:
    """How many messages the model saw before its first turn."""
    return opening_length(record.messages, len(record.turns))


def turn_rewards(
    records: Sequence[EpisodeRecord], like: Tensor, replayed: Sequence[int] | None = None
) -> Tensor:
    """What the environment gave for each turn, at the turn's last token: [B, T].

    So many first tokens of each response were `replayed` and are not in `like`, nor their rewards.
    """
    rewards = torch.zeros(like.shape)
    for row, record in enumerate(records):
        before = 0 if replayed is None else replayed[row]
        for turn in record.turns:
            if turn.stop > before:
                rewards[row, turn.stop - before - 1] += turn.reward
    return rewards.to(like.device)


def episode_metrics(records: Sequence[EpisodeRecord], prefix: str = "rl/") -> dict[str, float]:
    """Turns, success, tool calls and how episodes end, as means over episodes."""

    def mean(values: Sequence[Any]) -> float:
        return sum(values) / len(values)

    metrics = {
        "turns": mean([len(record.turns) for record in records]),
        "cut_episodes": mean([r.reason in ("max_turns", "episode_tokens") for r in records]),
        "failed_episodes": mean([r.reason.startswith(("error", "timeout")) for r in records]),
    }
    if any(record.tool_calls for record in records):
        metrics["tool_calls"] = mean([record.tool_calls for record in records])
        metrics["tool_errors"] = mean([record.tool_errors for record in records])
    if any(record.success is not None for record in records):
        metrics["success"] = mean([record.success is True for record in records])
    return {prefix + name: value for name, value in metrics.items()}
