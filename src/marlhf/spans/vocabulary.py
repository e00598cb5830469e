"""What each token of a vocabulary looks like as text, as tables that rules can look up.

Axes: V vocabulary.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from marlhf.core import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_MARK = "\u2581"  # SentencePiece writes a space so
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f][\"')\]\u201d\u2019]*\s*$")


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> Vocabulary:
    """Tables over all tokens; `size` where the model embeds more than the tokenizer has."""
    texts = token_texts(tokenizer)
    texts += [""] * max(0, (size or 0) - len(texts))
    special = set(tokenizer.all_special_ids)

    def table(test) -> torch.Tensor:
        return torch.tensor([test(i, text) for i, text in enumerate(texts)], dtype=torch.bool)

    return Vocabulary(
        begins_word=table(lambda i, text: i in special or text[:1].isspace()),
        is_space=table(lambda i, text: i not in special and text.isspace()),
        ends_sentence=table(lambda _, text: SENTENCE_END.search(text) is not None),
        has_newline=table(lambda _, text: "\n" in text),
    )


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each token's own text, white space as it stands; bytes that are no text become `\ufffd`."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_tokens)
    byte_level = any(t is not None and t.startswith("\u0120") for t in tokens)
    continues = sum(t is not None and t.startswith("##") for t in tokens) > len(tokens) // 20
    return [_text(t or "", t in special, byte_level, continues) for t in tokens]


def _text(token: str, special: bool, byte_level: bool, word_piece: bool) -> str:
    if special:
        return token
    if found := BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)]).decode("utf-8", errors="replace")
    if byte_level:
        if all(c in BYTES for c in token):
            return bytes(BYTES[c] for c in token).decode("utf-8", errors="replace")
        return token  # added to the vocabulary as plain text
    if word_piece:
        return token[2:] if token.startswith("##") else f" {token}"
    return token.replace(SPACE_MARK, " ")


def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, and back."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTES = _byte_table()
