"""Sampled responses in a run folder: their files and settings, and conversations. No torch.

Every line says its settings under `sampling`. The file's name repeats them for people. A
conversation is an `EpisodeRecord` as a dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from marlhf.runs.atomic import Line, read_keyed


@dataclass(frozen=True)
class SamplingSettings:
    """All that two evaluations must share to be compared."""

    temperature: float
    max_new_tokens: int
    seed: int
    data: str = ""
    """Which prompts, where they are not the run's own held-out ones."""
    rewards: str = ""
    """What scored the samples, where the best of them was kept."""
    environment: str = ""
    """What prompts were played in as conversations."""

    @property
    def file_name(self) -> str:
        words = [f"t{self.temperature:g}", f"m{self.max_new_tokens}", f"s{self.seed}"]
        more = (self.data, self.environment, self.rewards)
        return "-".join([*words, *filter(None, more)]) + ".jsonl"

    @property
    def label(self) -> str:
        return f"temperature {self.temperature:g}, {self.label_without_temperature}"

    @property
    def label_without_temperature(self) -> str:
        """What is the same for all temperatures of a sweep.

        >>> SamplingSettings(0.8, 64, seed=1, data="test").label_without_temperature
        '64 tokens, seed 1, test'
        """
        seed = f"seed {self.seed}" if self.seed else ""
        length = f"{self.max_new_tokens} tokens" + (" per turn" if self.environment else "")
        words = (length, seed, self.data, self.environment, self.rewards)
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class EvaluationFile:
    """The last line of each prompt; no settings where the lines have none."""

    name: str
    settings: SamplingSettings | None
    lines: list[Line]

    @property
    def label(self) -> str:
        return self.name if self.settings is None else self.settings.label


def read_evaluations(
    folder: Path, is_whole: Callable[[Line], bool] = lambda line: True
) -> list[EvaluationFile]:
    """Every file in a folder of a run, such as `evaluation/`, that has lines which are whole."""
    files: list[EvaluationFile] = []
    for file in sorted(folder.glob("*.jsonl")):
        if lines := list(filter(is_whole, read_keyed(file).values())):
            files.append(EvaluationFile(file.stem, _settings_of(lines[-1]), lines))
    return files


def _settings_of(line: Line) -> SamplingSettings | None:
    written = line.get("sampling")
    if not isinstance(written, dict):
        return None
    names = {field.name for field in fields(SamplingSettings)}
    try:
        return SamplingSettings(**{k: v for k, v in written.items() if k in names})
    except TypeError:  # edited by hand
        return None


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
