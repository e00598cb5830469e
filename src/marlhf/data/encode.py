"""Rows as token ids.

A prompt's ids are the same in every stage: it is encoded alone, and a
response as the text that follows it, never both as one text. Otherwise a
token across the boundary would give training other ids than rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from marlhf.data.rows import Counts, DataError, Message, Row, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CHUNK = 1024  # prompts encoded at once: fast, and little memory
LONG_TEXT = 100_000  # characters


@dataclass(frozen=True)
class Encoded:
    """A row with the ids of its prompt, truncated where the recipe says so.

    >>> Encoded(Row("Why?"), [5, 6]).prompt_ids
    [5, 6]
    """

    row: Row
    prompt_ids: list[int]


def encode_prompt(tokenizer: Tokenizer, prompt: Text) -> list[int]:
    """The ids a rollout starts from.

    Text gets the tokenizer's BOS, if it adds one, and never an EOS; messages
    go through the chat template, with the header of the assistant's turn.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.decode(encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}]))
    '<|user|>Hi<|assistant|>'
    """
    return encode_prompts(tokenizer, [prompt])[0]


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Text], max_tokens: int | None = None
) -> list[list[int]]:
    """`encode_prompt` for many at once, which fast tokenizers do in parallel.

    With `max_tokens` only the ends of very long prompts are encoded, which still makes them
    longer than that.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> [len(ids) for ids in encode_prompts(tiny_tokenizer(), ["Tell me", "Tell me a tale"])]
    [2, 4]
    """
    if not prompts:
        return []
    texts = [p if isinstance(p, str) else render_prompt(tokenizer, p) for p in prompts]
    if max_tokens is not None:
        texts = [_ends(tokenizer, text, max_tokens) for text in texts]
    opening = opening_ids(tokenizer)
    encoded = []
    for prompt, ids in zip(prompts, tokenize(tokenizer, texts), strict=True):
        # A chat template writes its own BOS, and so may the user's text.
        ready = not isinstance(prompt, str) or ids[: len(opening)] == opening
        encoded.append(ids if ready else opening + ids)
    return encoded


def encode_response(
    tokenizer: Tokenizer,
    prompt: Text,
    response: Text,
    eos_token_id: int,
    max_tokens: int | None = None,
) -> list[int]:
    """The ids of a response as they follow the prompt's: its tokens, then EOS once.

    With `max_tokens` only the ends of a very long response are encoded, as in `encode_prompts`.

    Special tokens that are written out in a text response stay text, so that
    no data can end a response early. In a chat the template writes the turn,
    with whatever closes it, and the response ends at the first EOS.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.decode(encode_response(tokenizer, "The fox", " ran.", tokenizer.eos_token_id))
    ' ran.<|eos|>'
    """
    return encode_responses(tokenizer, [(prompt, response)], eos_token_id, max_tokens)[0]


def encode_responses(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[Text, Text]],
    eos_token_id: int,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """`encode_response` for many prompts with a response each, some at once, which is faster.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> pairs = [("The fox", " smiled."), ("The owl", " smiled and said thank you.")]
    >>> [len(ids) for ids in encode_responses(tiny_tokenizer(), pairs, eos_token_id=1)]
    [3, 7]
    """
    end = cast(str, tokenizer.decode([eos_token_id]))
    encoded: list[list[int]] = []
    for start in range(0, len(pairs), CHUNK):
        texts: dict[int, str] = {}  # responses as text, by row
        turns: dict[int, str] = {}  # responses as turns of a chat
        for row, (prompt, response) in enumerate(pairs[start : start + CHUNK]):
            if isinstance(response, str) and isinstance(prompt, str):
                texts[row] = _ends(tokenizer, response.removesuffix(end), max_tokens)
            else:
                turn = _as_messages(response, "assistant")
                text = render_turn(tokenizer, _as_messages(prompt, "user"), turn)
                turns[row] = _ends(tokenizer, text, max_tokens)
        ids = dict(zip(texts, tokenize_after_text(tokenizer, [*texts.values()])))
        if turns:
            ids |= zip(turns, tokenize(tokenizer, [*turns.values()]))
        encoded += [ids[row] for row in sorted(ids)]
    return [
        [*(ids[: ids.index(eos_token_id)] if eos_token_id in ids else ids), eos_token_id]
        for ids in encoded
    ]


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids without special tokens, spaces exactly as the tokens have them.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> decode(tokenizer, [*tokenizer.encode(" The end."), tokenizer.eos_token_id])
    ' The end.'
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return cast(str, text)


def fit_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    too_long: Literal["drop", "truncate"] = "drop",
) -> tuple[list[Encoded], Counts]:
    """Rows whose prompts fit, encoded, in order, and what became of the others.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> rows = [Row("Tell me"), Row("Tell me a tale")]
    >>> kept, counts = fit_prompts(rows, tiny_tokenizer(), max_prompt_tokens=3)
    >>> len(kept), len(counts.dropped)
    (1, 1)
    """
    counts = Counts()
    kept: list[Encoded] = []
    reason = f"the prompt is longer than {max_prompt_tokens} tokens"
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        encoded = encode_prompts(tokenizer, [row.prompt for row in chunk], max_prompt_tokens)
        for number, (row, ids) in enumerate(zip(chunk, encoded, strict=True), start=start + 1):
            counts.read += 1
            position = row.position or f"row {number}"
            ids = row.columns.get("prompt_ids") or ids  # tokens that the user gave
            if not ids:
                counts.drop("the tokenizer makes no tokens of the prompt", position)
            elif len(ids) <= max_prompt_tokens:
                kept.append(Encoded(row, ids))
            elif too_long == "truncate":
                counts.note(f"{reason}, and its middle was cut out", position)
                kept.append(Encoded(row, cut_middle(ids, max_prompt_tokens)))
            else:
                counts.drop(reason, position)
    if rows and not kept:
        raise DataError(
            f"None of the {len(rows)} prompts fits into {max_prompt_tokens} tokens. "
            "Raise `max_prompt_tokens`, or set `too_long: truncate`."
        )
    return kept, counts


def cut_middle(ids: Sequence[int], length: int) -> list[int]:
    """The first and the last half of `length` ids.

    One rule for all forms of prompt: the beginning (BOS, the subreddit, the first
    question) and the end (`TL;DR:`, the latest turns and `Assistant:`, a chat's
    generation prompt) both stay.
    """
    if len(ids) <= length:
        return list(ids)
    head = length // 2
    return [*ids[:head], *ids[len(ids) - (length - head) :]]


def render_prompt(tokenizer: Tokenizer, messages: list[Message]) -> str:
    """Messages as text, including the header of the assistant's turn."""
    if not tokenizer.chat_template:
        raise DataError(
            "The prompts are chat messages, but the tokenizer has no chat template. "
            "Use an instruction-tuned model's tokenizer, set `tokenizer.chat_template`, "
            "or give the prompts as text."
        )
    return _apply_template(tokenizer, messages, add_generation_prompt=True)


def render_turn(tokenizer: Tokenizer, prompt: list[Message], turn: list[Message]) -> str:
    """What the chat template writes for the assistant's turn, after the generation prompt."""
    before = render_prompt(tokenizer, prompt)
    whole = _apply_template(tokenizer, prompt + turn)
    if not whole.startswith(before):
        raise DataError(
            "The tokenizer's chat template does not write an assistant's turn as it begins one "
            f"for generation: {before[-40:]!r} is not how the answered chat continues. Set a "
            "`tokenizer.chat_template` that does both alike, or give the rows as text."
        )
    return whole[len(before) :]


def _apply_template(tokenizer: Tokenizer, messages: list[Message], **options: Any) -> str:
    try:
        text = tokenizer.apply_chat_template(cast(Any, messages), tokenize=False, **options)
    except Exception as error:  # a template is a program: it may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"The tokenizer's chat template refuses a chat of {roles} ({type(error).__name__}: "
            f"{str(error).strip()}). Change these rows to what the model was trained on, or set "
            "another `tokenizer.chat_template`."
        ) from error
    return cast(str, text)


def opening_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before any text: BOS, or nothing."""
    [with_special], [bare] = tokenizer(["a"])["input_ids"], tokenize(tokenizer, ["a"])
    for start in range(len(with_special) - len(bare) + 1):
        if with_special[start : start + len(bare)] == bare:
            return list(with_special[:start])
    return []


def tokenize(tokenizer: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
    distinct = list(dict.fromkeys(texts))  # preference data has several pairs per prompt
    # verbose=False: prompts that are too long are counted here and need no warning of their own.
    encoded = tokenizer(distinct, add_special_tokens=False, verbose=False, **options)
    ids = dict(zip(distinct, cast(Any, encoded["input_ids"]), strict=True))
    return [list(ids[text]) for text in texts]


def tokenize_after_text(
    tokenizer: Tokenizer, texts: list[str], *, markup: bool = False
) -> list[list[int]]:
    """Ids of texts that follow other text; what spells a special token is one only as `markup`.

    SentencePiece tokenizers put a space before the first word of a text. A text
    that follows another has none, so it is encoded after a colon, whose tokens
    are removed again unless the two merge into one token.
    """
    plain = {} if markup else {"split_special_tokens": True}
    colon, *joined = tokenize(tokenizer, [":", *(f":{text}" for text in texts)], **plain)
    merged = [i for i, ids in enumerate(joined) if ids[: len(colon)] != colon]
    alone = tokenize(tokenizer, [texts[i] for i in merged], **plain) if merged else []
    encoded = [ids[len(colon) :] for ids in joined]
    for i, ids in zip(merged, alone):
        encoded[i] = ids
    return encoded


def _ends(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> str:
    """The beginning and the end of a very long text, each of more than `max_tokens` tokens.

    Tokenizers take a minute for some ten million characters that are dropped or cut out anyway.
    """
    if max_tokens is None or len(text) <= LONG_TEXT:
        return text
    kept = (max_tokens + 1) * max(map(len, tokenizer.get_vocab()))
    return text if len(text) <= 2 * kept else text[:kept] + text[-kept:]


def _as_messages(text: Text, role: str) -> list[Message]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text
