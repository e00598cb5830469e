"""A judge behind any OpenAI-compatible server; each reply is on disk before the next is asked.

The key comes from the environment alone. It is never written, and is taken out of whatever a
server says before that is shown or stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marlhf.judge.criteria import Answer, Criteria, Question
from marlhf.judge.pairs import JudgeError, prompt_text

ATTEMPTS = 3
"""Replies to one question before it is left without an answer."""
RETRIES = 8
"""Further tries after a rate limit, a server's error or a lost connection, waiting longer."""
MAX_TOKENS = 2048
CHARS_A_TOKEN = 4
KEY = "OPENAI_API_KEY"


class Reply(NamedTuple):
    content: str
    tokens_in: int
    tokens_out: int


class Estimate(NamedTuple):
    """How many questions are left to ask, and how many tokens they will take."""

    questions: int
    known: int
    tokens_in: int
    tokens_out: int


class Cache:
    """Replies in SQLite, in the order in which a question got them; safe to kill at any time."""

    def __init__(self, path: Path | None) -> None:
        """A file, made where there is none; or nothing but memory."""
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", timeout=60, check_same_thread=False)
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS replies (question TEXT, attempt INTEGER, content TEXT, "
                "tokens_in INTEGER, tokens_out INTEGER, PRIMARY KEY (question, attempt))"
            )
        except (sqlite3.Error, OSError) as error:
            raise JudgeError(
                f"Cannot use {path} as the store of replies: {error}. Give another --cache."
            ) from error

    def replies(self, question: str) -> list[Reply]:
        found = self._db.execute(
            "SELECT content, tokens_in, tokens_out FROM replies WHERE question = ? "
            "ORDER BY attempt",
            (question,),
        )
        return [Reply(*row) for row in found]

    def add(self, question: str, attempt: int, reply: Reply) -> None:
        with self._db:  # a transaction: on disk when this returns
            self._db.execute(
                "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?)", (question, attempt, *reply)
            )

    def close(self) -> None:
        self._db.close()


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
        """Why questions are without an answer, and how many each."""
        self._options: dict[str, Any] = {
            "temperature": 0,
            "max_completion_tokens": MAX_TOKENS,
            "response_format": criteria.schema(),
        }

    def estimate(self, questions: Sequence[Question]) -> Estimate:
        """What is left to ask; a token is about four characters."""
        waiting = [q for q in self._unique(questions).values() if not self._known(q)]
        chars = [
            sum(len(m["content"]) for m in self.criteria.messages(question)) for question in waiting
        ]
        tokens = sum(count // CHARS_A_TOKEN + 1 for count in chars)
        total = len(self._unique(questions))
        return Estimate(
            total, total - len(waiting), tokens, len(waiting) * self.criteria.answer_tokens
        )

    def spent(self, questions: Sequence[Question]) -> tuple[int, int]:
        """Tokens that all replies to these questions have cost, whenever they came."""
        replies = [r for key in self._unique(questions) for r in self.cache.replies(key)]
        return sum(r.tokens_in for r in replies), sum(r.tokens_out for r in replies)

    def answer(
        self, questions: Sequence[Question], progress: Callable[[int, int], None]
    ) -> list[Answer | None]:
        """An answer a question, None where there is none to be had. Resumes where it stopped."""
        unique = self._unique(questions)
        waiting = {key: q for key, q in unique.items() if not self._known(q)}
        if waiting:
            _run(lambda: self._ask_all(waiting, len(unique) - len(waiting), progress))
        self._count_nonsense(unique)
        return [self._stored(self._key(question)) for question in questions]

    def _unique(self, questions: Sequence[Question]) -> dict[str, Question]:
        return {self._key(question): question for question in questions}

    def _key(self, question: Question) -> str:
        """All that decides a reply. The order is in it: which response comes first."""
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

    def _count_nonsense(self, unique: dict[str, Question]) -> None:
        bad = sum(len(self.cache.replies(k)) >= ATTEMPTS and not self._stored(k) for k in unique)
        if bad:
            self.faults[f"no answer of the asked form in {ATTEMPTS} replies"] = bad

    async def _ask_all(
        self, waiting: dict[str, Question], done: int, progress: Callable[[int, int], None]
    ) -> None:
        """Workers that share a queue. After a failure none begins another question, but those
        in flight are awaited: they are paid for."""
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
        """Ask until a reply makes sense, telling the model what was wrong with the last."""
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
            reply = await self._ask(client, messages)
            if reply is None:
                return
            self.cache.add(key, len(replies), reply)
            replies.append(reply)

    async def _ask(self, client: Any, messages: list[dict[str, str]]) -> Reply | None:
        """One reply; None where the server refuses this question but not the others."""
        import openai
        from openai.types.chat import ChatCompletion

        while True:
            sent = dict(self._options)
            try:
                found = await client.chat.completions.create(
                    model=self.model, messages=messages, **sent
                )
                break
            except openai.BadRequestError as error:
                # Not every server and model knows every option; those named are left out.
                refused = [name for name in sent if name in str(error)]
                if not refused:
                    fault = f"refused by the server: {self._scrub(str(error))[:200]}"
                    self.faults[fault] = self.faults.get(fault, 0) + 1
                    return None
                for name in refused:
                    self._options.pop(name, None)
            except (openai.OpenAIError, ValueError) as error:
                raise self._failure(error) from None  # its chain may hold the request's headers
        if not isinstance(found, ChatCompletion):
            raise JudgeError(
                f"What answers at {_host(self.base_url)} is no chat-completions server. "
                "--base-url usually ends in /v1."
            )
        content = (found.choices[0].message.content or "") if found.choices else ""
        sizes = sum(len(m["content"]) for m in messages), len(content)
        usage = found.usage
        used = (usage.prompt_tokens, usage.completion_tokens) if usage else _tokens(*sizes)
        return Reply(self._scrub(content), *used)

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
            api_key=key or "none",
            base_url=self.base_url,
            max_retries=RETRIES,
            timeout=self.timeout,
        )

    def _failure(self, error: Exception) -> JudgeError:
        import openai

        host = _host(self.base_url)
        cause = self._scrub(str(error))[:300]
        rest = "What was answered is kept; the same command goes on from there."
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            return JudgeError(f"{host} does not accept the key in {KEY}. ({cause})")
        if isinstance(error, openai.NotFoundError):
            return JudgeError(
                f"{host} has no model {self.model!r}, or --base-url is wrong. ({cause})"
            )
        if isinstance(error, openai.RateLimitError):
            return JudgeError(
                f"{host} still limits the rate after {RETRIES} waits. Lower --concurrency, or "
                f"wait. {rest} ({cause})"
            )
        return JudgeError(f"{host} failed {RETRIES + 1} times in a row. {rest} ({cause})")

    def _scrub(self, words: str) -> str:
        key = os.environ.get(KEY)
        return words.replace(key, "[key]") if key else words


def _tokens(*chars: int) -> tuple[int, ...]:
    return tuple(count // CHARS_A_TOKEN + 1 for count in chars)


def _host(base_url: str | None) -> str:
    """Where questions go, without what a URL may hold of a password."""
    from urllib.parse import urlsplit

    parts = urlsplit(base_url or "https://api.openai.com")
    return parts.hostname or "The server"


def _run(work: Callable[[], Any]) -> None:
    """Run a coroutine, in a notebook too, where a loop runs already."""
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
