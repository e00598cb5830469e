"""A judge behind any OpenAI-compatible server; each reply is on disk before it is read.

A reply has been paid for, so its body is stored as it came. It is parsed afterwards, each time it
is needed, by functions that raise on nothing that a server may send.

The key comes from the environment alone. It is never written, and is removed from everything that a
server sends before that is shown or stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from marlhf.judge.criteria import Answer, Criteria, Question
from marlhf.judge.pairs import JudgeError, prompt_text

ATTEMPTS = 3
"""Replies to one question before it is left without an answer."""
RETRIES = 8
"""Further requests after a rate limit, a server error, a lost connection or a malformed body."""
MAX_WAIT = 60.0
"""Seconds between two requests at most, whatever a server asks for."""
MAX_TOKENS = 2048
MAX_BODY = 1 << 20
"""Characters of a body; longer ones are malformed."""
CHARS_PER_TOKEN = 4
KEY = "OPENAI_API_KEY"
RESUME = "Replies so far are stored; the same command resumes from there."


class Reply(NamedTuple):
    content: str
    tokens_in: int | None
    tokens_out: int | None


class Estimate(NamedTuple):
    """How many questions are left to ask, and how many tokens they will take."""

    questions: int
    known: int
    tokens_in: int
    tokens_out: int


class Cache:
    """Replies in SQLite, in the order in which a question got them; safe to kill at any time.

    marlhf 0.1 stored contents in `replies`; since then whole bodies are stored in `bodies`.
    """

    def __init__(self, path: Path | None) -> None:
        """Open a file, or create it; None keeps replies in memory."""
        self.path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", timeout=60, check_same_thread=False)
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS replies (question TEXT, attempt INTEGER, content TEXT, "
                "tokens_in INTEGER, tokens_out INTEGER, PRIMARY KEY (question, attempt))"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS bodies (question TEXT, attempt INTEGER, body TEXT, "
                "PRIMARY KEY (question, attempt))"
            )
        except (sqlite3.Error, OSError) as error:
            raise JudgeError(
                f"Cannot store replies in {path}: {error}. Give another --cache."
            ) from error

    def replies(self, question: str) -> list[Reply]:
        with self._explained():
            known = self._db.execute(
                "SELECT attempt, content, tokens_in, tokens_out, NULL FROM replies "
                "WHERE question = ?1 UNION ALL "
                "SELECT attempt, NULL, NULL, NULL, body FROM bodies WHERE question = ?1 "
                "ORDER BY attempt",
                (question,),
            ).fetchall()
        return [
            Reply(*stored) if body is None else read_body(body) or Reply("", None, None)
            for _, *stored, body in known
        ]

    def add(self, question: str, attempt: int, body: str) -> None:
        with self._explained(), self._db:  # a transaction: on disk when this returns
            self._db.execute(
                "INSERT OR IGNORE INTO bodies VALUES (?, ?, ?)", (question, attempt, body)
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JudgeError(
                f"Cannot use {self.path}, where replies are stored: {error}. If the disk is full, "
                f"free some space, or give another --cache. {RESUME}"
            ) from error

    def close(self) -> None:
        self._db.close()


def read_body(body: str) -> Reply | None:
    """The reply in a response body; None if it is not a chat completion.

    Servers differ in what they send instead of a text: null, parts, a number. The text is what
    there is of it, perhaps nothing.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        return None
    choice = next(iter(data["choices"]), None)
    message = choice.get("message") if isinstance(choice, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    usage = data.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    tokens_in, tokens_out = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Reply(_text(content), _count(tokens_in), _count(tokens_out))


def _text(content: object) -> str:
    if isinstance(content, list):  # parts: {"type": "text", "text": ...}
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        try:
            content = json.dumps(content)
        except RecursionError:
            content = ""
    # A lone surrogate cannot be sent back to the server.
    return (content or "").encode("utf-8", "replace").decode("utf-8")


def _count(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < 1 << 40 else None


class OpenAIJudge:
    """Asks a model which of two responses is better, several questions at a time."""

    def __init__(
        self,
        model: str,
        criteria: Criteria,
        cache: Cache,
        *,
        base_url: str | None = None,
        concurrency: int = 8,
        timeout: float = 120.0,
    ) -> None:
        self.model = model
        self.criteria = criteria
        self.cache = cache
        self.base_url = base_url or os.environ.get("OPENAI_BASE_URL")
        self.concurrency = concurrency
        self.timeout = timeout
        self.faults: dict[str, int] = {}
        """Why questions have no answer, and how many for each reason."""
        self._options: dict[str, Any] = {
            "temperature": 0,
            "max_completion_tokens": MAX_TOKENS,
            "response_format": criteria.schema(),
        }

    def estimate(self, questions: Sequence[Question]) -> Estimate:
        """What is left to ask; a token is about four characters."""
        unique = self._unique(questions)
        waiting = [question for question in unique.values() if not self._known(question)]
        tokens = sum(_tokens(self._num_chars(question)) for question in waiting)
        known = len(unique) - len(waiting)
        return Estimate(len(unique), known, tokens, len(waiting) * self.criteria.answer_tokens)

    def spent(self, questions: Sequence[Question]) -> tuple[int, int]:
        """Tokens of all replies to these questions, whenever they came; estimated if unknown."""
        tokens_in = tokens_out = 0
        for key, question in self._unique(questions).items():
            for reply in self.cache.replies(key):
                if reply.tokens_in is None:
                    tokens_in += _tokens(self._num_chars(question))
                if reply.tokens_out is None:
                    tokens_out += _tokens(len(reply.content))
                tokens_in += reply.tokens_in or 0
                tokens_out += reply.tokens_out or 0
        return tokens_in, tokens_out

    def answer(
        self, questions: Sequence[Question], progress: Callable[[int, int], None]
    ) -> list[Answer | None]:
        """One answer per question, None if there is none. Resumes where it stopped."""
        unique = self._unique(questions)
        waiting = {key: q for key, q in unique.items() if not self._known(q)}
        if waiting:
            _run(lambda: self._ask_all(waiting, len(unique) - len(waiting), progress))
        self._count_unreadable(unique)
        return [self._stored(self._key(question)) for question in questions]

    def _unique(self, questions: Sequence[Question]) -> dict[str, Question]:
        return {self._key(question): question for question in questions}

    def _num_chars(self, question: Question) -> int:
        return sum(len(m["content"]) for m in self.criteria.messages(question))

    def _key(self, question: Question) -> str:
        """Everything that determines a reply, with the order of the responses."""
        content = [prompt_text(question.prompt), question.reference]
        content += [question.first.text, question.second.text]
        system = self.criteria.messages(question)[0]["content"]
        data = json.dumps([self.base_url, self.model, self.criteria.task, system, content])
        return hashlib.sha256(data.encode()).hexdigest()

    def _known(self, question: Question) -> bool:
        key = self._key(question)
        return self._stored(key) is not None or len(self.cache.replies(key)) >= ATTEMPTS

    def _stored(self, key: str) -> Answer | None:
        replies = self.cache.replies(key)
        return self.criteria.parse(replies[-1].content)[0] if replies else None

    def _count_unreadable(self, unique: dict[str, Question]) -> None:
        bad = sum(len(self.cache.replies(k)) >= ATTEMPTS and not self._stored(k) for k in unique)
        if bad:
            self.faults[f"no answer in the expected format in {ATTEMPTS} replies"] = bad

    async def _ask_all(
        self, waiting: dict[str, Question], done: int, progress: Callable[[int, int], None]
    ) -> None:
        """Workers share a queue. After a failure none starts another question, but requests in
        flight are awaited: they are paid for."""
        queue = iter(waiting.items())
        total = done + len(waiting)
        failures: list[JudgeError] = []

        async def work(client: Any) -> None:
            nonlocal done
            for key, question in queue:
                if failures:
                    return
                try:
                    await self._settle(client, key, question)
                except JudgeError as error:
                    failures.append(error)
                done += 1
                progress(done, total)

        async with self._client() as client:
            await asyncio.gather(*(work(client) for _ in range(self.concurrency)))
        if failures:
            raise failures[0]

    async def _settle(self, client: Any, key: str, question: Question) -> None:
        """Ask until a reply can be read; each time with what was wrong with the last."""
        replies = self.cache.replies(key)
        while len(replies) < ATTEMPTS:
            messages = self.criteria.messages(question)
            for reply in replies:
                answer, fault = self.criteria.parse(reply.content)
                if answer is not None:
                    return
                again = f"That cannot be read: {fault}. Answer with one JSON object in this form "
                messages += [
                    {"role": "assistant", "content": reply.content or "(nothing)"},
                    {"role": "user", "content": f"{again}and nothing else:\n"
                     f"{self.criteria.example}"},
                ]  # fmt: skip
            body = await self._ask(client, messages)
            if body is None:
                return
            self.cache.add(key, len(replies), body)
            replies = self.cache.replies(key)

    async def _ask(self, client: Any, messages: list[dict[str, str]]) -> str | None:
        """The body of one reply; None if the server refuses this question but not the others."""
        import openai

        failed, timeouts = 0, 0
        while True:
            sent = dict(self._options)
            try:
                # One limit from the request to the last byte: a server that sends a byte now and
                # then would never exceed a limit on single reads.
                request = client.chat.completions.with_raw_response.create(
                    model=self.model, messages=messages, **sent
                )
                response = await asyncio.wait_for(request, self.timeout)
                body = self._scrub(response.content.decode("utf-8", "replace"))
                if len(body) <= MAX_BODY and read_body(body) is not None:
                    return body
                error: Exception = ValueError(f"not a chat completion: {body[:200]!r}")
                malformed = True
            except openai.BadRequestError as refusal:
                # Not every server and model supports every option; those named are left out.
                refused = [name for name in sent if name in str(refusal)]
                if not refused:
                    fault = f"refused by the server: {self._scrub(str(refusal))[:200]}"
                    self.faults[fault] = self.faults.get(fault, 0) + 1
                    return None
                for name in refused:
                    self._options.pop(name, None)
                continue
            except (asyncio.TimeoutError, openai.APITimeoutError):
                timeouts += 1
                if timeouts > 1:
                    raise JudgeError(
                        f"{_host(self.base_url)} did not complete a reply within {self.timeout:g} "
                        f"seconds, twice. Raise --timeout, or lower --concurrency. {RESUME}"
                    ) from None
                continue
            except (openai.OpenAIError, ValueError) as problem:
                error, malformed = problem, False
            failed += 1
            if failed > RETRIES or not (malformed or _may_pass(error)):
                # Not `from error`: its chain may contain the headers of the request.
                raise self._failure(error, malformed) from None
            await asyncio.sleep(_wait(error, failed))

    def _client(self) -> Any:
        try:
            import openai
        except ImportError:
            raise JudgeError(
                "Judging over the network needs the openai client: pip install 'marlhf[judge]'."
            ) from None
        key = os.environ.get(KEY)
        if not key and self.base_url is None:
            raise JudgeError(
                f"There is no {KEY} in the environment. Set it, or give the --base-url of a "
                "server that needs none."
            )
        return openai.AsyncOpenAI(
            api_key=key or "none", base_url=self.base_url, max_retries=0, timeout=self.timeout
        )

    def _failure(self, error: Exception, malformed: bool) -> JudgeError:
        import openai

        host = _host(self.base_url)
        cause = self._scrub(str(error))[:300]
        if malformed:
            return JudgeError(
                f"{host} is not a chat-completions server: {RETRIES + 1} replies in a row were "
                f"malformed. --base-url usually ends in /v1. {RESUME} ({cause})"
            )
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            return JudgeError(f"{host} does not accept the key in {KEY}. ({cause})")
        if isinstance(error, openai.NotFoundError):
            return JudgeError(
                f"{host} has no model {self.model!r}, or --base-url is wrong. ({cause})"
            )
        if isinstance(error, openai.RateLimitError):
            return JudgeError(
                f"{host} still limits the rate after {RETRIES} waits. Lower --concurrency, or "
                f"wait. {RESUME} ({cause})"
            )
        return JudgeError(f"{host} failed {RETRIES + 1} times in a row. {RESUME} ({cause})")

    def _scrub(self, text: str) -> str:
        key = os.environ.get(KEY)
        return text.replace(key, "[key]") if key else text


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


def _wait(error: Exception, failed: int) -> float:
    """Seconds until the next request: as the server asks, else longer each time."""
    import openai

    headers = error.response.headers if isinstance(error, openai.APIStatusError) else {}
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return min(max(0.0, scale * float(headers[name])), MAX_WAIT)
        except (KeyError, ValueError):  # absent, or a date
            continue
    return min(0.5 * 2 ** (failed - 1), 8.0) * random.uniform(0.75, 1.0)


def _tokens(chars: int) -> int:
    return chars // CHARS_PER_TOKEN + 1


def _host(base_url: str | None) -> str:
    """The server's name, without a password that a URL may contain."""
    from urllib.parse import urlsplit

    parts = urlsplit(base_url or "https://api.openai.com")
    return parts.hostname or "The server"


def _run(work: Callable[[], Any]) -> None:
    """Run a coroutine; in a thread if an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work())
        return
    errors: list[BaseException] = []

    def inside() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
