"""Text and tokens: phrases of a text, which tokens they cover, and how tokens look as text."""

from marlhf.spans.parser import build_parser
from marlhf.spans.token_text import special_tokens, token_texts, vocabulary

__all__ = ["build_parser", "special_tokens", "token_texts", "vocabulary"]
