"""Text and tokens: phrases of a text, which tokens they cover, and how tokens look as text.

Names are found when asked for: parsers must not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "build_parser": "marlhf.spans.parser",
    "special_tokens": "marlhf.spans.token_text",
    "token_texts": "marlhf.spans.token_text",
    "vocabulary": "marlhf.spans.token_text",
}

__all__ = ["build_parser", "special_tokens", "token_texts", "vocabulary"]

if TYPE_CHECKING:
    from marlhf.spans.parser import build_parser
    from marlhf.spans.token_text import special_tokens, token_texts, vocabulary


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'marlhf.spans' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
