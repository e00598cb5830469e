"""What each token of a vocabulary looks like as text, as tables that rules can look up.

Axes: V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from marlhf.core import Vocabulary

SPACE_MARK = "\u2581"  # SentencePiece writes a space so
BYTE_SPACE = "\u0120"  # and GPT-2 so
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CLOSING = r"[\"')\]\u201d\u2019\u300d\u300f\uff09]"
SENTENCE_END = re.compile(rf"[.!?\u3002\uff01\uff1f]{CLOSING}*\s*$")
WIDE_END = re.compile(rf"[\u3002\uff01\uff1f]{CLOSING}*$")
ABBREVIATION = re.compile(r"\s*(?:Mr|Mrs|Ms|Dr|Prof|St|vs|approx|e\.g|i\.e)")
"""What has a full stop within a sentence, and hardly ever ends one."""


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> Vocabulary:
    """Tables over all tokens; `size` where the model embeds more than the tokenizer has."""
    # Loaded here and not above: the parsers' processes import this package and need no torch.
    import torch

    from marlhf.core import Vocabulary

    texts = token_texts(tokenizer)
    texts += [""] * max(0, (size or 0) - len(texts))
    special = set(special_tokens(tokenizer).values())

    def table(test: Callable[[int, str], bool]) -> Tensor:
        return torch.tensor([test(i, text) for i, text in enumerate(texts)], dtype=torch.bool)

    return Vocabulary(
        begins_word=table(lambda i, text: i in special or text[:1].isspace()),
        is_space=table(lambda i, text: i not in special and text.isspace()),
        ends_sentence=table(
            lambda _, text: (
                SENTENCE_END.search(text) is not None
                and not ABBREVIATION.fullmatch(text.removesuffix("."))
            )
        ),
        has_newline=table(lambda _, text: "\n" in text),
        is_closing=table(lambda _, text: re.fullmatch(f"{CLOSING}+", text) is not None),
        ends_wide=table(lambda _, text: WIDE_END.search(text) is not None),
        is_abbreviation=table(lambda _, text: ABBREVIATION.fullmatch(text) is not None),
        is_number=table(lambda _, text: text.strip().isdecimal()),
    )


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each token's own text with its white space; bytes that are no text become `\ufffd`."""
    return [token.decode("utf-8", errors="replace") for token in token_bytes(tokenizer)]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The UTF-8 bytes of each token; a character may span several tokens."""
    ids = tokenizer.get_vocab()
    tokens = [""] * (max(ids.values()) + 1)  # ids may leave gaps
    for token, i in ids.items():
        tokens[i] = token
    # Special or not, added tokens are text as it is; but for the space mark, which the decoders of
    # SentencePiece replace in them too: Gemma's vocabulary has runs of spaces as added tokens.
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    read = _reader(tokens)
    space = " " if read is _metaspace else SPACE_MARK
    return [
        token.replace(SPACE_MARK, space).encode() if token in added else read(token)
        for token in tokens
    ]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Every token that is not text: BOS, EOS and the like, and those of chat templates."""
    added = tokenizer.added_tokens_decoder.items()
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids)
    return dict(named) | {token.content: i for i, token in added if token.special}


def _reader(tokens: list[str]) -> Callable[[str], bytes]:
    """How this vocabulary encodes text, judged by how its tokens begin.

    Counted, since each mark is also a character that other kinds of vocabulary may contain.
    """
    spaces = sum(t.startswith(SPACE_MARK) for t in tokens)
    byte_spaces = sum(t.startswith(BYTE_SPACE) for t in tokens)
    continued = sum(t.startswith("##") for t in tokens)
    if continued > max(spaces, byte_spaces):
        return _word_piece
    return _byte_level if byte_spaces > spaces else _metaspace


def _byte_level(token: str) -> bytes:
    if not BYTE_LEVEL.fullmatch(token):
        return token.encode()  # put into the vocabulary as plain text
    return token.translate(BYTES).encode("latin-1")


def _metaspace(token: str) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()


def _word_piece(token: str) -> bytes:
    """WordPiece drops white space, so punctuation becomes words of its own."""
    return (token[2:] if token.startswith("##") else f" {token}").encode()


def _byte_table() -> dict[int, int]:
    """The byte of each of GPT-2's printable characters, by its code."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: b for b in plain} | {256 + i: b for i, b in enumerate(rest)}


BYTES = _byte_table()
BYTE_LEVEL = re.compile(f"[{re.escape(''.join(map(chr, BYTES)))}]*")
