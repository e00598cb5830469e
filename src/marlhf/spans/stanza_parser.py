"""Constituents by a pipeline of stanza, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marlhf.spans.phrases import ParserError, Phrase
from marlhf.spans.trees import tree_phrases


class StanzaParser:
    """A stanza pipeline with a constituency parser, by language: `en`, `zh-hans` ..."""

    def __init__(self, language: str) -> None:
        try:
            import stanza  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ParserError(
                f"The parser stanza:{language} needs stanza: pip install 'marlhf[stanza]'"
            ) from None
        try:
            self.pipeline: Any = stanza.Pipeline(
                language,
                processors="tokenize,pos,constituency",
                download_method=None,  # no silent downloads
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
        phrases: list[Phrase] = []
        for sentence in self.pipeline(text).sentences if text.strip() else ():
            # Words of one token (`don't`) share its characters.
            places = [
                (token.start_char, token.end_char) for token in sentence.tokens for _ in token.words
            ]
            phrases += tree_phrases(sentence.constituency, places)
        return phrases
