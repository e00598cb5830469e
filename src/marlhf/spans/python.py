"""Python programs as nested phrases, whole or broken, by tree-sitter; and prose with code in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from marlhf.spans.english import parse_english
from marlhf.spans.phrases import ParserError, Phrase, TextParser, nested

PROSE = frozenset({"comment", "string_content"})
"""Leaves that people wrote to people: their words are phrases, too."""
FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+#-]*)[^\n]*$", re.M)
LANGUAGES = frozenset({"", "python", "py", "python3", "pycon"})
CODE_LINE = re.compile(
    r"\s*(?:(?:def|class|for|while|if|elif|with|try|except|else|finally|async)\b.*:|"
    r"(?:import|from|return|yield|raise|assert|del|global|pass|break|continue)\b(?!.*[.!?]$)|"
    r"[@#]|[\w.\[\]'\"]+(?:, *\w+)* *(?:[-+*/%|&]|//|\*\*)?= *\S|[\w.]+\(.*\)?\s*$|[\])}]+,?\s*$)"
)


class PythonParser(TextParser):
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


class MixedParser(TextParser):
    """Prose as English; fenced code, and a text that is evidently a program, as Python."""

    def __init__(self) -> None:
        self.python = PythonParser()

    def parse(self, text: str) -> list[Phrase]:
        phrases: list[Phrase] = []
        for begin, end, program in _parts(text):
            part = text[begin:end]
            parsed = self.python.parse(part) if program else parse_english(part)
            phrases += [Phrase(begin + a, begin + b, label) for a, b, label in parsed]
        return phrases


def looks_like_code(text: str) -> bool:
    """Whether most lines of a text are Python's."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and 2 * sum(bool(CODE_LINE.match(line)) for line in lines) > len(lines)


def _parts(text: str) -> list[tuple[int, int, bool]]:
    """Begin and end of each part, and whether it is a program; lines of a fence are prose.

    A fence that nothing closes lasts to the end: the response was cut off.
    """
    fences = list(FENCE.finditer(text))
    if not fences:
        return [(0, len(text), looks_like_code(text))]
    parts: list[tuple[int, int, bool]] = []
    at, opened = 0, None
    for fence in fences:
        if opened is None:
            parts.append((at, fence.end(), False))
            opened, at = fence, fence.end()
        elif fence[1].startswith(opened[1]) and not fence[2]:
            parts.append((at, fence.start(), opened[2].lower() in LANGUAGES))
            opened, at = None, fence.start()
    parts.append((at, len(text), opened is not None and opened[2].lower() in LANGUAGES))
    return parts
