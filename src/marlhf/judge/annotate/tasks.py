"""The pairs of all runs, their shuffled order, and which run is on the left.

All of it follows from a seed, so that a reload or restart shows the same. Annotators cannot derive
it: unless given, the seed is random and stays in the database.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml
from pydantic import TypeAdapter

from marlhf.judge.criteria import slug
from marlhf.judge.pairs import JudgeError, read_pairs, short_names

if TYPE_CHECKING:
    from marlhf.data.rows import Text


@dataclass(frozen=True)
class Guide:
    """The question and the criteria that one task shows to people."""

    question: str
    criteria: dict[str, str] = field(default_factory=dict)
    guidelines: str = ""
    """Text to read before the first pair, and at any time."""
    from_end: bool = False
    """Whether a long prompt is scrolled to its end, as for a conversation."""
    strength: bool = False
    """Whether people may also say how much better: slightly, clearly or much."""


def read_guide(file: Path) -> Guide:
    """A guide in YAML: one that comes along, or a user's own."""
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        known = [each.name for each in fields(Guide)]
        if not isinstance(raw, dict) or not raw.keys() <= set(known):
            raise ValueError(f"it must have the keys {', '.join(known)} and no others")
        return TypeAdapter(Guide).validate_python(raw)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise JudgeError(
            f"Cannot read {file}: {error}. Write a `question`, `criteria` (a name and a meaning "
            "each) and `guidelines`."
        ) from error


LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, where the page needs no token."""
TASKS = ("tldr", "hh", "webgpt")
GUIDES = {task: read_guide(Path(__file__).parent / "guides" / f"{task}.yaml") for task in TASKS}
"""For people; `marlhf judge` has the same criteria worded for models."""


def find_guide(
    task: str, question: str | None = None, criteria: Sequence[str] = (), *, strength: bool = False
) -> tuple[str, Guide]:
    """A guide with its name: of a task, of a YAML file of your own, or of a question.

    `criteria` go with a question, each as "Name: meaning". With `strength` people may also say how
    much better a response is.
    """
    if question is not None:
        named = [criterion.partition(":") for criterion in criteria]
        meanings = {name.strip(): meaning.strip() for name, _, meaning in named}
        name, guide = "own", Guide(question, meanings)
    elif criteria:
        raise JudgeError("Criteria of your own go with a question: give --question as well.")
    elif task in GUIDES:
        name, guide = task, GUIDES[task]
    elif (file := Path(task)).suffix in (".yaml", ".yml"):
        name, guide = slug(file.stem), read_guide(file)
    else:
        raise JudgeError(
            f"There is no task {task!r}. Choose one of {', '.join(GUIDES)}, or give a YAML file."
        )
    return name, replace(guide, strength=strength or guide.strength)


class RunPair(NamedTuple):
    """Two runs, by name."""

    a: str
    b: str


@dataclass(frozen=True)
class Item:
    """A prompt with the responses of two runs."""

    runs: RunPair
    prompt: Text
    reference: str
    response_a: str
    response_b: str

    @property
    def same(self) -> bool:
        """Equal texts are a tie for every judge and need no vote."""
        return self.response_a == self.response_b

    def name(self, seed: int) -> str:
        """Its id on the page. A keyed digest: it reveals nothing, and sorting by it shuffles."""
        content = [*self.runs, self.prompt, self.reference, self.response_a, self.response_b]
        return _digest(seed, content).hex()


def read_items(paths: Sequence[Path | str]) -> list[list[Item]]:
    """The pairs of every two runs, one list per two runs, in the order of the first file."""
    if len(paths) < 2:
        raise JudgeError("There is nothing to compare. Give two or more runs.")
    by_runs: list[list[Item]] = []
    for (a, name_a), (b, name_b) in combinations(zip(paths, short_names(paths)), 2):
        runs = RunPair(name_a, name_b)
        pairs = read_pairs(a, b).pairs
        by_runs.append([Item(runs, p.prompt, p.reference, p.a.text, p.b.text) for p in pairs])
    if all(item.same for items in by_runs for item in items):
        raise JudgeError(
            "The runs answer every shared prompt with the same text, so there is nothing to "
            "compare. Give runs that differ."
        )
    return by_runs


def a_is_left(seed: int, annotator: str, runs: RunPair, place: int) -> bool:
    """Whether this annotator sees the first run on the left.

    Of every two consecutive pairs (by `place` among those of these runs) one has it on the left
    and one on the right; a coin decides which. So it is on the left in exactly half of the pairs.
    """
    coin = _digest(seed, [annotator.casefold(), *runs, place // 2])[0] % 2
    return (coin + place) % 2 == 0


def own_order(seed: int, annotator: str, pair: str) -> str:
    """The place of a pair in one annotator's own order: people who share the work begin apart."""
    return _digest(seed, ["order", annotator.casefold(), pair]).hex()


def _digest(seed: int, content: Sequence[object]) -> bytes:
    data = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(data, key=str(seed).encode()[:64], digest_size=12).digest()
