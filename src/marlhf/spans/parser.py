"""The parser that a recipe names. What one needs beyond marlhf is imported when it is built."""

from __future__ import annotations

from collections.abc import Callable

from marlhf.spans.benepar_parser import BeneparParser
from marlhf.spans.english import EnglishParser
from marlhf.spans.mixed import MixedParser
from marlhf.spans.phrases import Parser, ParserError
from marlhf.spans.python import PythonParser
from marlhf.spans.spacy_parser import SpacyParser
from marlhf.spans.stanza_parser import StanzaParser

PARSERS: dict[str, Callable[[], Parser]] = {
    "english": EnglishParser,
    "python": PythonParser,
    "auto": MixedParser,
}
MODEL_PARSERS: dict[str, Callable[[str], Parser]] = {
    "spacy": SpacyParser,
    "stanza": StanzaParser,
    "benepar": BeneparParser,
}
"""Parsers with trained models, which are named after a colon."""
NAMES = (*PARSERS, "spacy:NAME", "stanza:LANGUAGE", "benepar:NAME")


def build_parser(name: str) -> Parser:
    """The parser called `name`, such as `english` or `spacy:en_core_web_sm`."""
    if name in PARSERS:
        return PARSERS[name]()
    kind, _, model = name.partition(":")
    if kind in MODEL_PARSERS and model:
        return MODEL_PARSERS[kind](model)
    raise ParserError(f"There is no parser {name!r}. It is one of {', '.join(NAMES)}.")
