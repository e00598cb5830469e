"""Constituents by the Berkeley neural parser, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marlhf.spans.phrases import ParserError, Phrase
from marlhf.spans.trees import tree_phrases
from marlhf.spans.words import split_sentences


class BeneparParser:
    """The Berkeley neural parser, by the name of its model: `benepar_en3`."""

    def __init__(self, name: str) -> None:
        try:
            import benepar  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ParserError(
                f"The parser benepar:{name} needs benepar: pip install 'marlhf[benepar]'"
            ) from None
        try:
            self.parser: Any = benepar.Parser(name)
        except (LookupError, OSError) as error:
            raise ParserError(
                f"benepar has no model {name!r} here. Get it: "
                f"python -c \"import benepar; benepar.download('{name}')\""
            ) from error
        self.sentence: Any = benepar.InputSentence

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]:
        return [self.parse(text) for text in texts]

    def parse(self, text: str) -> list[Phrase]:
        sentences = split_sentences(text)
        given = [self.sentence(words=[word.text for word in words]) for words in sentences]
        trees = self.parser.parse_sents(given) if given else ()
        phrases: list[Phrase] = []
        for words, tree in zip(sentences, trees, strict=True):
            phrases += tree_phrases(tree, [(word.begin, word.end) for word in words])
        return phrases
