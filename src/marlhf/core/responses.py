"""What a termination rule sees of responses: tokens, and whatever else is known of them.

Axes: B rows, T response tokens, S spans, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf.core.masked import check_shape, check_tokens, complain

Spans = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Vocabulary:
    """What a rule may know of each token's text, as tables over the vocabulary: [V] bool.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> from marlhf.spans import vocabulary
    >>> tokenizer = tiny_tokenizer()
    >>> table = vocabulary(tokenizer, len(tokenizer))
    >>> bool(table.ends_sentence[tokenizer.encode(".")[0]])
    True
    """

    begins_word: Tensor  # the text starts with white space, or the token is special
    is_space: Tensor  # the text is white space only
    ends_sentence: Tensor  # the text ends in . ! or ?, closing quotes and brackets aside
    has_newline: Tensor  # the text contains a line break
    is_closing: Tensor  # the text is closing quotes and brackets only
    # Without these, `Sentences` knows neither Chinese nor abbreviations nor numbered lists.
    ends_wide: Tensor | None = None  # the text ends in a full-width stop, which needs no space
    is_abbreviation: Tensor | None = None  # the text is such as Dr: a stop after it ends nothing
    is_number: Tensor | None = None  # the text is digits


@dataclass(frozen=True)
class Responses:
    """What a segmenter sees. Only `tokens` and `mask` are always there.

    >>> from marlhf.core import NGram
    >>> responses = Responses(torch.tensor([[7, 8, 9]]), mask=torch.ones(1, 3).bool())
    >>> NGram(2)(responses)
    tensor([[ True, False,  True]])
    """

    tokens: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool
    ref_logprobs: Tensor | None = None  # [B, T] log-probs under the reference model
    spans: Tensor | Spans | None = None  # [B, S, 2] constituents, from token to before token
    vocabulary: Vocabulary | None = None
    seeds: Tensor | None = None  # [B] int64, one for each row's random draws
    logprobs: Tensor | None = None  # [B, T] log-probs under the policy that sampled
    entropy: Tensor | None = None  # [B, T] nats, of the policy's choice of each token
    values: Tensor | None = None  # [B, T] the critic's, of the state before each token

    def __post_init__(self) -> None:
        known = ("ref_logprobs", "logprobs", "entropy", "values")
        given = {name: x for name in known if (x := getattr(self, name)) is not None}
        check_tokens(self.mask, **given)
        check_shape(self.mask, tokens=self.tokens)
        if (spans := self.spans) is None:
            return
        if not isinstance(spans, Tensor):
            spans = pack_spans(spans).to(self.mask.device)
            object.__setattr__(self, "spans", spans)
        rows = len(self.mask)
        if spans.ndim != 3 or spans.shape[::2] != (rows, 2):
            raise ValueError(
                f"spans must be [B, S, 2] with B = {rows}, got {[*spans.shape]}. Use `pack_spans`."
            )

    def validate(self) -> Responses:
        """Check what only the values can tell: that spans lie in their row and nest."""
        if isinstance(self.spans, Tensor) and self.spans.numel():
            begin, end = self.spans.unbind(dim=2)  # [B, S]
            outside = (begin < 0) | (end < begin) | (end > self.mask.shape[1])
            complain(outside, "Spans must be (from, to) within the tokens, but not in")
            left, right = begin[:, :, None], end[:, :, None]
            crossing = (left < begin[:, None]) & (begin[:, None] < right) & (right < end[:, None])
            complain(crossing, "Spans must nest, one wholly inside the other, but some cross in")
        return self


def pack_spans(spans: Spans) -> Tensor:
    """Spans of each row as one tensor [B, S, 2]; rows with fewer are filled with (0, 0).

    >>> pack_spans([[(0, 3), (1, 3)], []]).tolist()
    [[[0, 3], [1, 3]], [[0, 0], [0, 0]]]
    """
    packed = torch.zeros(len(spans), max(map(len, spans), default=0), 2, dtype=torch.int64)
    for row, of_row in enumerate(spans):
        if of_row:
            packed[row, : len(of_row)] = torch.as_tensor(of_row)
    return packed
