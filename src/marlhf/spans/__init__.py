"""Text and tokens: which tokens begin words, end sentences, break lines."""

from marlhf.spans.vocabulary import token_texts, vocabulary

__all__ = ["token_texts", "vocabulary"]
