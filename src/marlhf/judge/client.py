"""A judge behind any OpenAI-compatible server; each reply is on disk before it is read.

A reply has been paid for, so its body is stored as it came. It is parsed afterwards, each time it
is needed, by functions that accept anything a server may send. A question whose replies
cannot be read is asked again the next time.

The key comes from the environment alone. It is never written, and is removed from everything that a
server sends before that is shown or stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from marlhf.judge.criteria import Answer, Criteria
from marlhf.judge.pairs import JudgeError, Pair, prompt_text
from marlhf.runs.layout import check_inside

ATTEMPTS = 3
"""Replies to one question before it is left without an answer."""
RETRIES = 8
"""Further requests by the openai client after a rate limit, a server error or a lost connection. It
waits as long as the server asks, up to a minute, else longer each time."""
MAX_TOKENS = 2048
MAX_BODY = 1 << 20
"""Characters of a body; longer ones are malformed."""
CHARS_PER_TOKEN = 4
KEY = "OPENAI_API_KEY"
RESUME = "Replies so far are stored; the same command resumes from there."


class Reply(NamedTuple):
    content: str
    tokens_in: int | None = None
    tokens_out: int | None = None


class Cache:
    """Replies in SQLite, in the order in which a question got them; safe to kill at any time."""

    def __init__(self, path: Path | None) -> None:
        """Open a file, or create it; None keeps replies in memory."""
        self.path = path
        try:
            if path is not None:
                check_inside(path)
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", timeout=60, check_same_thread=False)
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
            bodies = self._db.execute(
                "SELECT body FROM bodies WHERE question = ? ORDER BY attempt", (question,)
            ).fetchall()
        return [read_body(body) or Reply("") for (body,) in bodies]

    def add(self, question: str, body: str) -> None:
        with self._explained(), self._db:  # a transaction: on disk when this returns
            self._db.execute(
                "INSERT INTO bodies SELECT ?1, count(*), ?2 FROM bodies WHERE question = ?1",
                (question, body),
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
    content = _find(data, "choices", 0, "message", "content")
    tokens = [_find(data, "usage", f"{part}_tokens") for part in ("prompt", "completion")]
    return Reply(_text(content), *map(_count, tokens))


def _find(value: Any, *keys: Any) -> Any:
    """What is at these keys; None where there is nothing."""
    for key in keys:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


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
        self.model, self.criteria, self.cache = model, criteria, cache
        self.base_url = base_url or os.environ.get("OPENAI_BASE_URL")
        self.host = urlsplit(self.base_url or "https://api.openai.com").hostname or "The server"
        self.concurrency, self.timeout = concurrency, timeout
        self.faults: Counter[str] = Counter()
        """Why questions have no answer, and how many for each reason."""
        self.unreadable = ""
        """The last reply that could not be read."""
        self._options: dict[str, Any] = {
            "temperature": 0,
            "max_completion_tokens": MAX_TOKENS,
            "response_format": criteria.schema(),
        }

    def estimate(self, questions: Sequence[Pair]) -> tuple[int, int, int, int]:
        """Questions, those already answered, and the tokens in and out of the remaining ones.

        A token is about four characters.
        """
        unique = self._unique(questions)
        waiting = [question for key, question in unique.items() if self._stored(key) is None]
        tokens = sum(map(self._num_tokens, waiting))
        known = len(unique) - len(waiting)
        return len(unique), known, tokens, len(waiting) * self.criteria.answer_tokens

    def spent(self, questions: Sequence[Pair]) -> tuple[int, int]:
        """Tokens of all replies to these questions, whenever they came; estimated if unknown."""
        tokens_in = tokens_out = 0
        for key, question in self._unique(questions).items():
            for content, sent, received in self.cache.replies(key):
                tokens_in += self._num_tokens(question) if sent is None else sent
                tokens_out += _tokens(len(content)) if received is None else received
        return tokens_in, tokens_out

    def answer(
        self, questions: Sequence[Pair], progress: Callable[[int, int], None]
    ) -> list[Answer | None]:
        """One answer per question, None if there is none. Resumes where it stopped."""
        unique = self._unique(questions)
        waiting = {key: q for key, q in unique.items() if self._stored(key) is None}
        if waiting:
            work = self._ask_all(waiting, len(unique) - len(waiting), progress)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                asyncio.run(work)
            else:  # as in a notebook
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(asyncio.run, work).result()
        return [self._stored(self._key(question)) for question in questions]

    def _unique(self, questions: Sequence[Pair]) -> dict[str, Pair]:
        return {self._key(question): question for question in questions}

    def _num_tokens(self, question: Pair) -> int:
        return _tokens(sum(len(m["content"]) for m in self.criteria.messages(question)))

    def _key(self, question: Pair) -> str:
        """Everything that determines a reply, with the order of the responses."""
        content = [prompt_text(question.prompt), question.reference]
        content += [question.a.text, question.b.text]
        system = self.criteria.messages(question)[0]["content"]
        data = json.dumps([self.base_url, self.model, self.criteria.task, system, content])
        return hashlib.sha256(data.encode()).hexdigest()

    def _stored(self, key: str) -> Answer | None:
        replies = self.cache.replies(key)
        return self.criteria.parse(replies[-1].content)[0] if replies else None

    async def _ask_all(
        self, waiting: dict[str, Pair], done: int, progress: Callable[[int, int], None]
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
                    await self._ask(client, key, question)
                except JudgeError as error:
                    failures.append(error)
                done += 1
                progress(done, total)

        async with self._client() as client:
            await asyncio.gather(*(work(client) for _ in range(self.concurrency)))
        if failures:
            raise failures[0]

    async def _ask(self, client: Any, key: str, question: Pair) -> None:
        """Ask until a reply can be read; each time with what was wrong with the last."""
        messages = self.criteria.messages(question)
        malformed = 0
        for _ in range(ATTEMPTS):
            body = await self._request(client, messages)
            if body is None:
                return
            reply = read_body(body) if len(body) <= MAX_BODY else None
            if reply is None:
                malformed += 1
                self.unreadable = body
                continue
            self.cache.add(key, body)
            answer, fault = self.criteria.parse(reply.content)
            if answer is not None:
                return
            self.unreadable = reply.content or body
            again = f"That cannot be read: {fault}. Answer with one JSON object in this form "
            messages += [
                {"role": "assistant", "content": reply.content or "(nothing)"},
                {"role": "user", "content": f"{again}and nothing else:\n{self.criteria.example}"},
            ]
        if malformed == ATTEMPTS:
            raise JudgeError(
                f"{self.host} is not a chat-completions server: {ATTEMPTS} replies in a row were "
                f"malformed. --base-url usually ends in /v1. {RESUME} ({self.unreadable[:200]!r})"
            )
        self.faults[f"no answer in the expected format in {ATTEMPTS} replies"] += 1

    async def _request(self, client: Any, messages: list[dict[str, str]]) -> str | None:
        """The body of one reply; None if the server refuses this question but not the others."""
        import openai

        timeouts = 0
        while True:
            sent = dict(self._options)
            try:
                response = await client.chat.completions.with_raw_response.create(
                    model=self.model, messages=messages, **sent
                )
                return self._scrub(response.content.decode("utf-8", "replace"))
            except openai.BadRequestError as refusal:
                # Not every server and model supports every option; those named are left out.
                refused = [name for name in sent if name in str(refusal)]
                if not refused:
                    self.faults[f"refused by the server: {self._scrub(str(refusal))[:200]}"] += 1
                    return None
                for name in refused:
                    self._options.pop(name, None)
            except openai.APITimeoutError:
                timeouts += 1
                if timeouts > 1:
                    raise JudgeError(
                        f"{self.host} did not complete a reply within {self.timeout:g} seconds, "
                        f"twice. Raise --timeout, or lower --concurrency. {RESUME}"
                    ) from None
            except openai.OpenAIError as error:
                # Not `from error`: its chain may contain the headers of the request.
                raise self._failure(error) from None

    def _client(self) -> Any:
        try:
            import openai
        except ImportError:
            raise JudgeError(
                "Judging over the network needs the openai client: pip install 'marlhf[judge]'."
            ) from None
        key, timeout = os.environ.get(KEY), self.timeout
        if not key and self.base_url is None:
            raise JudgeError(
                f"There is no {KEY} in the environment. Set it, or give the --base-url of a "
                "server that needs none."
            )

        class LimitedClient(openai.DefaultAsyncHttpxClient):
            """One limit from the request to the last byte: a server that sends a byte now and then
            would never exceed a limit on single reads."""

            async def send(self, request: Any, **options: Any) -> Any:
                try:
                    return await asyncio.wait_for(super().send(request, **options), timeout)
                except TimeoutError:
                    raise openai.APITimeoutError(request=request) from None

        return openai.AsyncOpenAI(
            api_key=key or "none",
            base_url=self.base_url,
            max_retries=RETRIES,
            timeout=None,
            http_client=LimitedClient(),
        )

    def _failure(self, error: Exception) -> JudgeError:
        import openai

        cause = self._scrub(str(error))[:300]
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            return JudgeError(f"{self.host} does not accept the key in {KEY}. ({cause})")
        if isinstance(error, openai.NotFoundError):
            return JudgeError(
                f"{self.host} has no model {self.model!r}, or --base-url is wrong. ({cause})"
            )
        if isinstance(error, openai.RateLimitError):
            return JudgeError(
                f"{self.host} still limits the rate after {RETRIES} waits. Lower --concurrency, or "
                f"wait. {RESUME} ({cause})"
            )
        return JudgeError(f"{self.host} failed {RETRIES + 1} times in a row. {RESUME} ({cause})")

    def _scrub(self, text: str) -> str:
        key = os.environ.get(KEY)
        return text.replace(key, "[key]") if key else text


def _tokens(chars: int) -> int:
    return chars // CHARS_PER_TOKEN + 1
