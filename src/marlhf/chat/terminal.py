"""The chat terminal: reads lines, shows answers side by side, runs commands such as /reset.

Whatever a model writes is shown as text: control characters, escape sequences and markup in it
have no effect on the terminal.

With an environment a person watches conversations, or answers. What is played are held-out prompts
with the random numbers of `marlhf evaluate`, so these are the conversations that were scored there.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlhf.chat.models import FORMS, ChatModel, ChatTurn
from marlhf.data.rows import Message, Row
from marlhf.environments import Environment, EpisodeRecord, Episodes, Step
from marlhf.environments.protocol import from_user
from marlhf.environments.tools import call_optional
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions, find_policy, make_plan
from marlhf.evaluate.sampling import SamplingTask, key_of, seed_of

COLUMN = 36
"""Minimum width of a model's column; in a narrower terminal answers are shown one by one."""
BACKGROUNDS = ("blue", "green", "magenta", "cyan", "yellow")
T = TypeVar("T", int, float)
JOINERS = "\u200c\u200d"
"""Invisible characters that are part of words and emoji."""


class Chat:
    """Sends each line to all models, and runs commands on them."""

    def __init__(self, models: Sequence[ChatModel], console: Console, *, seed: int = 0) -> None:
        self.models, self.console, self.seed = list(models), console, seed
        self.number = 0
        self.show_actions = False
        self.failures = 0
        self.saved: set[Path] = set()
        self.errors = Console(
            stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def greet(self) -> None:
        for model in self.models:
            self.notify(f"{model.name}: {FORMS[model.form]}")
        self.notify("/help lists commands; Ctrl-C interrupts an answer, Ctrl-D leaves.")

    def notify(self, message: str) -> None:
        self.errors.print(visible(message))

    def handle_line(self, line: str) -> bool:
        """Send a line to the models or run it as a command; False to leave the chat."""
        line = line.strip()
        if line.startswith("/") and not line.startswith("//"):
            command, _, argument = line.partition(" ")
            return self._run_command(command, argument.strip())
        if line:
            self._ask(line.removeprefix("/"))
        return True

    def _ask(self, question: str) -> None:
        answers: list[ChatTurn | str] = []
        for model in self.models:
            try:
                with self.console.status(Text(f"{visible(model.name)} is writing")):
                    answers.append(model.ask(question, self.number, self.seed))
            except ValueError as error:  # too long, refused by the chat template, no tokens
                answers.append(str(error))
                self.failures += 1
        for model, answer in zip(self.models, answers):
            if isinstance(answer, ChatTurn):
                model.turns.append(answer)
        self.number += 1
        self._show(answers)

    def _show(self, answers: Sequence[ChatTurn | str]) -> None:
        texts = [self._text(model, answer) for model, answer in zip(self.models, answers)]
        if not self.console.is_terminal:
            for model, answer, text in zip(self.models, answers, texts):
                label = f"{model.name}: " if len(self.models) > 1 else ""
                if isinstance(answer, ChatTurn):
                    self.console.print(Text(visible(label)) + text, soft_wrap=True)
                else:
                    self.notify(f"{model.name}: {answer}")
            return
        names = [Text(visible(model.name), style="bold") for model in self.models]
        if len(texts) > 1 and self.console.width >= COLUMN * len(texts):
            table = Table(box=None, expand=True, padding=(0, 2, 0, 0))
            for name in names:
                table.add_column(name, ratio=1, overflow="fold")
            table.add_row(*texts)
            self.console.print(table)
        else:
            for name, text in zip(names, texts):
                if len(texts) > 1:
                    self.console.print(name)
                self.console.print(text)
        self.console.print()

    def _text(self, model: ChatModel, answer: ChatTurn | str) -> Text:
        if isinstance(answer, str):
            return Text(visible(answer), style="red")
        text = Text(visible(answer.answer.strip()))
        if self.show_actions:
            try:
                text = self._highlighted(model.actions(answer))
            except ValueError as error:
                self.notify(f"{model.name}: no macro actions are shown. {error}")
        if not answer.ended and self.console.is_terminal:
            text.append(f" [cut off after {len(answer.answer_ids)} tokens]", style="dim")
        elif not answer.ended:  # stdout carries the answer alone
            self.notify(f"{model.name}: cut off after {len(answer.answer_ids)} tokens")
        return text

    def _highlighted(self, actions: Sequence[str]) -> Text:
        """Macro actions on alternating backgrounds, or between bars where there is no colour."""
        pieces = [visible(action) for action in actions]
        if not self.console.is_terminal or self.console.no_color:
            return Text("|".join(pieces).strip())
        highlighted = Text()
        for i, piece in enumerate(pieces):
            highlighted.append(piece, style=f"black on {BACKGROUNDS[i % len(BACKGROUNDS)]}")
        return highlighted

    def _run_command(self, name: str, argument: str) -> bool:
        if name in ("/quit", "/exit"):
            return False
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"Did you mean {near[0]}?" if near else "/help lists them."
            self.notify(f"There is no command {name}. {hint} Type // to send a line with a slash.")
            return True
        try:
            COMMANDS[name](self, argument)
        except ValueError as error:
            self.notify(str(error))
        return True

    # Commands. /help shows their docstrings.

    def _help(self, _: str) -> None:
        """this list"""
        for name, command in COMMANDS.items():
            self.notify(f"{name:14}{inspect.getdoc(command)}")
        self.notify("End a line with a backslash to continue it on the next.")

    def _reset(self, _: str) -> None:
        """clear the conversation"""
        for model in self.models:
            model.turns.clear()
        self.number = 0
        self.notify("The conversation is cleared.")

    def _undo(self, _: str) -> None:
        """remove the last question and its answers"""
        if self.number == 0:
            raise EvaluationError("There is nothing to undo.")
        self.number -= 1
        for model in self.models:
            model.turns = [turn for turn in model.turns if turn.number < self.number]
        self.notify("The last question is removed.")

    def _temperature(self, text: str) -> None:
        """a number: sampling temperature; 0 is greedy"""
        self._sample_with(temperature=_number(text, float, "/temperature 0.7"))

    def _max(self, text: str) -> None:
        """a number: maximum tokens per answer"""
        self._sample_with(max_new_tokens=_number(text, int, "/max 256"))

    def _sample_with(self, **changes: Any) -> None:
        for model in self.models:
            model.sampling = replace(model.sampling, **changes)

    def _seed(self, text: str) -> None:
        """a number: other answers to the same questions"""
        self.seed = _number(text, int, "/seed 3")

    def _system(self, text: str) -> None:
        """a text: the system message; without a text, none"""
        for model in self.models:
            try:
                model.set_system(text)
            except ValueError as error:
                self.notify(f"{model.name}: {error}")

    def _actions(self, _: str) -> None:
        """show macro actions by each run's segmenter, or hide them"""
        self.show_actions = not self.show_actions
        self.notify(f"Macro actions are {'' if self.show_actions else 'not '}shown.")
        last = [model.turns[-1] for model in self.models if model.turns]
        if self.show_actions and len(last) == len(self.models):
            self._show(last)

    def _save(self, text: str) -> None:
        """a file: the conversation as JSON lines, one line per model"""
        if not text:
            raise EvaluationError("Give a file name: /save talk.jsonl")
        file = Path(text).expanduser()
        if file.exists() and file not in self.saved:
            raise EvaluationError(f"{file} exists already. Choose another file.")
        lines = [
            {
                "model": model.policy.model,
                "form": model.form,
                "messages": model.messages(),
                "sampling": asdict(model.sampling),
                "seed": self.seed,
            }
            for model in self.models
        ]
        try:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise EvaluationError(f"Cannot write {file}: {error.strerror}.") from None
        self.saved.add(file)
        self.notify(f"saved: {file}")

    def _quit(self, _: str) -> None:
        """leave, like Ctrl-D"""


NAMES = ("help", "reset", "undo", "temperature", "max", "seed", "system", "actions", "save", "quit")
COMMANDS: dict[str, Callable[[Chat, str], None]] = {
    f"/{name}": getattr(Chat, f"_{name}") for name in NAMES
}


def converse(models: Sequence[ChatModel], *, seed: int = 0) -> int:
    """Chat at the terminal, or answer piped lines; returns how many questions had no answer."""
    interactive = sys.stdin.isatty()
    chat = Chat(models, Console(highlight=False, markup=False), seed=seed)
    if interactive:
        chat.greet()
    for line in joined(_typed_lines(chat) if interactive else _piped_lines()):
        try:
            if not chat.handle_line(line):
                break
        except KeyboardInterrupt:
            if not interactive:
                raise
            chat.notify("Interrupted: the question is removed.")
    return chat.failures


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Join each line that ends in a backslash with the next.

    >>> list(joined(["Hello", "Two\\\\", "lines"]))
    ['Hello', 'Two\\nlines']
    """
    begun = ""
    for line in lines:
        if line.endswith("\\"):
            begun += line[:-1] + "\n"
            continue
        yield begun + line
        begun = ""
    if begun:
        yield begun


def visible(text: str) -> str:
    """Text with every character that would control a terminal escaped.

    >>> visible("a\\x1b[31mb\\u202ec")
    'a\\\\x1b[31mb\\\\u202ec'
    """
    return "".join(map(_visible, text.replace("\r\n", "\n").expandtabs(4)))


def _visible(char: str) -> str:
    if char in JOINERS or char == "\n":
        return char
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return char.encode("unicode_escape", "surrogatepass").decode("ascii")
    return char


def _number(text: str, kind: Callable[[str], T], example: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise EvaluationError(f"Give a number, as in {example}.") from None


def _typed_lines(chat: Chat) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` line editing and history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            chat.notify("Press Ctrl-D or type /quit to leave.")
            continue
        yield line.encode("utf-8", "replace").decode("utf-8")


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace").rstrip("\r\n")


Read = Callable[[], str | None]


class PersonAsWorld:
    """Begins as an environment does; then a person types its answers, and None ends the episode."""

    def __init__(self, make: Callable[[], Environment], read: Read) -> None:
        self.environment, self.read = make(), read

    def reset(self, row: Row, seed: int) -> list[Message]:
        return self.environment.reset(row, seed)

    def step(self, reply: str) -> Step:
        line = self.read()
        return Step([] if line is None else [from_user(line)], done=line is None)

    def close(self) -> None:
        call_optional(self.environment, "close")


def open_task(run: str, options: EvaluationOptions) -> SamplingTask:
    """A run's policy and its environment, or the one that the options name."""
    policy = find_policy(run)
    if options.environment == "none":
        raise EvaluationError("Name an environment with --environment, not none.")
    if options.environment is None and not policy.config.get("environment"):
        raise EvaluationError(
            f"{policy.folder} was not trained in an environment, so there is no world to answer "
            "as. Name one with --environment, or chat without --as."
        )
    return SamplingTask(policy, make_plan(policy, options, None), options)


def play(task: SamplingTask, number: int, console: Console, read: Read | None) -> EpisodeRecord:
    """Play one held-out prompt and print every message; with `read`, a person is the world."""
    conversations = task.conversations
    assert conversations is not None
    task.check_conversations_fit(conversations)
    prompt = task.prompts[number % len(task.prompts)]
    seed = seed_of(key_of(prompt.row), number // len(task.prompts), task.seed)
    if read is not None:
        person, forever = partial(PersonAsWorld, conversations.make, read), threading.TIMEOUT_MAX
        conversations = replace(conversations, make=person, timeout=forever)
    episodes = Episodes(conversations, [prompt.row], [seed])
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
