"""Which characters each sampled token covers, exactly, for any tokenizer.

Nothing is tokenised again: the text is built from the bytes of the tokens that were sampled, so
text and tokens cannot disagree. Each token has one anchor, its first character that is not white
space, and lies in a phrase when its anchor does.

Axes: B rows, S spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from marlhf.spans.token_text import special_tokens, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_END = b"\n"
"""Between rows, so that a character cut off at the end of one does not run into the next."""
SPACES = [c for c in range(0x3001) if chr(c).isspace()]
BREAKS = [10, 11, 12, 13, 28, 29, 30, 0x85, 0x2028, 0x2029]  # as str.splitlines has them


def _table(characters: Sequence[int]) -> np.ndarray:
    """True for these characters, in a table whose last entry is for all characters beyond it."""
    table = np.zeros(0x3002, dtype=bool)
    table[list(characters)] = True
    return table


IS_SPACE, IS_BREAK = _table(SPACES), _table(BREAKS)


@dataclass(frozen=True)
class Aligned:
    """Responses as text, with the anchor of each token in it."""

    texts: list[str]
    anchors: np.ndarray  # [N] of all tokens of all rows, as characters of the rows joined
    text_begins: np.ndarray  # [B + 1] where each row's text begins, joined
    token_begins: np.ndarray  # [B + 1] where each row's tokens begin, joined

    def row(self, i: int) -> list[int]:
        """The anchor of each token of one row, in that row's text."""
        begin, end = self.token_begins[i : i + 2]
        return (self.anchors[begin:end] - self.text_begins[i]).tolist()

    def token_spans(self, phrases: Sequence[Sequence[int]]) -> np.ndarray:
        """Phrases of characters as spans of tokens: [B, S, 2], padded with (0, 0).

        `phrases`: for each row begin, end, begin, end, ... in one list. Only spans that a rule can
        use are kept: those of two tokens or more, and those that lie in no other.
        """
        counts = np.array([len(row) // 2 for row in phrases], dtype=np.int64)
        of_row = np.repeat(np.arange(len(phrases)), counts)
        flat = np.fromiter(chain.from_iterable(phrases), np.int64, 2 * int(counts.sum()))
        characters = flat.reshape(-1, 2) + self.text_begins[of_row][:, None]
        joined = np.searchsorted(self.anchors, characters)  # as tokens of the rows joined
        full = joined[:, 1] > joined[:, 0]
        of_row, joined = of_row[full], joined[full]
        # In the order of a tree a span lies in no other when all before it have ended.
        ended = np.maximum.accumulate(np.append([0], joined[:-1, 1]))[: len(joined)]
        outermost = joined[:, 0] >= ended
        repeated = np.append([False], (joined[1:] == joined[:-1]).all(axis=1))[: len(joined)]
        used = (outermost | (joined[:, 1] - joined[:, 0] > 1)) & ~repeated
        of_row, joined = of_row[used], joined[used]
        return self._pack(of_row, joined - self.token_begins[of_row][:, None])

    def _pack(self, of_row: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """Spans in rows. Where there is no text to parse, the whole response is one span."""
        lengths = np.diff(self.token_begins)
        counts = np.bincount(of_row, minlength=len(lengths))
        packed = np.zeros((len(lengths), max(1, counts.max(initial=0)), 2), dtype=np.int64)
        place = np.arange(len(of_row)) - (counts.cumsum() - counts)[of_row]
        packed[of_row, place] = spans
        packed[counts == 0, 0, 1] = lengths[counts == 0]
        return packed


@dataclass(frozen=True)
class TokenBytes:
    """The bytes that each token of a vocabulary writes; none for special tokens."""

    table: Sequence[bytes]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
        table = token_bytes(tokenizer)
        for i in special_tokens(tokenizer).values():
            table[i] = b""
        return cls(table)

    def align(self, responses: Sequence[Sequence[int]]) -> Aligned:
        """Text and anchors of all responses, in one pass over their bytes."""
        table, known = self.table, len(self.table)
        pieces = [
            [table[i] if i < known else b"" for i in response] + [ROW_END] for response in responses
        ]
        flat = list(chain.from_iterable(pieces))
        # Each byte that is not valid UTF-8 becomes one character, so that every byte has one.
        text = b"".join(flat).decode("utf-8", errors="surrogateescape")
        points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
        escaped = (points >= 0xDC80) & (points <= 0xDCFF)
        widths = 1 + (points >= 0x80) + (points >= 0x800).astype(np.int64) + (points >= 0x10000)
        character = np.repeat(np.arange(len(points)), np.where(escaped, 1, widths))  # of each byte
        lengths = np.fromiter(map(len, flat), np.int64, len(flat))
        ends = lengths.cumsum()
        row_ends = np.fromiter(map(len, pieces), np.int64, len(pieces)).cumsum() - 1
        anchors = _anchors(points, character, ends - lengths, ends, row_ends)
        text_ends = anchors[row_ends]
        text_begins = np.append([0], text_ends + 1)
        if escaped.any():
            text = np.where(escaped, 0xFFFD, points).astype("<u4").tobytes().decode("utf-32-le")
        return Aligned(
            [text[a:b] for a, b in zip(text_begins.tolist(), text_ends.tolist())],
            np.delete(anchors, row_ends),
            text_begins,
            np.append([0], row_ends - np.arange(len(row_ends))),
        )


def _anchors(
    points: np.ndarray,
    character: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    row_ends: np.ndarray,
) -> np.ndarray:
    """One character per token, never to the left of the previous token's.

    White space before a word belongs to the word; a line break is an anchor itself. A token without
    text has the anchor of the token before it, but after the last text of its row the end of the
    text: an end token then lies in no phrase and joins the last action.
    """
    count = len(points)
    code = np.minimum(points, len(IS_SPACE) - 1)
    next_solid = _next(~IS_SPACE[code])
    next_stop = _next(~IS_SPACE[code] | IS_BREAK[code])
    empty = begins == ends
    first = character[np.minimum(begins, len(character) - 1)] if count else begins
    last = character[np.maximum(ends, 1) - 1] if count else ends
    anchors = np.where(next_solid[first] <= last, next_solid[first], next_stop[first])
    row_begin = np.zeros(len(begins), dtype=bool)
    row_begin[np.append([0], row_ends[:-1] + 1)[: len(row_ends)]] = True
    at_end = np.zeros(count, dtype=bool)
    at_end[character[begins[row_ends]]] = True
    anchors = np.where(empty, first, anchors)
    follows = empty & ~row_begin & ~at_end[first]
    return anchors[np.maximum.accumulate(np.where(follows, 0, np.arange(len(begins))))]


def _next(marked: np.ndarray) -> np.ndarray:
    """The first marked position at or after each; the number of positions where there is none."""
    position = np.where(marked, np.arange(len(marked)), len(marked))
    return np.minimum.accumulate(position[::-1])[::-1]
