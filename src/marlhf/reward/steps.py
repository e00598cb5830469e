"""The steps of a response: where in its text, and in its tokens, each ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from transformers import PreTrainedTokenizerBase

from marlhf.spans.align import TokenBytes


def cut_steps(text: str, separator: str) -> list[str]:
    """The steps of a text, without separators; blank ones belong to the step before.

    >>> cut_steps("2 + 2 = 4\\n\\nSo 4.\\n", "\\n")
    ['2 + 2 = 4', 'So 4.']
    """
    return [step for step in text.split(separator) if step.strip()]


class StepEnds:
    """The token at which each step of a response ends, the separator after it included.

    Where a token holds the end of the separator and the beginning of the next step, as ` So` does
    after `. `, the step ends before it. The last step ends at the last token, with or without a
    separator or an end token before it. So every response has a step, and one without separators is
    a single step.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> ends = StepEnds(tokenizer, "\\n")
    >>> ends([[*tokenizer.encode("1+1=2\\n2+1=3"), tokenizer.eos_token_id]])
    [[5, 11]]
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
        self.separator = separator.encode()
        self.bytes = TokenBytes.of(tokenizer).table

    def __call__(self, responses: Sequence[Sequence[int]]) -> list[list[int]]:
        return [self._ends(response) for response in responses]

    def _ends(self, response: Sequence[int]) -> list[int]:
        known = len(self.bytes)  # a model may embed more tokens than its tokenizer has
        pieces = [self.bytes[i] if i < known else b"" for i in response]
        steps, width = b"".join(pieces).split(self.separator), len(self.separator)
        # In bytes, up to the end of each step's separator.
        ends = accumulate(len(step) + width for step in steps)
        full = [end for end, step in zip(ends, steps) if step.decode(errors="replace").strip()]
        if not response:
            return []
        written = np.array([0, *accumulate(map(len, pieces))])  # before each token, and at the end
        full = np.array(full[:-1], dtype=np.int64)
        before = written[np.searchsorted(written, full, side="right") - 1]
        whole = np.where(before >= full - width, before, full)  # else a token has both steps
        return [*(np.searchsorted(written, whole) - 1).tolist(), len(response) - 1]
