"""Constituency parsers that others trained: stanza's and benepar's, where they are installed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from marlhf.spans.parser import ParserError, Phrase, nested
from marlhf.spans.words import split_sentences


class StanzaParser:
    """A stanza pipeline with a constituency parser, by language: `en`, `zh-hans` ..."""

    def __init__(self, language: str) -> None:
        try:
            import stanza  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ParserError(
                f"The parser stanza:{language} needs stanza: pip install stanza"
            ) from None
        try:
            self.pipeline: Any = stanza.Pipeline(
                language,
                processors="tokenize,pos,constituency",
                download_method=None,  # what is not here is asked for, never fetched unseen
                use_gpu=False,
                verbose=False,
            )
        except Exception as error:  # of many types, some of them stanza's own
            raise ParserError(
                f"stanza cannot parse {language!r} ({error}). Get its models: "
                f"python -c \"import stanza; stanza.download('{language}')\""
            ) from error

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]:
        return [self.parse(text) for text in texts]

    def parse(self, text: str) -> list[Phrase]:
        found: list[Phrase] = []
        for sentence in self.pipeline(text).sentences if text.strip() else ():
            # Words of one token (`don't`) share its characters; the first of them stands for it.
            places = [
                (token.start_char, token.end_char) for token in sentence.tokens for _ in token.words
            ]
            found += phrases(sentence.constituency, places)
        return found


class BeneparParser:
    """The Berkeley neural parser, by the name of its model: `benepar_en3`."""

    def __init__(self, name: str) -> None:
        try:
            import benepar  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ParserError(
                f"The parser benepar:{name} needs benepar: pip install benepar"
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
        found: list[Phrase] = []
        for words, tree in zip(sentences, trees, strict=True):
            found += phrases(tree, [(word.begin, word.end) for word in words])
        return found


def phrases(tree: Any, places: Sequence[tuple[int, int]]) -> list[Phrase]:
    """A tree over words as phrases over characters; both kinds of tree are read."""
    found: list[Phrase] = []
    number = count()

    def visit(node: Any) -> tuple[int, int]:
        # stanza's have children and a label; nltk's are lists with a method for it, leaves strings
        children: Any = () if isinstance(node, str) else getattr(node, "children", node)
        if isinstance(node, str) or not children:
            at = next(number)
            begin, end = places[at]
            found.append(Phrase(begin, end))
            return begin, end
        label: Any = node.label() if callable(node.label) else node.label
        at = len(found)
        ends = [visit(child) for child in children]
        begin, end = ends[0][0], ends[-1][1]
        if len(ends) > 1:  # ROOT over S, NP over NN: the same characters once
            found.insert(at, Phrase(begin, end, label))
        return begin, end

    whole = visit(tree)
    if next(number) != len(places):
        raise ParserError(f"The tree of a sentence of {len(places)} words has other words.")
    return nested([Phrase(*whole, "S"), *found])
