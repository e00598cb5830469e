"""Conversations of a model with an environment: a batch of them, over any engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from marlhf.data.collate import SingleProcess, TokenRows
from marlhf.data.rows import Message, Row
from marlhf.environments.chat_tokens import WORLD_ROLES, ChatTokens, check_messages
from marlhf.environments.processes import OwnProcess
from marlhf.environments.protocol import (
    ConversationError,
    Environment,
    EpisodeRecord,
    Step,
    Turn,
    count_endings,
    from_user,
)
from marlhf.environments.tools import (
    Toolbox,
    ToolCall,
    ToolEnvironment,
    call_optional,
    finish,
    read_calls,
    written_calls,
)
from marlhf.models.base import Model
from marlhf.reward.functions import NotReturned, call_within
from marlhf.rollout.engine import Engine, Rollout, Sampling

log = logging.getLogger(__name__)

THREADS = 32
"""Environments that are reset, or closed, at once."""
NOTHING: list[Message] = [from_user("")]
"""The prompt of an episode that could not begin."""
SHOWN = 200
"""Characters of an error in a record."""
SEEDS = 2**32
"""Environments get seeds below this, as numpy takes them."""


@dataclass
class _Episode:
    """What is known of an episode while it is played."""

    environment: Environment | None
    messages: list[Message]
    prompt: list[int]
    toolbox: Toolbox | OwnProcess
    limit: int
    timeout: float | None
    state: str = ""
    turns: list[Turn] = field(default_factory=list)
    length: int = 0
    reason: str = ""
    tool_calls: int = 0
    tool_errors: int = 0
    success: bool | None = None
    calls: list[list[dict[str, Any]]] = field(default_factory=list)


class Beginning(NamedTuple):
    """The first turns of an episode, to be played again."""

    seed: int  # of its environment
    turns: list[list[int]]  # the model's
    tokens: list[int]  # all of it, with what the environment said


@dataclass(frozen=True)
class _Answer:
    """What the environment, or its tools, made of a turn."""

    step: Step
    calls: list[ToolCall] = field(default_factory=list)
    errors: int = 0


@dataclass(frozen=True)
class Conversations:
    """How a row becomes a conversation."""

    make: Callable[[], Environment]
    chat: ChatTokens
    max_turns: int
    episode_tokens: int
    """The most tokens of a whole conversation, its prompt included."""
    timeout: float = 60.0
    """Seconds for a call of the environment, unless that has a `timeout` of its own."""

    def begin(self, row: Row, seed: int) -> _Episode:
        """Build and reset an environment; one that fails leaves an episode of a single token."""
        built: list[Environment] = []

        def reset() -> tuple[list[Message], Toolbox | OwnProcess]:
            built.append(self.make())
            messages = finish(built[0].reset(row, seed % SEEDS))
            messages = check_messages(messages, (*WORLD_ROLES, "assistant"))
            if not messages or messages[-1]["role"] == "assistant":
                raise ConversationError("reset returns messages, and not the assistant's last")
            if isinstance(built[0], OwnProcess):
                return messages, built[0]
            return messages, Toolbox(getattr(built[0], "tools", ()))

        try:
            messages, toolbox = call_within(self.timeout, reset)
            size = sum(len(message["content"]) for message in messages)
            if size <= self.episode_tokens * self.chat.longest_token:
                prompt = self.chat.prompt(messages, toolbox.schemas)
                limit = self.episode_tokens - len(prompt)
                if limit > 0:
                    own = getattr(built[0], "timeout", self.timeout)
                    state = messages[-1]["content"]
                    return _Episode(built[0], messages, prompt, toolbox, limit, own, state)
            reason = (
                f"error: the prompt alone fills episode_tokens, which is {self.episode_tokens}. "
                "Raise it."
            )
        except NotReturned:
            reason = "timeout"
            _kill(built[0] if built else None)
        except (Exception, SystemExit) as error:  # whatever the user's environment raises
            reason = _shown(error)
        begun = built[0] if built and reason != "timeout" else None
        nothing = self.chat.prompt(NOTHING)
        return _Episode(begun, [*NOTHING], nothing, Toolbox(()), 1, self.timeout, reason=reason)

    def check(self, row: Row) -> None:
        """Refuse, before the first step, an environment or a template that cannot play.

        Resets and steps an environment once.
        """
        episode = self.begin(row, 0)
        try:
            if episode.reason:
                raise ConversationError(
                    f"The environment cannot begin with the first row ({row.position or 'row 1'}): "
                    f"{episode.reason.removeprefix('error: ')}"
                )
            self.chat.check(episode.toolbox.schemas)
            environment = episode.environment
            assert environment is not None
            try:
                call_within(episode.timeout, lambda: check_step(finish(environment.step(""))))
            except ConversationError as error:
                raise ConversationError(f"The environment's `step` is not right: {error}") from None
            except (Exception, SystemExit) as error:
                # An empty reply may be refused; replies that count are not.
                log.warning("The environment's `step` fails for an empty reply: %s", _shown(error))
        finally:
            _close(episode)

    def check_positions(self, model: Model, name: str) -> None:
        """Refuse conversations longer than a model has positions."""
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self.episode_tokens > limit:
            raise ConversationError(
                f"A conversation may take {self.episode_tokens} tokens, but the {name} has {limit} "
                f"positions. Set episode_tokens to {limit} or less."
            )

    def play(
        self,
        rows: Sequence[Row],
        seeds: Sequence[int],
        engine: Engine,
        sampling: Sampling,
        starts: Sequence[int] | None = None,
        beginnings: Sequence[Beginning] = (),
        processes: SingleProcess | None = None,
    ) -> tuple[Rollout, list[list[int]], list[EpisodeRecord]]:
        """What was sampled, the tokens that the model saw first, and what became of each episode.

        Environments are reset from `starts`, the seeds of sampling unless given. With
        `beginnings` the first turns are replayed, and what is sampled follows them. Of several
        `processes` that make this call together, the main one has the environments.
        """
        together = processes or SingleProcess()
        own_rows = rows if together.main else []
        episodes = Episodes(self, own_rows, seeds if starts is None else starts)

        def begin() -> tuple[list[list[int]], list[int]]:
            episodes.replay(beginnings)
            return episodes.prompts, episodes.limits

        prompts, room = together.on_main(begin)
        said = [begun.tokens for begun in beginnings] or [[] for _ in rows]
        texts = [[*prompt, *before] for prompt, before in zip(prompts, said)]
        limits = [limit - len(before) for limit, before in zip(room, said)]
        rollout = engine.generate(texts, sampling, seeds, limits, episodes.reply)
        whole = [[*before, *after] for before, after in zip(said, rollout.responses)]
        return rollout, prompts, together.on_main(lambda: episodes.records(whole))


class Episodes:
    """Plays a batch: `prompts` go to an engine, which asks `reply` what follows each turn.

    Every environment is built anew and reset from its row and seed, so an episode depends on
    nothing else in the batch. A call of an environment that takes longer than `timeout` seconds,
    or raises, ends its episode with a reason. Python cannot stop its thread: what hangs stays,
    unless the environment is in a process of its own.

    `reply` may be called for several rows at once, by one thread each.
    """

    def __init__(
        self, conversations: Conversations, rows: Sequence[Row], seeds: Sequence[int]
    ) -> None:
        self._chat, self._max_turns = conversations.chat, conversations.max_turns
        self._pool = ThreadPoolExecutor(min(THREADS, max(1, len(rows))))
        self._episodes = list(self._pool.map(conversations.begin, rows, seeds))

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of what the model sees first, with its generation prompt."""
        return [episode.prompt for episode in self._episodes]

    @property
    def limits(self) -> list[int]:
        """The most tokens that may follow each prompt."""
        return [episode.limit for episode in self._episodes]

    def messages(self, row: int) -> list[Message]:
        """The conversation of a row so far."""
        return list(self._episodes[row].messages)

    def replay(self, beginnings: Sequence[Beginning]) -> None:
        """Play the first turns of each episode again, as they were played before.

        An environment that is reset from the same seed and gets the same replies says the same,
        unless it draws from elsewhere; such a one is refused.
        """

        def replay(row: int) -> bool:
            said: list[int] = []
            for tokens in beginnings[row].turns:
                said += [*tokens, *(self.reply(row, tokens) or [])]
            return said == beginnings[row].tokens

        if not all(self._pool.map(replay, range(len(beginnings)))):
            raise ConversationError(
                "The environment does not say the same when an episode is replayed from its seed, "
                "so it cannot be put back to the middle of one. Let it draw from the seed of "
                "`reset` alone."
            )

    def reply(self, row: int, tokens: list[int]) -> list[int] | None:
        """The ids that follow a turn, None where the conversation is over."""
        episode = self._episodes[row]
        text = self._chat.text(tokens)
        start, episode.length = episode.length, episode.length + len(tokens)
        episode.messages.append({"role": "assistant", "content": text})
        answer, following = _Answer(Step()), None
        if not episode.reason:
            answer, following = self._answer(episode, text, tokens)
        step = answer.step
        turn = Turn(start, episode.length, float(step.reward), episode.state)
        episode.turns.append(turn)
        episode.messages += step.messages
        episode.calls.append(written_calls(answer.calls))
        if episode.reason:
            return None
        if step.done:
            episode.reason = "done"
        elif len(episode.turns) == self._max_turns:
            episode.reason = "max_turns"
        elif following is None or episode.length + len(following) >= episode.limit:
            episode.reason = "episode_tokens"
        if step.success is not None:
            episode.success = step.success
        if episode.reason:
            self._score(episode)
            return None
        assert following is not None
        episode.length += len(following)
        last = step.messages[-1]["content"] if step.messages else episode.state
        episode.state = last if step.state is None else step.state
        return following

    def records(self, responses: TokenRows) -> list[EpisodeRecord]:
        """What became of each episode, given the engine's responses. Closes the environments.

        An engine does not ask for a reply to a turn that used up the tokens of its row; such a
        turn is answered here, so that it too has its reward.
        """

        def end(row: int) -> EpisodeRecord:
            episode = self._episodes[row]
            rest = list(responses[row][episode.length :])
            if rest:
                self.reply(row, rest)
            episode.reason = episode.reason or "episode_tokens"
            _close(episode)
            known = {each.name: getattr(episode, each.name) for each in fields(EpisodeRecord)}
            return EpisodeRecord(**known | {"environment": _as_given(episode.environment)})

        with self._pool:
            records = list(self._pool.map(end, range(len(self._episodes))))
        for reason, count in count_endings(records).items():
            if reason == "timeout" or reason.startswith("error"):
                log.warning("%d of %d episodes ended with %s", count, len(records), reason)
        return records

    def _answer(
        self, episode: _Episode, text: str, tokens: list[int]
    ) -> tuple[_Answer, list[int] | None]:
        """What the environment made of a turn, and the ids that follow, none without room."""
        try:
            answer = call_within(episode.timeout, lambda: self._step(episode, text, tokens))
        except NotReturned:
            self._give_up(episode)
            return _Answer(Step()), None
        except (Exception, SystemExit) as error:  # whatever the user's environment raises
            episode.reason = _shown(error)
            return _Answer(Step()), None
        episode.tool_calls += len(answer.calls)
        episode.tool_errors += answer.errors
        step = answer.step
        size = sum(len(message["content"]) for message in step.messages)
        if step.done or size > episode.limit * self._chat.longest_token:
            return answer, None
        schemas = episode.toolbox.schemas
        try:
            called = [call.name for call in answer.calls]
            return answer, self._chat.after(tokens, step.messages, schemas, called)
        except ConversationError as error:
            episode.reason = _shown(error)
            return answer, None

    @staticmethod
    def _give_up(episode: _Episode) -> None:
        """Of an environment that hangs: a thread still uses it, so nobody calls it again."""
        _kill(episode.environment)
        episode.reason, episode.environment = "timeout", None

    def _step(self, episode: _Episode, text: str, tokens: list[int]) -> _Answer:
        """Changes nothing of the episode: where it takes too long, nobody waits for it."""
        toolbox = episode.toolbox
        if toolbox.schemas:
            calls = read_calls(self._chat.tokenizer, tokens, episode.prompt, toolbox.schemas)
            if calls:
                messages, errors = toolbox.run(calls)
                messages = check_messages(messages, WORLD_ROLES)
                return _Answer(Step(messages), calls, errors)
        assert episode.environment is not None
        return _Answer(check_step(finish(episode.environment.step(text))))

    def _score(self, episode: _Episode) -> None:
        """Add the reward of the whole episode, where there is one, to the last turn."""
        last, environment = episode.turns[-1], episode.environment
        try:
            given = call_within(episode.timeout, lambda: call_optional(environment, "get_reward"))
            given = None if given is None else check_reward(given)
        except NotReturned:
            self._give_up(episode)
            return
        except (Exception, SystemExit) as error:  # as above
            episode.reason = _shown(error)
            return
        if given is not None:
            last = replace(last, reward=last.reward + given)
            episode.turns[-1] = last
            episode.success = last.reward > 0 if episode.success is None else episode.success
        if episode.success is None and last.reward > 0:
            episode.success = True


def check_step(step: Any) -> Step:
    """What `step` returned, or a sentence on what is wrong with it."""
    if not isinstance(step, Step):
        raise ConversationError(
            f"step returns a marlhf.environments.Step, with the messages that follow; got "
            f"{step!r:.80}"
        )
    messages = check_messages(step.messages, WORLD_ROLES)
    if step.state is not None and not isinstance(step.state, str):
        raise ConversationError(f"a state is named by a text; got {step.state!r:.80}")
    success = None if step.success is None else bool(step.success)
    return Step(messages, check_reward(step.reward), bool(step.done), step.state, success)


def check_reward(reward: Any) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConversationError(f"a reward is a finite number; got {reward!r:.80}")
    return value


def _as_given(environment: Environment | None) -> Any:
    """The user's own object; None where it is in another process, or is still at work."""
    if isinstance(environment, ToolEnvironment):
        return environment.inner
    return None if isinstance(environment, OwnProcess) else environment


def _close(episode: _Episode) -> None:
    environment = episode.environment
    try:
        call_within(episode.timeout, lambda: call_optional(environment, "close"))
    except (Exception, SystemExit) as error:  # the episode is over: its record stands
        _kill(environment)
        log.warning("An environment could not be closed: %s", _shown(error))


def _kill(environment: Environment | None) -> None:
    if isinstance(environment, OwnProcess):
        environment.kill()


def _shown(error: BaseException) -> str:
    kind = "" if isinstance(error, ConversationError) else f"{type(error).__name__}: "
    return f"error: {kind}{error}"[:SHOWN]
