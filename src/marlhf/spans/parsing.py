"""Constituents of responses, parsed on other processes while the models score them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marlhf.core import Segmenter, parser_of
from marlhf.models.base import Tokenizer
from marlhf.spans.align import TokenBytes
from marlhf.spans.workers import ParserPool


class Parsing:
    """The parser of a segmenter that needs constituents.

    Every rank parses all rows: parsers are deterministic, so nothing needs to be sent.
    """

    def __init__(self, parser: str, tokenizer: Tokenizer, workers: int | None = None) -> None:
        self.tokens = TokenBytes.of(tokenizer)
        self.pool = ParserPool(parser, workers)

    def begin(self, responses: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """Start to parse; call what comes back for the spans, [B, S, 2]."""
        aligned = self.tokens.align(responses)
        pending = self.pool.submit(aligned.texts)
        return lambda: torch.from_numpy(aligned.token_spans(pending()))


def open_parsing(rule: Segmenter, tokenizer: Tokenizer) -> Parsing | None:
    """The parser, where the segmenter needs one."""
    parser = parser_of(rule)
    return None if parser is None else Parsing(parser, tokenizer)
