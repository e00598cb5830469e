"""What judging costs, where prices are known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

LIST_DATE = "2025-08"
LIST_PRICES = {
    "gpt-3.5-turbo": (0.50, 1.50),
    "gpt-4": (30.00, 60.00),
    "gpt-4-turbo": (10.00, 30.00),
    "gpt-4o": (2.50, 10.00),
    "gpt-4o-mini": (0.15, 0.60),
    "gpt-4.1": (2.00, 8.00),
    "gpt-4.1-mini": (0.40, 1.60),
    "gpt-4.1-nano": (0.10, 0.40),
    "gpt-5": (1.25, 10.00),
    "gpt-5-mini": (0.25, 2.00),
    "gpt-5-nano": (0.05, 0.40),
    "o3": (2.00, 8.00),
    "o4-mini": (1.10, 4.40),
}
"""US dollars per million tokens in and out, of OpenAI's own server."""


@dataclass(frozen=True)
class Prices:
    """Per million tokens, in any currency; None if unknown."""

    tokens_in: float | None = None
    tokens_out: float | None = None
    source: str = "at the given prices"
    sign: str = ""

    def __call__(self, tokens_in: int, tokens_out: int) -> str:
        text = f"{tokens_in:,} tokens in, {tokens_out:,} out"
        if self.tokens_in is None and self.tokens_out is None:
            return text
        cost = tokens_in * (self.tokens_in or 0) + tokens_out * (self.tokens_out or 0)
        return f"{text}, {self.sign}{cost / 1e6:.4f} {self.source}"


def find_prices(given: Prices | None, model: str, base_url: str | None) -> Prices:
    """The given prices, else the list prices of a known model; without a cost if there are none.

    >>> find_prices(None, "gpt-4o-2024-08-06", None)(1_000_000, 0)
    '1,000,000 tokens in, 0 out, $2.5000 at list prices of 2025-08 (see --price-in)'
    """
    if given is not None and (given.tokens_in is not None or given.tokens_out is not None):
        return given
    listed = LIST_PRICES.get(re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model))
    if listed is None or (base_url and urlsplit(base_url).hostname != "api.openai.com"):
        return Prices()
    return Prices(*listed, f"at list prices of {LIST_DATE} (see --price-in)", "$")
