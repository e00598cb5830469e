"""Tools: Python functions that the model may call, in TRL's forms.

Functions have type hints and a docstring in Google's style, from which transformers makes the
schema that the chat template shows. They may be coroutine functions. They run in this process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from transformers.utils.chat_template_utils import get_json_schema

from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import ConversationError, Step, from_user

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)
"""How Hermes, Qwen and many others write a call."""
FENCE = re.compile(r"```\w*\s*?\n(.*?)```", re.S)
UNREADABLE = "unreadable"
"""The name of a tool in the result of a call that has none."""
NOT_TOOLS = ("reset", "get_reward", "close")
SHOWN = 500
"""Characters of an error that go back to the model."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, or why it cannot be read.

    >>> read_hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, fault='')]
    """

    name: str
    arguments: dict[str, Any]
    fault: str = ""


def read_calls(
    tokenizer: Tokenizer,
    turn: Sequence[int],
    prompt: Sequence[int],
    schemas: Sequence[dict[str, Any]],
) -> list[ToolCall]:
    """The calls in a turn, as the tokenizer's own response template reads them, if it has one."""
    if not _has_response_template(tokenizer):
        text = cast(str, tokenizer.decode(list(turn)))
        return read_hermes(text) or read_fenced(text, [s["function"]["name"] for s in schemas])
    # Which of these the parser takes depends on the version of transformers.
    options = {"prefix": list(prompt), "tools": list(schemas)}
    taken = inspect.signature(tokenizer.parse_response).parameters
    try:
        parsed = tokenizer.parse_response(
            list(turn), **{name: value for name, value in options.items() if name in taken}
        )
    except Exception as error:  # whatever the parser makes of what a model wrote
        return [_unreadable(f"{type(error).__name__}: {error}")]
    calls = parsed.get("tool_calls") if isinstance(parsed, dict) else None
    return [_to_call(call) for call in calls] if isinstance(calls, list) else []


def read_hermes(text: str) -> list[ToolCall]:
    """The calls in a text: JSON with a name and arguments between `<tool_call>` tags."""
    calls: list[ToolCall] = []
    for written, end in HERMES.findall(text):
        try:
            calls.append(_to_call(_read_json(written)) if end else _unreadable("it is cut off"))
        except (ValueError, RecursionError) as error:
            calls.append(_unreadable(f"it is not JSON: {error}"))
    return calls


def read_fenced(text: str, tools: Sequence[str]) -> list[ToolCall]:
    """The calls in a text's code blocks, where some models put them whatever the template says.

    Qwen2.5-Coder nearly always does. Other blocks are not calls, such as one that begins with a
    brace and names none of the tools.

    >>> read_fenced('```json\\n{"name": "add", "arguments": {"a": 1}}\\n```', ["add"])
    [ToolCall(name='add', arguments={'a': 1}, fault='')]
    """
    calls: list[ToolCall] = []
    for block in FENCE.findall(text):
        named = re.match(r"\s*\{+\s*\"name\":\s*\"(\w+)\"", block)
        if named is None or named[1] not in tools:
            continue
        try:
            calls.append(_to_call(_read_json(block)))
        except (ValueError, RecursionError) as error:
            calls.append(_unreadable(f"it is not JSON: {error}"))
    return calls


def _read_json(text: str) -> Any:
    """JSON, whose texts may break lines, as models write code.

    In doubled braces too: by mistake the template of Qwen2.5-Coder shows calls so.
    """
    text = text.strip()
    if text[:2] == "{{":
        return json.JSONDecoder(strict=False).raw_decode(text, 1)[0]
    return json.loads(text, strict=False)


def _has_response_template(tokenizer: Tokenizer) -> bool:
    """By either name: `response_schema` was the one before transformers 5.13."""
    names = ("response_template", "response_schema")
    return any(getattr(tokenizer, name, None) is not None for name in names)


def _to_call(value: Any) -> ToolCall:
    call = value.get("function", value) if isinstance(value, dict) else None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return _unreadable("it has no name")
    arguments: Any = call.get("arguments") if isinstance(call, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = _read_json(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, f"the arguments are not JSON: {error}")
    if arguments is None:
        return ToolCall(name, {})
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are not a JSON object")
    return ToolCall(name, arguments)


def written_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls as messages hold them for templates and for TRL's reward functions.

    >>> written_calls([ToolCall("add", {"a": 1}), ToolCall(UNREADABLE, {}, "it is cut off")])
    [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
    """
    return [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
        if call.name != UNREADABLE
    ]


def _unreadable(why: str) -> ToolCall:
    return ToolCall(UNREADABLE, {}, f"the call cannot be read: {why}")


class Toolbox:
    """Functions by name, with their schemas.

    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: One.
    ...         b: The other.
    ...     '''
    ...     return a + b
    >>> Toolbox([add]).run([ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"c": 1})])[0]
    [{'role': 'tool', 'name': 'add', 'content': '3'}, {'role': 'tool', 'name': 'add',
    'content': "error: missing a required argument: 'a'"}]
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            name = getattr(function, "__name__", "")
            if not callable(function) or not name:
                raise ConversationError(f"A tool is a function with a name; got {function!r:.80}.")
            if name in self.functions:
                raise ConversationError(f"Two tools are called `{name}`. Rename one of them.")
            self.functions[name] = function
        self.schemas = [_schema(function) for function in self.functions.values()]

    def run(self, calls: Sequence[ToolCall]) -> tuple[list[Message], int]:
        """A message per call, in order, and how many calls failed. Faults go to the model."""
        messages: list[Message] = []
        errors = 0
        for call in calls:
            content, fault = self._run(call)
            errors += bool(fault)
            content = f"error: {fault[:SHOWN]}" if fault else content
            messages.append({"role": "tool", "name": call.name, "content": content})
        return messages, errors

    def _run(self, call: ToolCall) -> tuple[str, str]:
        """A call's result as text, or what was wrong with it."""
        if call.fault:
            return "", call.fault
        function = self.functions.get(call.name)
        if function is None:
            return "", f"there is no tool {call.name!r:.80}; there is {', '.join(self.functions)}"
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return "", str(error)
        try:
            return str(finish(function(**call.arguments))), ""
        except (Exception, SystemExit) as error:  # the model reads whatever the tool raises
            return "", f"{type(error).__name__}: {error}"


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(function)
    except Exception as error:  # its own kinds of error for hints and for docstrings
        raise ConversationError(
            f"The tool `{function.__name__}` cannot be described to a model: {error} Give each "
            "argument a type hint and a line under `Args:` in the docstring."
        ) from error


def finish(value: Any) -> Any:
    """What a function returned; a coroutine is awaited, on one event loop for all."""
    if not inspect.isawaitable(value):
        return value
    coroutine = cast("Coroutine[Any, Any, Any]", value)
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop()).result()


def call_optional(instance: Any, name: str, *arguments: Any) -> Any:
    """What a method that a class need not have returned; None without it."""
    method = getattr(instance, name, None)
    return None if method is None else finish(method(*arguments))


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Clients of services belong to the loop of their first call, so all calls share one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="tools").start()
    return loop


class ToolEnvironment:
    """TRL's environments, and bare tools, as an Environment: a reply without a call ends it.

    `factory` makes an object with `reset(**row) -> str | None` whose public methods are tools, and
    which may have `get_reward() -> float`. With several by name, the row's column `environment`
    says which.
    """

    def __init__(
        self,
        factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self._factory, self._given = factory, list(tools)
        self.tools: list[Callable[..., Any]] = self._given
        self.inner: Any = None

    def reset(self, row: Row, seed: int) -> list[Message]:
        if self._factory is None:
            return opening(row)
        columns = {"prompt": row.prompt, **row.columns}
        self.inner = self._make(columns)
        self.tools = [*self._given, *public_methods(self.inner)]
        parameters = inspect.signature(self.inner.reset).parameters
        if "seed" in parameters:
            columns.setdefault("seed", seed)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            columns = {k: v for k, v in columns.items() if k != "prompt" or k in parameters}
        seen = finish(self.inner.reset(**columns))
        if not isinstance(seen, str | None):
            raise ConversationError(f"reset returns a text or None; got {seen!r:.80}")
        return opening(row, seen or "")

    def step(self, reply: str) -> Step:
        return Step(done=True)

    def get_reward(self) -> float | None:
        return call_optional(self.inner, "get_reward")

    def close(self) -> None:
        call_optional(self.inner, "close")

    def _make(self, columns: dict[str, Any]) -> Any:
        if not isinstance(self._factory, Mapping):
            assert self._factory is not None
            return self._factory()
        name = columns.pop("environment", None)
        if name not in self._factory:
            raise ConversationError(
                f"the row has `environment: {name}`, which is not one of "
                f"{', '.join(map(str, self._factory))}"
            )
        return self._factory[name]()


def opening(row: Row, more: str = "") -> list[Message]:
    """A row's prompt as messages, with more text at the end of the last of them."""
    if isinstance(row.prompt, str):
        return [from_user(row.prompt + more)]
    *first, last = row.prompt
    return [*first, {**last, "content": last["content"] + more} if more else last]


def public_methods(instance: Any) -> list[Callable[..., Any]]:
    """The methods that are tools. Looked up on the class: properties are not evaluated."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    return [getattr(instance, n) for n in names if not n.startswith("_") and n not in NOT_TOOLS]
