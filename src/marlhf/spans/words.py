"""Words and sentences of English text, with their positions. Contractions are two words."""

from __future__ import annotations

import re
from typing import NamedTuple

LETTERS = r"[^\W\d_]"
WORD = re.compile(
    rf"""
      (?:https?://|www\.)[^\s<>"]*[^\s<>".,;:!?'\)\]]     # an address
    | [\w.+-]{{1,64}}@[\w-]+(?:\.[\w-]+)+                    # a mail address
    | /?[ru]/\w+                                           # Reddit's own
    | (?:{LETTERS}\.){{2,}}                                # e.g., U.S.
    | (?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|approx|Inc|Ltd)\.
    | [$\u00a3\u20ac#]?\d+(?:[.,:/]\d+)*(?:%|[^\W\d_]{{1,2}}\b)?  # 3.5, $20, 10:30, 21st
    | {LETTERS}+?(?=n['\u2019]t\b)                         # do|n't
    | n['\u2019]t\b
    | ['\u2019](?:s|re|ve|ll|d|m)\b                        # it|'s
    | \w+(?:[-\u2010]\w+)*
    | ([^\w\s])\1*                                         # marks, and runs of one: ... !!! ---
    """,
    re.VERBOSE | re.IGNORECASE,
)
MARKER = re.compile(r"(?:[-*\u2022\u2013>#]+|\(?(?:\d{1,3}|[A-Za-z])[.)])(?=[ \t])")
STOP = re.compile(r"[.!?\u2026\u3002]+$")
CLOSING = frozenset("\"')]\u201d\u2019*")


class Word(NamedTuple):
    """Characters `begin` to before `end`."""

    begin: int
    end: int
    text: str


def split_sentences(text: str) -> list[list[Word]]:
    """The words of each sentence. A line break ends one, so the items of a list stay apart."""
    sentences: list[list[Word]] = []
    place = 0
    for line in text.splitlines(keepends=True):
        _split_line(line, place, sentences)
        place += len(line)
    return sentences


def _split_line(line: str, place: int, sentences: list[list[Word]]) -> None:
    words: list[Word] = []
    at = len(line) - len(line.lstrip())
    if marker := MARKER.match(line, at):  # the number of a list is no sentence of its own
        words.append(Word(place + at, place + marker.end(), marker[0]))
        at = marker.end()
    ended = False
    for match in WORD.finditer(line, at):
        begin, end = match.span()
        word = match[0]
        if ended and not (word in CLOSING and line[begin - 1 : begin].strip()):
            if begin == 0 or line[begin - 1].isspace():
                sentences.append(words)
                words = []
            ended = False
        words.append(Word(place + begin, place + end, word))
        if STOP.search(word) and not word[0].isalnum():
            ended = True
    if words:
        sentences.append(words)
