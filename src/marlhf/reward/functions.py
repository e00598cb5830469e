"""Rewards written in Python, in TRL's form.

    def brevity(prompts, completions, **columns) -> list[float | None]:
        return [-len(completion) / 100 for completion in completions]

For each completion a function may also return a list, with one reward per line or per turn, or with
pairs (character, reward): each is then earned at its place, and not at the end.

User code may raise, hang, return NaN or too few numbers, or need a column that the data lacks. Each
of these is an error message here, with the sample that caused it.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import math
import numbers
import sysconfig
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from marlhf.config.user_code import UserCodeError, declares, import_named, is_installed
from marlhf.data import Row
from marlhf.data.collate import TokenRows
from marlhf.data.encode import decode
from marlhf.data.rows import Conversation, Text
from marlhf.errors import MarlhfError
from marlhf.spans.align import TokenBytes

T = TypeVar("T")
RESERVED = ("prompts", "completions", "completion_ids", "environments")
"""Arguments that come from the rollout; columns of these names are ignored."""
SEARCH_SECONDS = 10.0
"""Time limit for a batch that raises and for finding the row that made it raise."""
SHOWN = 200
"""Characters of a prompt or a completion in a message."""


class RewardError(MarlhfError, RuntimeError):
    """A reward that cannot be computed, with the sample that caused it if known.

    >>> import_function("brevity")
    Traceback (most recent call last):
    marlhf.reward.functions.RewardError: Cannot read 'brevity'. Write module:function, as in
    my_rewards:brevity.
    """


class Scorer(Protocol):
    """Anything that scores responses: [B], float32; or [B, T], each reward where it is earned.

    >>> def length(prompts, responses, rows):
    ...     return torch.tensor([float(len(response)) for response in responses])
    >>> scorer: Scorer = length
    >>> scorer([[1]], [[2, 3]], [Row("Why?")])
    tensor([2.])
    """

    def __call__(self, prompts: TokenRows, responses: TokenRows, rows: Sequence[Row]) -> Tensor: ...


class RewardFunction:
    """A Python function as a scorer.

    It is called by keyword with those of `prompts`, `completions`, `completion_ids`, `chosen`,
    `rejected` and the data's other columns that it names, or with all of them if it takes
    `**columns`. Prompts are as in the data, text or messages; completions are of the same kind, and
    of a conversation all messages that followed the prompt, with the object that each was played
    with in `environments`. Coroutine functions are awaited.

    The call runs in its own thread, so that a function that hangs ends the run with an error after
    `timeout` seconds. With `timeout=None` it runs in the calling thread, which functions that set
    signal handlers need.

    >>> from marlhf.models.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> def exact(completions, answer):
    ...     return [float(c.strip() == a) for c, a in zip(completions, answer)]
    >>> rows = [Row("2 + 2 =", columns={"answer": "4"}), Row("3 + 3 =", columns={"answer": "6"})]
    >>> prompts, responses = [[5], [5]], [tokenizer.encode(text) for text in (" 4", " 7")]
    >>> RewardFunction(exact, tokenizer)(prompts, responses, rows)
    tensor([1., 0.])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        timeout: float | None = 600.0,
        device: torch.device | str = "cpu",
    ) -> None:
        if not callable(function):
            raise RewardError(
                f"A reward function must be callable; got {function!r}. Give a function "
                "f(prompts, completions, **columns) that returns a list of numbers."
            )
        self.function, self.tokenizer = function, tokenizer
        self.name = name or _name(function)
        self.timeout, self.device = timeout, device
        self._known: set[str] = set()
        self._bytes: TokenBytes | None = None  # of each token; made when places are first asked for
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            raise RewardError(
                f"The arguments of `{self.name}` cannot be inspected. Wrap it in a function "
                "f(prompts, completions)."
            ) from None
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = {p.name for p in named}
        self._required = [p.name for p in named if p.default is p.empty]
        for p in parameters:
            if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
                raise self._error(
                    f"takes `{p.name}` by position only, but arguments are given by name. Remove "
                    "the `/` from its signature."
                )

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse data that lacks a required column, before any training."""
        self._known = set(self._columns(rows))

    def __call__(self, prompts: TokenRows, responses: TokenRows, rows: Sequence[Row]) -> Tensor:
        """One score per row, [B], or rewards at tokens, [B, T]; float32.

        NaN where the function returns None: it does not apply.
        """
        if not rows:
            return torch.zeros(0, device=self.device)
        texts = [decode(self.tokenizer, ids) for ids in responses]
        given = self._columns(rows) | {
            "prompts": [row.prompt for row in rows],
            "completions": [_completion(row, text) for row, text in zip(rows, texts, strict=True)],
            "completion_ids": [list(ids) for ids in responses],
        }
        played = [row.conversation and row.conversation.environment for row in rows]
        if any(environment is not None for environment in played):
            given["environments"] = played
        elif "environments" in self._required:
            raise self._error(
                "takes `environments`, the objects that conversations were played with, and there "
                "are none. Give the trainer an environment_factory, whose objects are in this "
                "process: not `own_process = True`."
            )
        arguments = {k: v for k, v in given.items() if self._takes_all or k in self._named}
        start = time.perf_counter()
        try:
            returned = self._call(arguments, self.timeout)
        except RewardError:
            raise
        except (Exception, SystemExit) as error:
            until = start + SEARCH_SECONDS
            at = self._culprit(arguments, len(rows), type(error), until)
            sample = f"No single sample of the batch of {len(rows)} causes it alone."
            if at is not None:
                sample = f"The sample that caused it:\n{show_sample(rows[at], texts[at])}"
            threads = ""
            if "main thread" in str(error):
                threads = "\nFunctions that set signal handlers need the main thread: use "
                threads += "`timeout=None`."
            raise self._error(
                f"raised {type(error).__name__}: {error} ({_place(error)}). {sample}\n"
                f"Fix it; the same command resumes from the last checkpoint.{threads}"
            ) from error
        return self._scores(returned, rows, texts, responses)

    def _error(self, message: str) -> RewardError:
        return RewardError(f"The reward function `{self.name}` {message}")

    def _columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Each column over the batch; None where a row lacks one that is not an argument."""
        records = [_record(row) for row in rows]
        known = sorted(self._known.union(*records))
        available = [*RESERVED, *known]
        for name in self._required:
            if name not in available and rows:
                near = difflib.get_close_matches(name, available, n=1, cutoff=0.7)
                hint = f"Did you mean {near[0]}?" if near else "Add it, or give it a default."
                raise self._error(
                    f"needs `{name}`, which the data does not have. Available: "
                    f"{', '.join(available)}. {hint}"
                )
        for number, (row, record) in enumerate(zip(rows, records), start=1):
            for name in known:
                if name in self._named and name not in record:
                    raise self._error(
                        f"takes the column `{name}`, which row {number} lacks: "
                        f"{_short(row.prompt)}\nAdd that column to every row, or remove the rows "
                        "without it."
                    )
        return {name: [record.get(name) for record in records] for name in known}

    def _call(self, arguments: Mapping[str, Any], timeout: float | None) -> Any:
        try:
            return call_within(timeout, lambda: _run(self.function, arguments))
        except NotReturned:
            count = len(next(iter(arguments.values()), []))
            raise self._error(
                f"has not returned after {timeout:g} seconds for a batch of {count}. Fix what it "
                "waits for, or raise its timeout; the same command resumes from the last "
                "checkpoint."
            ) from None

    def _culprit(
        self, arguments: Mapping[str, Any], count: int, kind: type[BaseException], until: float
    ) -> int | None:
        """The first row that raises the same error alone; None if none does in time."""
        for i in range(count):
            left = until - time.perf_counter()
            if left <= 0:
                return None
            alone = {name: values[i : i + 1] for name, values in arguments.items()}
            try:
                self._call(alone, None if self.timeout is None else left)
            except RewardError:
                return None
            except (Exception, SystemExit) as raised:
                if type(raised) is kind:
                    return i
        return None

    def _scores(
        self, returned: Any, rows: Sequence[Row], texts: Sequence[str], responses: TokenRows
    ) -> Tensor:
        wanted = f"It must return a list of {len(rows)} numbers, one per completion, or None where "
        wanted += f"it does not apply. {FORMS}"
        if isinstance(returned, (Tensor, np.ndarray)) and returned.ndim == 1:
            returned = returned.tolist()
        if not isinstance(returned, (list, tuple)):
            kind = type(returned).__name__
            raise self._error(f"returned {kind}: {_short(returned)}. {wanted}")
        if len(returned) != len(rows):
            raise self._error(
                f"returned {len(returned)} values for {len(rows)} completions. {wanted}"
            )
        scores: list[float] = []
        earned: dict[int, list[tuple[int, float]]] = {}  # by row, where rewards have places
        for i, (value, row, text) in enumerate(zip(returned, rows, texts)):
            if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1:
                earned[i] = self._places(value, row, text, responses[i])
                scores.append(0.0)
                continue
            number = _number(value)
            if number is None:
                raise self._error(
                    f"returned {_short(value)}, which is not a number, for\n"
                    f"{show_sample(row, text)}\n{wanted}"
                )
            if value is not None and not abs(number) <= torch.finfo(torch.float32).max:
                raise self._error(
                    f"returned {number} for\n{show_sample(row, text)}\nReturn a finite number, or "
                    "None where it does not apply; the same command resumes from the last "
                    "checkpoint."
                )
            scores.append(number)
        whole = torch.tensor(scores, dtype=torch.float32)
        if earned:
            lengths = [len(response) for response in responses]
            whole = at_last_tokens(whole, lengths, max(lengths))
            for i, rewards in earned.items():
                for token, reward in rewards:
                    whole[i, token] += reward
        return whole.to(self.device)

    def _places(
        self, value: Any, row: Row, text: str, response: Sequence[int]
    ) -> list[tuple[int, float]]:
        def anchors() -> list[int]:
            if self._bytes is None:
                self._bytes = TokenBytes.of(self.tokenizer)
            return self._bytes.align([response]).row(0)

        try:
            return place(value, text, len(response), row.conversation, anchors)
        except ValueError as error:
            raise self._error(
                f"returned {_short(value)}, which does not fit the completion: {error}.\n"
                f"{show_sample(row, text)}"
            ) from error


def reward_function(function: T) -> T:
    """Mark a function, or a class whose objects score, as a reward that recipes may name.

    >>> @reward_function
    ... def brevity(completions, **columns):
    ...     return [-len(completion) / 100 for completion in completions]
    >>> brevity(["four"])
    [-0.04]
    """
    function.__marlhf_reward__ = True  # pyright: ignore
    return function


def import_function(name: str, code: Collection[str] | None = None) -> Callable[..., Any]:
    """A reward named `module:name`; of a class an object, so that a reward may keep state.

    `code` has the modules of the user's own that a recipe declares. Whatever is neither in one of
    them nor marked as a reward is refused: many functions of installed packages run programs, and
    would be called with the columns of the data. None takes any function, for names that the user
    has typed or trusts.

    >>> type(import_function("marlhf.reward.code:unit_tests", code=())).__name__
    'UnitTests'
    """
    try:
        function = import_named(name)
    except UserCodeError as error:
        raise RewardError(str(error)) from error
    marked = getattr(function, "__marlhf_reward__", None) is True
    if code is not None and not marked and is_installed(name):
        raise RewardError(
            f"{name} is a function of an installed package that is not marked as a reward, so it "
            "is not called. Write a function of your own that calls it, or mark it there with "
            "@marlhf.reward.reward_function."
        )
    if code is not None and not marked and not declares(code, name):
        raise RewardError(
            f"The recipe names {name}, but does not declare the code it runs. Add `code: "
            f"[{name.partition(':')[0]}]` to it, or mark the function with "
            "@marlhf.reward.reward_function."
        )
    try:
        return function() if isinstance(function, type) else function
    except Exception as error:
        raise RewardError(
            f"{name} is a class that cannot be created without arguments ({error}). Name an "
            "object or a function instead."
        ) from error


class NotReturned(MarlhfError, TimeoutError):
    """A call that takes longer than it may. Its thread cannot be stopped."""


def call_within(seconds: float | None, call: Callable[[], T]) -> T:
    """Call in a thread of its own, and stop waiting for it after a time; None calls directly.

    Thread-local state of torch and Python is passed on: the current GPU, context variables.
    """
    if seconds is None:
        return call()
    outcome: Future[T] = Future()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    context = contextvars.copy_context()

    def work() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            outcome.set_result(context.run(call))
        except (Exception, SystemExit) as error:
            outcome.set_exception(error)
        except BaseException as error:  # it must not look as if the user had stopped the run
            outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    # Not a pool, whose threads Python waits for when it ends.
    threading.Thread(target=work, name="user code", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise NotReturned(f"it has not returned after {seconds:g} seconds")
    return outcome.result()


@torch.no_grad()
def _run(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    returned = function(**arguments)
    if not inspect.isawaitable(returned):
        return returned

    async def finish() -> Any:
        return await returned

    return asyncio.run(finish())


def _record(row: Row) -> dict[str, Any]:
    """The columns of a row for a function, without its prompt."""
    pair = {"chosen": row.chosen, "rejected": row.rejected}
    given = {name: text for name, text in pair.items() if text is not None}
    return {k: v for k, v in row.columns.items() if k not in RESERVED} | given


def _completion(row: Row, text: str) -> Text | list[dict[str, Any]]:
    """A response in the form of its prompt: text, or the messages that followed."""
    if row.conversation is not None:
        return row.conversation.messages
    return text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]


def _name(function: Any) -> str:
    if isinstance(function, partial):
        return _name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _number(value: Any) -> float | None:
    """A value as a float: NaN for None, None if it is not a number."""
    if value is None:
        return float("nan")
    if isinstance(value, str) or not isinstance(value, (numbers.Real, np.generic, Tensor)):
        return None
    try:
        return float(cast(Any, value))
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError, RuntimeError):
        return None


def _place(error: BaseException) -> str:
    """The file and line in the user's own code that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    library = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], __file__)
    own = [frame for frame in frames if not frame.filename.startswith((*library, "<"))]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


def show_sample(row: Row, text: str) -> str:
    """A sample as lines of an error message."""
    return f"  prompt:     {_short(row.prompt)}\n  completion: {_short(text)}"


def _short(value: Any) -> str:
    """A repr on one line, shortened in the middle if it is long."""
    text = repr(value)
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]} ... {text[-half:]}"


FORMS = (
    "For parts of a completion return a list: one number per turn of a conversation or per line of "
    "a single response, or pairs (character, reward)."
)


def place(
    value: Any,
    text: str,
    count: int,
    conversation: Conversation | None,
    anchors: Callable[[], Sequence[int]],
) -> list[tuple[int, float]]:
    """The token at which each reward of a list is earned, and the reward.

    `count` is the number of tokens, `anchors` gives the character at which each stands. Raises
    `ValueError` where the list does not fit the response.

    >>> place([1.0, -1.0], "Yes.\\nNo.", 4, None, lambda: [0, 3, 5, 7])
    [(1, 1.0), (3, -1.0)]
    >>> place([(0, 1.0)], "Yes.\\nNo.", 4, None, lambda: [0, 3, 5, 7])
    [(0, 1.0)]
    """
    items = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)
    pairs = bool(items) and all(isinstance(item, (list, tuple)) for item in items)
    if pairs and any(len(item) != 2 for item in items):
        raise ValueError(f"not every item is a pair (character, reward). {FORMS}")
    rewards = [_finite(item[1] if pairs else item) for item in items]
    if pairs and conversation is not None:
        raise ValueError("a conversation has turns: return one number per turn, or a single number")
    if pairs:
        where = [item[0] for item in items]
        for character in where:
            if isinstance(character, bool) or not isinstance(character, (int, np.integer)):
                raise ValueError(f"the place {character!r} is no character number")
            if not 0 <= character <= len(text):
                raise ValueError(f"the place {character} is outside its {len(text)} characters")
    elif conversation is not None:
        turns = conversation.turn_ends
        if len(items) != len(turns):
            raise ValueError(f"it has {len(turns)} turns, but there are {len(items)} rewards")
        return [(end - 1, reward) for end, reward in zip(turns, rewards)]
    else:
        lines = text.splitlines(keepends=True)
        if len(items) != len(lines):
            raise ValueError(f"it has {len(lines)} lines, but there are {len(items)} rewards")
        ends = np.cumsum([len(line) for line in lines]).tolist()
        where = [end - 1 - (len(x) - len(x.rstrip())) for end, x in zip(ends, lines)]
    starts = list(anchors()) if items else []
    last = count - 1
    return [(min(max(bisect_right(starts, c) - 1, 0), last), r) for c, r in zip(where, rewards)]


def at_last_tokens(scores: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """One number per row as a reward at the row's last token: [B] -> [B, T].

    >>> at_last_tokens(torch.tensor([2.0, 3.0]), [1, 3], 3)
    tensor([[2., 0., 0.],
            [0., 0., 3.]])
    """
    columns = torch.arange(width, device=scores.device)
    last = torch.tensor(lengths, device=scores.device)[:, None] - 1
    return torch.where(columns == last, scores[:, None], 0.0)


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number. {FORMS}") from None
    except OverflowError:
        number = math.inf
    if isinstance(value, str) or not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{_short(value)} is not a finite number")
    return number
