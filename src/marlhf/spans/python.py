"""Python programs as nested phrases, whole or broken, by tree-sitter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from marlhf.spans.english import parse_english
from marlhf.spans.phrases import ParserError, Phrase, nested

PROSE = frozenset({"comment", "string_content"})
"""Leaves that people wrote to people: their words are phrases, too."""


class PythonParser:
    """Syntax trees of Python. Its statements are what sentences are in prose."""

    def __init__(self) -> None:
        try:
            import tree_sitter
            import tree_sitter_python
        except ImportError:
            raise ParserError(
                "Parsing Python needs tree-sitter and its grammar: pip install 'marlhf[code]'"
            ) from None
        self.parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]:
        return [self.parse(text) for text in texts]

    def parse(self, text: str) -> list[Phrase]:
        source = text.encode("utf-8", errors="surrogatepass")
        place = _characters(text, source)
        phrases: list[Phrase] = []
        for node in _walk(self.parser.parse(source)):
            begin, end = place[node.start_byte], place[node.end_byte]
            leaf = not node.child_count
            phrases.append(Phrase(begin, end, "" if leaf and node.type not in PROSE else node.type))
            if leaf and node.type in PROSE:
                inner = parse_english(text[begin:end])
                phrases += [Phrase(begin + a, begin + b, label) for a, b, label in inner]
        return nested(phrases)


def _walk(tree: Any) -> Any:
    """All nodes but the root, without recursion: broken programs nest as deep as they like."""
    cursor = tree.walk()
    if not cursor.goto_first_child():
        return
    while True:
        yield cursor.node
        if cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent() or cursor.depth == 0:
                return


def _characters(text: str, source: bytes) -> Sequence[int]:
    """The character at each byte of the text as UTF-8, and their number at the end."""
    if len(source) == len(text):
        return range(len(source) + 1)
    place = [0] * (len(source) + 1)
    widths = (len(character.encode("utf-8", errors="surrogatepass")) for character in text)
    for number, end in enumerate(accumulate(widths), start=1):
        place[end] = number
    return place
