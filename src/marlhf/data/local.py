"""The user's own files: `prompt`, `chosen`, `rejected`, as text or as chat messages.

TRL's forms are read too: `completion` for `chosen`, `messages` (the last
assistant's turn is the response), and whole dialogues in `chosen` and
`rejected` whose shared beginning is the prompt. Text is used as written: a
prompt and a response are joined without anything in between.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from marlhf.data.rows import DataError, Message, Parsed, Row, Text, all_text, without

NAMES = ("prompt", "chosen", "rejected", "messages", "completion")
STEPS = ("completions", "labels")
"""Columns that process reward models learn from."""


def to_row(record: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Parsed:
    """One row from one record; `columns` maps our names to those in the file."""
    fields = rename(record, columns or {})
    rest = without(fields, *NAMES)
    prompt, chosen, rejected = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    chosen = fields.get("completion") if chosen is None else chosen
    if prompt is None and fields.get("messages") is not None:
        return _from_messages(fields["messages"], rest)
    if _is_dialogue(chosen) and not isinstance(prompt, list):
        return _from_dialogues(chosen, rejected, rest)
    if prompt is None:
        return None, "`prompt` is missing"
    prompt = as_text(prompt)
    if prompt is None:
        return None, "`prompt` is neither text nor messages with a role and a content"
    responses = {"chosen": chosen, "rejected": rejected}
    for name, value in responses.items():
        responses[name], fault = _as_response(value, prompt)
        if fault:
            return None, f"`{name}` {fault}"
    return Row(prompt, responses["chosen"], responses["rejected"], rest), ""


def rename(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The record under our names."""
    renamed = {ours: record.get(theirs) for ours, theirs in columns.items()}
    return without(record, *columns.values()) | renamed


def as_text(value: Any) -> Text | None:
    """Text or messages, or None where the value is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        return None
    messages = [_as_message(message) for message in value]
    return None if None in messages else [message for message in messages if message is not None]


def _as_message(value: Any) -> Message | None:
    if not isinstance(value, Mapping):
        return None
    # parquet gives each message the keys of all others, with None as their value
    message = {key: each for key, each in value.items() if isinstance(each, str)}
    content = value.get("content")
    if isinstance(content, list):  # as multimodal chats write a text
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        if all(part.get("type") == "text" and all_text(part, "text") for part in parts):
            message["content"] = "".join(part["text"] for part in parts)
    return message if {"role", "content"} <= message.keys() else None


def _as_response(value: Any, prompt: Text) -> tuple[Text | None, str]:
    """A response in the form of its prompt, or None and what is wrong with it."""
    response = as_text(value)
    if value is None or response is None:
        fault = "is neither text nor messages with a role and a content"
        return None, "" if value is None else fault
    if isinstance(response, str):
        message = {"role": "assistant", "content": response}
        return (response if isinstance(prompt, str) else [message]), ""
    if isinstance(prompt, list) and response[: len(prompt)] == prompt:
        response = response[len(prompt) :]
    if len(response) != 1 or response[0]["role"] != "assistant":
        return None, "is not one assistant's turn"
    return (response[0]["content"] if isinstance(prompt, str) else response), ""


def _is_dialogue(value: Any) -> bool:
    """Whether messages begin with something other than the assistant's answer."""
    messages = as_text(value)
    return isinstance(messages, list) and messages[0]["role"] != "assistant"


def _from_messages(value: Any, rest: dict[str, Any]) -> Parsed:
    messages = as_text(value)
    if messages is None or isinstance(messages, str):
        return None, "`messages` is not a list of messages with a role and a content"
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return Row(messages, columns=rest), ""
    last = turns[-1]
    if last == 0:
        return None, "`messages` begins with the only assistant's turn, so there is no prompt"
    return Row(messages[:last], chosen=[messages[last]], columns=rest), ""


def _from_dialogues(chosen: Any, rejected: Any, rest: dict[str, Any]) -> Parsed:
    """TRL's implicit prompt: the messages with which both dialogues begin."""
    first, second = as_text(chosen), as_text(rejected)
    if rejected is None:
        second = first
    if not isinstance(first, list) or not isinstance(second, list):
        return None, "`rejected` is not messages, though `chosen` is"
    shared = 0
    for ours, theirs in zip(first[:-1], second[:-1], strict=False):
        if ours != theirs:
            break
        shared += 1
    if not shared:
        return None, "`chosen` and `rejected` share no first message, so there is no prompt"
    if len(first) != shared + 1 or len(second) != shared + 1:
        return None, "`chosen` and `rejected` differ before their last message"
    if first[-1]["role"] != "assistant" or second[-1]["role"] != "assistant":
        return None, "`chosen` or `rejected` does not end with an assistant's turn"
    last = None if rejected is None else [second[-1]]
    return Row(first[:shared], [first[-1]], last, rest), ""


def check_columns(
    record: Mapping[str, Any], position: str, columns: Mapping[str, str], needs: Collection[str]
) -> None:
    """Refuse a file whose first record lacks what the stage needs, with the nearest name."""
    file = position.rpartition(":")[0]
    faults: list[str] = []
    for ours, theirs in columns.items():
        if ours not in NAMES + STEPS:
            faults.append(
                f"`columns` maps `{ours}`, which is not a name we use. "
                f"Map one of {_listed(NAMES)}.{_did_you_mean(ours, NAMES)}"
            )
        elif theirs not in record:
            faults.append(
                f"{file} has no column `{theirs}`, which `columns` names for `{ours}`. "
                f"It has {_listed(record)}.{_did_you_mean(theirs, record)}"
            )
    fields = rename(record, columns)
    dialogue = any(isinstance(fields.get(name), list) for name in ("chosen", "rejected"))
    ways = {
        "prompt": dialogue or "prompt" in fields or "messages" in fields,
        "chosen": bool({"chosen", "completion", "messages"} & fields.keys()),
        **{name: name in fields for name in ("rejected", *STEPS)},
    }
    missing = [name for name in sorted(set(needs) & ways.keys()) if not ways[name]]
    if missing:
        plural = "s" if len(missing) > 1 else ""
        hints = "".join(_did_you_mean(name, record) for name in missing)
        mapping = ", ".join(f"{name}: its name" for name in missing)
        faults.append(
            f"{file} has no column{plural} {_listed(missing)}. It has {_listed(record)}.{hints} "
            f"Rename the column{plural} in the file, or name what is there with "
            f"`columns: {{{mapping}}}`."
        )
    if faults:
        raise DataError("\n".join(faults))


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _did_you_mean(name: str, names: Collection[str]) -> str:
    lowered = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1)
    return f" Did you mean `{lowered[near[0]]}`?" if near else ""
