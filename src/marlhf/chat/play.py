"""Conversations of a model with an environment at the terminal: a person watches, or answers.

What is played are held-out prompts with the random numbers of `marlhf evaluate`, so that a person
sees the conversations that were scored there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from marlhf.chat.terminal import visible
from marlhf.data.rows import Message, Row
from marlhf.environments import Conversations, Environment, EpisodeRecord, Episodes, Step
from marlhf.evaluate.eval_plan import (
    EvaluationError,
    EvaluationOptions,
    find_policies,
    make_plan,
)
from marlhf.evaluate.sampling import SamplingTask, key_of, seed_of

Read = Callable[[], str | None]


class PersonAsWorld:
    """Begins as an environment does; then a person types its answers, and None ends the episode."""

    def __init__(self, environment: Environment, read: Read) -> None:
        self.environment, self.read = environment, read

    def reset(self, row: Row, seed: int) -> list[Message]:
        return self.environment.reset(row, seed)

    def step(self, reply: str) -> Step:
        line = self.read()
        said: list[Message] = [] if line is None else [{"role": "user", "content": line}]
        return Step(said, done=line is None)

    def close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()


def open_task(run: str, options: EvaluationOptions) -> SamplingTask:
    """A run's policy and its environment, or the one that the options name."""
    policies = find_policies([run])
    if len(policies) > 1:
        raise EvaluationError(f"{run} holds {len(policies)} runs. Give the folder of one.")
    [policy] = policies
    if options.environment == "none":
        raise EvaluationError("Name an environment with --environment, not none.")
    if options.environment is None and not policy.config.get("environment"):
        raise EvaluationError(
            f"{policy.folder} was not trained in an environment, so there is no world to answer "
            "as. Name one with --environment, or chat without --as."
        )
    return SamplingTask.open(policy, make_plan(policy, options, None), options)


def play(task: SamplingTask, number: int, console: Console, read: Read | None) -> EpisodeRecord:
    """Play one held-out prompt and print every message; with `read`, a person is the world."""
    conversations = task.conversations
    assert conversations is not None
    task.check_conversations_fit(conversations)
    prompt = task.prompts[number % len(task.prompts)]
    seed = seed_of(key_of(prompt.row), number // len(task.prompts), task.seed)
    episodes = _begin(conversations, prompt.row, seed, read)
    shown = 0

    def show() -> None:
        nonlocal shown
        new = episodes.messages(0)[shown:]
        shown += len(new)
        for message in new:
            _print(console, message["role"], message["content"])

    def reply(row: int, tokens: list[int]) -> list[int] | None:
        nonlocal shown
        _print(console, "assistant", conversations.chat.text(tokens))
        shown += 1  # the turn itself, which the person sees before answering
        following = episodes.reply(row, tokens)
        if read is not None and sys.stdin.isatty():
            shown = len(episodes.messages(0))  # the person has just typed them here
        show()
        return following

    show()
    rollout = task.engine.generate(
        episodes.prompts, task.plan.sampling, [seed], episodes.limits, reply
    )
    [record] = episodes.records(rollout.responses)
    show()
    return record


def _begin(conversations: Conversations, row: Row, seed: int, read: Read | None) -> Episodes:
    make, timeout = conversations.make, conversations.timeout
    if read is not None:
        make, timeout = lambda: PersonAsWorld(conversations.make(), read), threading.TIMEOUT_MAX
    return Episodes(
        make,
        [row],
        [seed],
        conversations.chat,
        max_turns=conversations.max_turns,
        episode_tokens=conversations.episode_tokens,
        timeout=timeout,
    )


def _print(console: Console, role: str, content: str) -> None:
    style = "bold" if role == "assistant" else "dim"
    line = Text(f"{visible(role)}: ", style=style) + Text(visible(content))
    console.print(line, soft_wrap=not console.is_terminal)


def summary_of(record: EpisodeRecord, *, scored: bool) -> str:
    """How an episode ended; its reward and success where the environment itself answered."""
    words = [f"ended by {record.reason.replace('_', ' ')} after {len(record.turns)} turns"]
    if scored:
        words.append(f"reward {sum(turn.reward for turn in record.turns):g}")
        if record.success is not None:
            words.append("solved" if record.success else "not solved")
    return ", ".join(words)


def play_at_terminal(run: str, options: EvaluationOptions, *, as_world: bool) -> None:
    """Episode after episode, until the person leaves; one where nobody sits at the terminal."""
    task = open_task(run, options)
    interactive, number = sys.stdin.isatty(), 0
    console = Console(highlight=False, markup=False)
    notices = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if as_world:
        notices.print("You answer as the world. Ctrl-D ends the conversation.")
    while True:
        record = play(task, number, console, _read_line if as_world else None)
        notices.print(summary_of(record, scored=not as_world), style="dim")
        if not interactive:
            return
        try:
            input("Enter plays the next one, Ctrl-D leaves. ")
        except EOFError:
            return
        number += 1


def _read_line() -> str | None:
    try:
        return input("user: " if sys.stdin.isatty() else "")
    except EOFError:
        return None
