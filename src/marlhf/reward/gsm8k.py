"""The reward for word problems whose answer is a number, such as GSM8K's.

reward_funcs: ["marlhf.reward.gsm8k:right_answer"]
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from marlhf.data.gsm8k import MARK
from marlhf.data.rows import Text, response_text
from marlhf.reward.functions import reward_function

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.A)
MAX_DIGITS = 40
"""Longer numbers are wrong: converting digits takes quadratic time."""


@reward_function
def right_answer(completions: Sequence[Text], answer: Sequence[str | float]) -> list[float]:
    """1 where the final number is that of the column `answer`, else 0.

    >>> right_answer(["48 + 24 = 72\\n#### 72", "It is 7.", "I cannot say."], ["72", "8", "0"])
    [1.0, 0.0, 0.0]
    """
    rows = zip(completions, answer, strict=True)
    return [
        float(_same(final_number(response_text(text)), final_number(str(right))))
        for text, right in rows
    ]


def final_number(response: str) -> str | None:
    """The first number after the last `####`; without one there, the last number of the response.

    >>> final_number("She has 3 + 4 apples.\\n#### $1,700.00 in total"), final_number("7 or 8")
    ('1700.00', '8')
    """
    _, mark, after = response.rpartition(MARK)
    marked = NUMBER.search(after) if mark else None
    numbers = [marked[0]] if marked else NUMBER.findall(response)[-1:]
    return numbers[0].replace(",", "") if numbers else None


def _same(a: str | None, b: str | None) -> bool:
    if a is None or b is None or max(len(a), len(b)) > MAX_DIGITS:
        return False
    return float(a) == float(b)
