"""Reads two files of responses to the same prompts and matches them by prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlhf.errors import MarlhfError
from marlhf.runs.atomic import read_jsonl
from marlhf.runs.evaluations import as_text, opening_length, read_episode
from marlhf.runs.layout import EVALUATION, SAMPLES, is_run
from marlhf.runs.read import number

if TYPE_CHECKING:  # the report reads verdicts without torch
    from marlhf.data.rows import Message, Text


class JudgeError(MarlhfError, ValueError):
    """An error in judging or annotating that the user has to fix."""


@dataclass(frozen=True)
class Response:
    """A response of one model, with its scores."""

    text: str
    scores: Mapping[str, float] = field(default_factory=dict)
    ended: bool = True


@dataclass(frozen=True)
class Pair:
    """A prompt with the responses of both sides."""

    prompt: Text
    a: Response
    b: Response
    reference: str = ""
    """Text that the answer should be based on, if the data has any."""
    played: bool = False
    """Whether the responses are conversations with an environment, as texts."""


@dataclass(frozen=True)
class Pairs:
    """The pairs to judge; `only_a` and `only_b` count prompts that only one side answered."""

    name_a: str
    name_b: str
    pairs: list[Pair]
    only_a: int = 0
    only_b: int = 0


def read_pairs(a: Path | str, b: Path | str, limit: int | None = None) -> Pairs:
    """Match the prompts that A and B both answered, in A's order; of a repeated prompt the first.

    Each is a JSON-lines file with `prompt` and `response`, or a run folder: then the file in its
    `evaluation/`, else the last step of its `samples.jsonl`.
    """
    files = find_responses(Path(a)), find_responses(Path(b))
    if files[0].resolve() == files[1].resolve():
        raise JudgeError(f"{files[0]} would be compared with itself. Give two different files.")
    rows_a, rows_b = map(_answers, files)
    shared = [key for key in rows_a if key in rows_b]
    if not shared:
        raise JudgeError(
            f"{files[0]} and {files[1]} share no prompt. Evaluate both models on the same data, "
            "with the same seed."
        )
    pairs = [_pair(rows_a[key], rows_b[key]) for key in shared[:limit]]
    rest = len(rows_a) - len(shared), len(rows_b) - len(shared)
    name_a, name_b = short_names([a, b])
    return Pairs(name_a, name_b, pairs, *rest)


def short_names(paths: Sequence[Path | str]) -> list[str]:
    """The shortest endings of some paths that are all different."""
    ends = [(p.resolve().with_suffix("") if p.is_file() else p.resolve()) for p in map(Path, paths)]
    for count in range(1, max(len(end.parts) for end in ends) + 1):
        names = ["/".join(end.parts[-count:]) for end in ends]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def prompt_text(prompt: Text) -> str:
    """A prompt as one text; in a chat each turn begins with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def find_responses(path: Path) -> Path:
    """The file of responses that a path refers to."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise JudgeError(f"There is no file or folder {path}. Give a run or a JSON-lines file.")
    inner = path / EVALUATION if (path / EVALUATION).is_dir() else path
    files = sorted(f for f in inner.glob("*.jsonl") if inner != path or not is_run(path))
    files = [file for file in files if _has_responses(file)]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(str(file) for file in files)
        raise JudgeError(f"{path} has several files of responses: {names}. Name one of them.")
    if (path / SAMPLES).is_file():
        return path / SAMPLES
    raise JudgeError(
        f"{path} has no responses: neither {EVALUATION}/*.jsonl nor {SAMPLES}. "
        "Run `marlhf evaluate` on it first."
    )


def home(path: Path) -> Path:
    """The run folder that a path belongs to, else the folder it lies in."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name == EVALUATION and is_run(folder.parent) else folder


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a kill has torn is left out."""
    if not file.is_file():
        raise JudgeError(f"Cannot read {file}: there is no such file.")
    try:
        lines = read_jsonl(file)
    except OSError as error:
        raise JudgeError(f"Cannot read {file}: {error.strerror}.") from error
    for count, fault in lines.broken.items():
        raise JudgeError(f"Line {count} of {file} is not JSON ({fault}). Correct it.")
    return lines.rows


def _has_responses(file: Path) -> bool:
    return any({"prompt", "response"} <= row.keys() for row in read_jsonl(file).rows[:1])


def _answers(file: Path) -> dict[str, dict[str, Any]]:
    """The first answer to each prompt; where rows have steps, only those of the last.

    What `marlhf evaluate` wrote has keys and settings: there the last line of each key counts,
    under the setting of the last line.
    """
    rows = [row for row in read_lines(file) if "prompt" in row and "response" in row]
    if rows and {"key", "setting"} <= rows[-1].keys():
        kept = [row for row in rows if row.get("setting") == rows[-1]["setting"]]
        rows = list({row.get("key"): row for row in kept}.values())
    last = max((number(row["step"]) for row in rows if "step" in row), default=None)
    by_prompt: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "step" in row and number(row["step"]) != last:
            continue
        if _readable(row):
            by_prompt.setdefault(json.dumps(row["prompt"], sort_keys=True), row)
    if not by_prompt:
        raise JudgeError(
            f"{file} has no line with a `prompt` and a `response` that are text. Write one JSON "
            "object a line with both."
        )
    return by_prompt


def _readable(row: Mapping[str, Any]) -> bool:
    prompt = row["prompt"]
    turns = isinstance(prompt, list) and all(
        isinstance(t, dict) and isinstance(t.get("content"), str) and "role" in t for t in prompt
    )
    return isinstance(row["response"], str) and (isinstance(prompt, str) or turns)


def _pair(row_a: Mapping[str, Any], row_b: Mapping[str, Any]) -> Pair:
    row_a, row_b, played = _as_conversations(row_a, row_b)
    prompt = row_a["prompt"]
    reference = row_a.get("reference") or row_b.get("reference")
    if isinstance(prompt, list):
        turns: list[Message] = [
            {"role": str(turn["role"]), "content": _clean(turn["content"])} for turn in prompt
        ]
        prompt = turns
    else:
        prompt = _clean(prompt)
    reference = _clean(reference) if isinstance(reference, str) else ""
    return Pair(prompt, _response(row_a), _response(row_b), reference, played)


def _as_conversations(
    row_a: Mapping[str, Any], row_b: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
    """The rows with whole conversations as their responses, where they have any.

    What both models saw first is the prompt. Where they began in different states, each
    conversation tells its own.
    """
    episodes = [episode for row in (row_a, row_b) if (episode := read_episode(row))]
    if not episodes:
        return row_a, row_b, False
    lengths = [opening_length(e["messages"], len(e["turns"])) for e in episodes]
    openings = [e["messages"][:length] for e, length in zip(episodes, lengths)]
    shared = len(openings) == 2 and openings[0] == openings[1]
    rows: list[Mapping[str, Any]] = []
    for row in (row_a, row_b):
        changed: dict[str, Any] = {"prompt": openings[0]} if shared else {}
        if episode := read_episode(row):
            skipped = lengths[0] if shared else 0
            changed["response"] = as_text(episode["messages"][skipped:])
        rows.append({**row, **changed})
    return rows[0], rows[1], True


def _response(row: Mapping[str, Any]) -> Response:
    scores = row.get("scores")
    named = {str(k): number(v) for k, v in scores.items()} if isinstance(scores, dict) else {}
    if "score" in row:
        named.setdefault("score", number(row["score"]))
    return Response(_clean(row["response"]), named, row.get("ended") is not False)


def _clean(text: str) -> str:
    """Without half characters, which no server would take."""
    return text.encode("utf-8", "replace").decode("utf-8")
