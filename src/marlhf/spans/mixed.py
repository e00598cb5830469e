"""Prose with programs in it: each part by its own parser."""

from __future__ import annotations

import re
from collections.abc import Sequence

from marlhf.spans.english import parse_english
from marlhf.spans.phrases import Phrase
from marlhf.spans.python import PythonParser

FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+#-]*)[^\n]*$", re.M)
LANGUAGES = frozenset({"", "python", "py", "python3", "pycon"})
CODE_LINE = re.compile(
    r"\s*(?:(?:def|class|for|while|if|elif|with|try|except|else|finally|async)\b.*:|"
    r"(?:import|from|return|yield|raise|assert|del|global|pass|break|continue)\b(?!.*[.!?]$)|"
    r"[@#]|[\w.\[\]'\"]+(?:, *\w+)* *(?:[-+*/%|&]|//|\*\*)?= *\S|[\w.]+\(.*\)?\s*$|[\])}]+,?\s*$)"
)


class MixedParser:
    """Prose as English; fenced code, and a text that is evidently a program, as Python."""

    def __init__(self) -> None:
        self.python = PythonParser()

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]:
        return [self.parse(text) for text in texts]

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
