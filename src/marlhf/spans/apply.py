"""Apply a segmenter, and parse the constituents that it may need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from marlhf.core import Responses, Segmenter, Segments, parser_of, segment
from marlhf.errors import MarlhfError
from marlhf.models.base import Tokenizer
from marlhf.spans.align import TokenBytes
from marlhf.spans.token_text import vocabulary
from marlhf.spans.workers import ParserPool


class SegmenterError(MarlhfError, ValueError):
    """A segmenter that raised, or returned something else than the starts of macro actions."""


def apply_segmenter(
    segmenter: Segmenter, responses: Responses, *, split_last: bool = False
) -> Segments:
    """The macro actions of some responses, checked."""
    with explain_segmenter_errors(segmenter):
        return segment(segmenter, responses, split_last=split_last).validate()


@contextlib.contextmanager
def explain_segmenter_errors(segmenter: Segmenter) -> Iterator[None]:
    """Errors inside the block as a sentence that names the segmenter."""
    try:
        yield
    except ValueError as error:
        raise SegmenterError(f"Segmenter {_name(segmenter)}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        kind = type(error).__name__
        raise SegmenterError(
            f"Segmenter {_name(segmenter)} raised {kind}: {error}. It takes Responses and returns "
            "a bool tensor [B, T] that is True where a macro action starts."
        ) from error


def _name(segmenter: Segmenter) -> str:
    return getattr(segmenter, "__qualname__", None) or repr(segmenter)


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


def open_parsing(
    rule: Segmenter, tokenizer: Tokenizer, workers: int | None = None
) -> Parsing | None:
    """The parser, where the segmenter needs one."""
    parser = parser_of(rule)
    return None if parser is None else Parsing(parser, tokenizer, workers)


def segment_response(
    rule: Segmenter,
    ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    seed: int,
    ref_logprobs: Tensor | None = None,
    logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    split_last: bool = False,
) -> list[bool]:
    """Whether each token of one response starts a macro action."""
    parsing = open_parsing(rule, tokenizer, workers=0)
    tokens = torch.tensor([ids])
    responses = Responses(
        tokens,
        torch.ones_like(tokens).bool(),
        ref_logprobs=ref_logprobs,
        logprobs=logprobs,
        entropy=entropy,
        spans=parsing.begin([ids])() if parsing else None,
        vocabulary=vocabulary(tokenizer),
        seeds=torch.tensor([seed]),
    ).validate()
    return apply_segmenter(rule, responses, split_last=split_last).starts[0].tolist()
