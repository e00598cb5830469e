"""The terminal's side of a chat: lines in, answers side by side, commands that begin with a slash.

Whatever a model writes is shown as text: control characters, escape sequences and markup in it do
nothing to the terminal.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlhf.chat.models import FORMS, Turn, Voice
from marlhf.evaluate.eval_plan import EvaluationError

COMMANDS = {
    "/help": "this list",
    "/reset": "forget all that was said",
    "/undo": "forget the last question and its answers",
    "/temperature": "a number: how freely to sample; 0 takes the likeliest token",
    "/max": "a number: the most tokens of an answer",
    "/seed": "a number: other answers to the same questions",
    "/system": "a text: the system message of models that know one; none without a text",
    "/actions": "colour macro actions by each run's rule, or stop it",
    "/save": "a file: the conversation as JSON lines, one a model",
    "/quit": "leave, as Ctrl-D does",
}
COLUMN = 36
"""Least width of a model's column; with less room answers stand one under the other."""
BACKGROUNDS = ("blue", "green", "magenta", "cyan", "yellow")
T = TypeVar("T", int, float)
JOINERS = "\u200c\u200d"
"""Invisible characters that spell words and emoji."""


class Chat:
    """Questions to all voices at once, and commands about them."""

    def __init__(self, voices: Sequence[Voice], console: Console, *, seed: int = 0) -> None:
        self.voices, self.console, self.seed = list(voices), console, seed
        self.number = 0
        self.paint = False
        self.failures = 0
        self.saved: set[Path] = set()
        self.errors = Console(
            stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def greet(self) -> None:
        for voice in self.voices:
            self.tell(f"{voice.name}: {FORMS[voice.form]}")
        self.tell("/help lists commands; Ctrl-C interrupts an answer, Ctrl-D leaves.")

    def tell(self, words: str) -> None:
        self.errors.print(visible(words))

    def hear(self, line: str) -> bool:
        """Answer a line or obey it; False when it asks to leave."""
        line = line.strip()
        if line.startswith("//"):
            line = line[1:]
        elif line.startswith("/"):
            return self._obey(*line.partition(" ")[::2])
        if line:
            self._ask(line)
        return True

    def _ask(self, question: str) -> None:
        answers: list[Turn | str] = []
        for voice in self.voices:
            try:
                with self.console.status(Text(f"{visible(voice.name)} writes")):
                    answers.append(voice.ask(question, self.number, self.seed))
            except ValueError as error:  # too long, a template that refuses, no tokens
                answers.append(str(error))
                self.failures += 1
        for voice, answer in zip(self.voices, answers):
            if isinstance(answer, Turn):
                voice.turns.append(answer)
        self.number += 1
        self._show(answers)

    def _show(self, answers: Sequence[Turn | str]) -> None:
        texts = [self._text(voice, answer) for voice, answer in zip(self.voices, answers)]
        if not self.console.is_terminal:
            for voice, answer, text in zip(self.voices, answers, texts):
                label = f"{voice.name}: " if len(self.voices) > 1 else ""
                if isinstance(answer, Turn):
                    self.console.print(Text(visible(label)) + text, soft_wrap=True)
                else:
                    self.tell(f"{voice.name}: {answer}")
            return
        names = [Text(visible(voice.name), style="bold") for voice in self.voices]
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

    def _text(self, voice: Voice, answer: Turn | str) -> Text:
        if isinstance(answer, str):
            return Text(visible(answer), style="red")
        text = Text(visible(answer.answer.strip()))
        if self.paint:
            try:
                text = self._painted(voice.actions(answer))
            except ValueError as error:
                self.tell(f"{voice.name}: no macro actions are shown. {error}")
        if not answer.ended and self.console.is_terminal:
            text.append(f" [cut off after {len(answer.answer_ids)} tokens]", style="dim")
        elif not answer.ended:  # what is piped on is the answer alone
            self.tell(f"{voice.name}: cut off after {len(answer.answer_ids)} tokens")
        return text

    def _painted(self, actions: Sequence[str]) -> Text:
        """Macro actions on alternating backgrounds, or between bars where there is no colour."""
        pieces = [visible(action) for action in actions]
        if not self.console.is_terminal or self.console.no_color:
            return Text("|".join(pieces).strip())
        painted = Text()
        for i, piece in enumerate(pieces):
            painted.append(piece, style=f"black on {BACKGROUNDS[i % len(BACKGROUNDS)]}")
        return painted

    def _obey(self, command: str, rest: str) -> bool:
        rest = rest.strip()
        if command in ("/quit", "/exit"):
            return False
        deeds: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/undo": self._undo,
            "/temperature": self._temperature,
            "/max": self._max,
            "/seed": self._seed,
            "/system": self._system,
            "/actions": self._actions,
            "/save": self._save,
        }
        if command not in deeds:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            hint = f"Did you mean {near[0]}?" if near else "/help lists them."
            self.tell(f"There is no command {command}. {hint} A line that begins with // is said.")
            return True
        try:
            deeds[command](rest)
        except ValueError as error:
            self.tell(str(error))
        return True

    def _help(self, _: str) -> None:
        for name, words in COMMANDS.items():
            self.tell(f"{name:14}{words}")
        self.tell("A line that ends in a backslash goes on in the next.")

    def _reset(self, _: str) -> None:
        for voice in self.voices:
            voice.turns.clear()
        self.number = 0
        self.tell("All is forgotten.")

    def _undo(self, _: str) -> None:
        if self.number == 0:
            raise EvaluationError("There is nothing to undo.")
        self.number -= 1
        for voice in self.voices:
            voice.turns = [turn for turn in voice.turns if turn.number < self.number]
        self.tell("The last question is forgotten.")

    def _temperature(self, text: str) -> None:
        number = _number(text, float, "/temperature 0.7")
        for voice in self.voices:
            voice.sampling = replace(voice.sampling, temperature=number)

    def _max(self, text: str) -> None:
        number = _number(text, int, "/max 256")
        for voice in self.voices:
            voice.sampling = replace(voice.sampling, max_new_tokens=number)

    def _seed(self, text: str) -> None:
        self.seed = _number(text, int, "/seed 3")

    def _system(self, text: str) -> None:
        for voice in self.voices:
            try:
                voice.instruct(text)
            except ValueError as error:
                self.tell(f"{voice.name}: {error}")

    def _actions(self, _: str) -> None:
        self.paint = not self.paint
        self.tell("Macro actions are shown." if self.paint else "Macro actions are not shown.")
        last = [voice.turns[-1] for voice in self.voices if voice.turns]
        if self.paint and len(last) == len(self.voices):
            self._show(last)

    def _save(self, text: str) -> None:
        if not text:
            raise EvaluationError("Name a file: /save talk.jsonl")
        file = Path(text).expanduser()
        if file.exists() and file not in self.saved:
            raise EvaluationError(f"{file} is there already. Name another file.")
        lines = [
            {
                "model": voice.subject.model,
                "form": voice.form,
                "messages": voice.messages(),
                "sampling": asdict(voice.sampling),
                "seed": self.seed,
            }
            for voice in self.voices
        ]
        try:
            whole = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.write_text(whole, encoding="utf-8")
        except OSError as error:
            raise EvaluationError(f"Cannot write {file}: {error.strerror}.") from None
        self.saved.add(file)
        self.tell(f"saved: {file}")


def converse(voices: Sequence[Voice], *, seed: int = 0) -> int:
    """Talk at the terminal, or answer what is piped in; how many questions had no answer."""
    typed = sys.stdin.isatty()
    chat = Chat(voices, Console(highlight=False, markup=False), seed=seed)
    if typed:
        chat.greet()
    for line in joined(_typed(chat) if typed else _piped()):
        try:
            if not chat.hear(line):
                break
        except KeyboardInterrupt:
            if not typed:
                raise
            chat.tell("Interrupted: the question is forgotten.")
    return chat.failures


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines, where one that ends in a backslash goes on in the next.

    >>> list(joined(["Hello", "Two\\\\", "lines"]))
    ['Hello', 'Two\\nlines']
    """
    whole = ""
    for line in lines:
        if line.endswith("\\"):
            whole += line[:-1] + "\n"
            continue
        yield whole + line
        whole = ""
    if whole:
        yield whole


def visible(text: str) -> str:
    """Text with all that a terminal would obey written out.

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
        raise EvaluationError(f"Write a number, as in {example}.") from None


def _typed(chat: Chat) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  so that lines can be edited
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            chat.tell("Ctrl-D or /quit leaves.")
            continue
        yield line.encode("utf-8", "replace").decode("utf-8")


def _piped() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace").rstrip("\r\n")
