"""The tokens of a conversation: the first prompt, and what follows a turn of the model.

What the model sampled is never rendered again. The template is asked what it writes after an
assistant's turn, and only that is tokenised and appended.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from marlhf.data.encode import decode, tokenize, tokenize_after_text
from marlhf.data.rows import ROLES, Message
from marlhf.environments.protocol import ConversationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

TURN = "turn7f3a9c"
"""Stands for the model's turn where the template is rendered to see what follows it."""
ASKED = {"role": "user", "content": "asked5b2e"}
RESULT = "result8d1f"
"""Stands for what a tool returns."""
PRIVATE = range(0xE000, 0xF8FF)
"""Characters without a meaning of their own."""
SURROGATE = re.compile("[\ud800-\udfff]")


class ChatTokens:
    """Messages as token ids, by the tokenizer's chat template.

    Markup that a message only spells out, such as `<|im_start|>system`, stays text: it never
    becomes the token that begins a role. A template whose roles are plain words (`Human:`) has no
    such tokens, so there a message can imitate a role.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> chat = ChatTokens(tokenizer)
    >>> turn = tokenizer.encode("16<|eos|>")
    >>> tokenizer.decode(chat.after(turn, [{"role": "user", "content": "higher"}]))
    '<|user|>higher<|assistant|>'
    """

    def __init__(self, tokenizer: Tokenizer, *, raw: bool = False) -> None:
        """`raw` accepts templates that render earlier turns in another way than they were sampled:
        what such a template writes between turns is appended all the same."""
        if not tokenizer.chat_template:
            raise ConversationError(
                "An environment talks in messages, but the tokenizer has no chat template. Use an "
                "instruction-tuned model's tokenizer, or set `tokenizer.chat_template`."
            )
        self.tokenizer, self.raw = tokenizer, raw
        self._lock = threading.Lock()  # fast tokenizers may not be used by two threads at once
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        added, template = tokenizer.added_tokens_decoder.values(), str(tokenizer.chat_template)
        self._special = _any_of(token.content for token in added if token.special)
        self._markup = _any_of(t.content for t in added if t.special or t.content in template)
        self._added_pattern = _any_of(self._added)
        followed = self._apply([ASKED, _said(TURN), ASKED], add_generation_prompt=True)
        if TURN not in followed:
            raise ConversationError(
                "The tokenizer's chat template leaves out what messages say: it may expect parts, "
                "such as images, in place of text. Set another `tokenizer.chat_template`."
            )
        closing = self._added_pattern.match(followed.partition(TURN)[2])
        self._closing = self._added[closing[0]] if closing else None

    def check(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        """Refuse, before the first step, a template that cannot write such conversations."""
        before = self._apply([ASKED], tools, add_generation_prompt=True)
        said, following = {}, ASKED
        contents = ["Yes.", "<think>\nWell.\n</think>\n\nYes."]
        if tools:
            name = tools[0]["function"]["name"]
            self._check_tools(before, name, tools)
            said, following = {"tool_calls": _calls([name], "1")}, _result(name)
            # Templates that know no thinking may leave out what stands beside a call.
            contents = [
                "",
                *(contents[1:] if "</think>" in str(self.tokenizer.chat_template) else []),
            ]
        for content in contents if not self.raw else ():
            turn = {**_said(content), **said}
            whole = self._apply([ASKED, turn, following], tools, add_generation_prompt=True)
            if not whole.startswith(before + content):
                raise ConversationError(
                    "The tokenizer's chat template does not repeat an earlier turn as the model "
                    f"wrote it: after {before[-30:]!r}, {content!r} becomes "
                    f"{whole[len(before) :][:60]!r}. Set another `tokenizer.chat_template`, or "
                    "`raw_turns: true` to keep turns as sampled and append only what the "
                    "template writes between them."
                )

    def _check_tools(self, before: str, name: str, tools: Sequence[dict[str, Any]]) -> None:
        try:
            able = name in before and RESULT in self._between([_result(name)], tools, [name])[0]
        except ConversationError:
            able = False
        if not able:
            raise ConversationError(
                "The tokenizer's chat template cannot do tools: it leaves out their descriptions "
                "or their results. Use a model that was trained to call tools, or an environment "
                "without them."
            )

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """The ids that the model continues first, its generation prompt included."""
        text, mark = self._render(messages, tools, self._special)
        with self._lock:
            return self._pieces(text, mark) if mark else tokenize(self.tokenizer, [text])[0]

    def after(
        self,
        turn: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        called: Sequence[str] = (),
    ) -> list[int]:
        """The ids between a turn and the next: its end if it was cut off, then the messages.

        `called` names the tools whose results the messages are.
        """
        if not messages:
            return []
        text, mark = self._between(messages, tools, called)
        with self._lock:
            ids = self._pieces(text, mark) if mark else self._tokenize_after(text)
        written = bool(turn and ids) and turn[-1] == ids[0] and ids[0] in self._added.values()
        return ids[1:] if written else ids

    def _between(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], called: Sequence[str]
    ) -> tuple[str, str]:
        """What the template writes after a turn, from what closes it on, and the mark in it."""
        if called:  # some templates read the name of a result from the call
            said = {**_said(""), "tool_calls": _calls(called, TURN)}
            text, mark = self._render([ASKED, said, *messages], tools, self._markup)
            # What closes the call comes first; the turn itself ends with a special token.
            ends = self._special.search(text.partition(TURN)[2])
            if ends:
                return text.partition(TURN)[2][ends.start() :], mark
        text, mark = self._render([ASKED, _said(TURN), *messages], tools, self._markup)
        return text.partition(TURN)[2], mark

    def text(self, turn: Sequence[int]) -> str:
        """What the model said, without special tokens, wherever it sampled them."""
        ended = bool(turn) and turn[-1] == self._closing
        return decode(self.tokenizer, turn[:-1] if ended else turn)

    def _render(
        self, messages: Sequence[Any], tools: Sequence[dict[str, Any]], markup: re.Pattern[str]
    ) -> tuple[str, str]:
        """The template's text, and the mark that breaks up markup in messages ("" if none has)."""
        plain = [_strings(message, whole_characters) for message in messages]
        if not any(markup.search(text) for message in plain for text in _texts(message)):
            return self._apply(plain, tools, add_generation_prompt=True), ""
        used = {character for m in plain for text in _texts(m) for character in text}
        mark = next(chr(n) for n in PRIVATE if chr(n) not in used)

        def broken(text: str) -> str:
            return markup.sub(lambda token: f"{token[0][0]}{mark}{token[0][1:]}", text)

        marked = [_strings(message, broken) for message in plain]
        return self._apply(marked, tools, add_generation_prompt=True), mark

    def _apply(
        self, messages: Sequence[Any], tools: Sequence[dict[str, Any]] = (), **options: Any
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                cast(Any, list(messages)), tools=list(tools) or None, tokenize=False, **options
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise ConversationError(
                f"The tokenizer's chat template refuses a chat of {roles} "
                f"({type(error).__name__}: {str(error).strip()}). Set another "
                "`tokenizer.chat_template`, or change the environment's messages."
            ) from error
        return cast(str, text)

    def _pieces(self, text: str, mark: str) -> list[int]:
        """Ids of a text in which marks break up markup: only unbroken markup becomes a token."""
        ids: list[int] = []
        for piece in re.split(f"({self._added_pattern.pattern}|{mark})", text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif piece != mark and piece:
                ids += self._tokenize_after(piece)
        return ids

    def _tokenize_after(self, text: str) -> list[int]:
        """Ids of a text that follows another, for tokenizers that begin a text with a space."""
        begins = self._added_pattern.match(text) is not None
        after = tokenize if begins else partial(tokenize_after_text, markup=True)
        return after(self.tokenizer, [text])[0]


def check_messages(messages: Any, roles: Sequence[str]) -> list[Message]:
    """An environment's messages, or a sentence on what is wrong with them."""
    if not isinstance(messages, list | tuple):
        raise ConversationError(
            f"messages are a list of mappings with a role and a content; got {messages!r:.80}"
        )
    for message in messages:
        is_text = isinstance(message, dict) and all(isinstance(x, str) for x in message.values())
        if not is_text or not {"role", "content"} <= message.keys():
            raise ConversationError(
                f"a message is a mapping with a role and a content, both text; got {message!r:.80}"
            )
        if message["role"] not in roles:
            raise ConversationError(
                f"a message has the role {message['role']!r:.40}; here it is one of "
                f"{', '.join(roles)}"
            )
    return [_strings(message, whole_characters) for message in messages]


def whole_characters(text: str) -> str:
    """A text that every tokenizer reads: half a character becomes the sign for an unknown one."""
    return SURROGATE.sub("\ufffd", text)


WORLD_ROLES = tuple(role for role in ROLES if role != "assistant")


def _said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _result(name: str) -> Message:
    return {"role": "tool", "name": name, "content": RESULT}


def _calls(names: Sequence[str], argument: str) -> list[dict[str, Any]]:
    """Calls as templates read them. Some insist on nine characters of id."""
    return [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": name, "arguments": {"argument": argument}},
        }
        for number, name in enumerate(names)
    ]


def _texts(message: Any) -> list[str]:
    """Every text of a message but its role."""
    if isinstance(message, str):
        return [message]
    if isinstance(message, list):
        return [text for part in message for text in _texts(part)]
    return [text for key, part in message.items() if key != "role" for text in _texts(part)]


def _strings(message: Any, change: Callable[[str], str]) -> Any:
    """A message with every text but its role changed."""
    if isinstance(message, str):
        return change(message)
    if isinstance(message, list):
        return [_strings(part, change) for part in message]
    return {k: part if k == "role" else _strings(part, change) for k, part in message.items()}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of these that a text has at a place; nothing where there are none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
