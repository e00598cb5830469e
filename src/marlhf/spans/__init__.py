"""Text and tokens: which tokens begin words, end sentences, break lines."""

from marlhf.spans.vocabulary import special_tokens, token_texts, vocabulary

__all__ = ["special_tokens", "token_texts", "vocabulary"]
