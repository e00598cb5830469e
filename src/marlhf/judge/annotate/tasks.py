"""What people are asked: the pairs of all runs, their shuffled order, and who stands on the left.

All of it follows from a seed, so that a reload and a restart show the same. Nobody who looks at
the page can work it out: unless it is given, the seed is drawn, and stays in the database.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from marlhf.judge.pairs import JudgeError, read_pairs, short_names

if TYPE_CHECKING:
    from marlhf.data.rows import Text


@dataclass(frozen=True)
class Guide:
    """What one task asks of a person: a question, and what to look at."""

    question: str
    criteria: dict[str, str]
    from_end: bool = False
    """Whether a long prompt is first shown by its end, as a conversation is."""


GUIDES = {
    "tldr": Guide(
        "Which summary of the post is better?",
        {
            "Relevance": "the important points and nothing else",
            "Coherence": "sentences that make a whole",
            "Consistency": "nothing that the post does not say",
            "Fluency": "grammar and wording",
        },
    ),
    "hh": Guide(
        "Which reply is more helpful?",
        {
            "Helpful": "does what was asked",
            "Honest": "correct and clear, and does not pretend",
            "Harmless": "harms nobody",
        },
        from_end=True,
    ),
    "webgpt": Guide(
        "Which answer is more useful to the person who asked?",
        {
            "Factual accuracy": "claims that are true, and that the reference supports, "
            "where there is one",
            "Coherence": "easy to follow, without contradiction",
            "Usefulness": "the answer as a whole; this decides",
        },
    ),
}
"""For people; `marlhf judge` asks models the same in its own words."""


class Comparison(NamedTuple):
    """Two runs, by name."""

    a: str
    b: str


@dataclass(frozen=True)
class Item:
    """A prompt with the responses of two runs."""

    runs: Comparison
    prompt: Text
    reference: str
    response_a: str
    response_b: str

    @property
    def same(self) -> bool:
        """Nothing to ask: a tie, as for every judge."""
        return self.response_a == self.response_b

    def name(self, seed: int) -> str:
        """How the page calls it. A keyed digest: it says nothing, and sorting by it shuffles."""
        content = [*self.runs, self.prompt, self.reference, self.response_a, self.response_b]
        return _digest(seed, content).hex()


def read_items(paths: Sequence[Path | str]) -> list[list[Item]]:
    """The pairs of every two runs, a list for each two, in the order of the first one's file."""
    if len(paths) < 2:
        raise JudgeError("There is nothing to compare. Give two runs or more.")
    found: list[list[Item]] = []
    for (a, name_a), (b, name_b) in combinations(zip(paths, short_names(paths)), 2):
        runs = Comparison(name_a, name_b)
        pairs = read_pairs(a, b).pairs
        found.append([Item(runs, p.prompt, p.reference, p.a.text, p.b.text) for p in pairs])
    if all(item.same for items in found for item in items):
        raise JudgeError(
            "The runs answer every prompt that they share with the same text, so there is nothing "
            "to ask. Give runs that differ."
        )
    return found


def a_is_left(seed: int, annotator: str, runs: Comparison, place: int) -> bool:
    """Whether this annotator sees the first run on the left.

    Of each two pairs that follow one another (by `place` among those of these runs), one has it
    on the left and one on the right, which is a coin's matter: half of them, whatever the coin.
    """
    coin = _digest(seed, [annotator.casefold(), *runs, place // 2])[0] % 2
    return (coin + place) % 2 == 0


def _digest(seed: int, content: Sequence[object]) -> bytes:
    data = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(data, key=str(seed).encode()[:64], digest_size=12).digest()
