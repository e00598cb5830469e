"""What a parser is: text in, nested phrases out.

Neither this module nor the parsers import torch, so worker processes start at once and never see
a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from marlhf.errors import MarlhfError


class ParserError(MarlhfError, ValueError):
    """A parser that does not exist or is not installed."""


class Phrase(NamedTuple):
    """Characters `begin` to before `end`, and what they are: `NP`, `if_statement`; a word is ``."""

    begin: int
    end: int
    label: str = ""


class Parser(Protocol):
    """Phrases of each text, nested and in tree order: a phrase before its parts.

    Those that lie in no other are its sentences, or a program's statements. Every text is
    parsed, whatever it holds; the same text always has the same phrases.
    """

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]: ...


class TextParser(ABC):
    """A parser that takes one text at a time."""

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]:
        return [self.parse(text) for text in texts]

    @abstractmethod
    def parse(self, text: str) -> list[Phrase]: ...


def nested(phrases: Iterable[Phrase]) -> list[Phrase]:
    """Phrases in the order of a tree, without empty ones, repetitions and those that cross others.

    >>> nested([Phrase(4, 9), Phrase(0, 6, "NP"), Phrase(0, 6, "S"), Phrase(2, 2)])
    [Phrase(begin=0, end=6, label='NP')]
    """
    kept: list[Phrase] = []
    open_ends: list[int] = []
    last = (-1, -1)
    # The sort is stable: of phrases over the same characters the first given stays.
    for phrase in sorted(phrases, key=lambda p: (p[0], -p[1])):
        begin, end, _ = phrase
        if end <= begin or (begin, end) == last:
            continue
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            continue
        kept.append(phrase)
        open_ends.append(end)
        last = (begin, end)
    return kept
