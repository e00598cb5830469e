"""Games: that of `marlhf.data.guess`, and TextArena's for one player, by name.

TextArena is an extra: pip install "marlhf[textarena]".
"""

from __future__ import annotations

import random
import threading
from typing import Any

from marlhf.data import guess as game
from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import ConversationError, Step, from_user

HANGS = 20.0
"""Seconds that games wait for the move of another before they go on without it."""


class _OneAtATime:
    """Games draw from Python's own random numbers, so one moves at a time, each with its state."""

    def __init__(self) -> None:
        self._lock, self._changing = threading.Lock(), threading.Lock()

    def acquire(self) -> threading.Lock:
        """The lock of this move. That of a game that hangs is never released: it gets a new one."""
        lock = self._lock
        while not lock.acquire(timeout=HANGS):
            with self._changing:
                if self._lock is lock:
                    self._lock = threading.Lock()
            lock = self._lock
        return lock


MOVES = _OneAtATime()


class Guess:
    """Find a number; the game answers `higher` or `lower`, wrongly with probability `wrong`.

    The reward is 1 for the turn that finds it. Rows of `source: guess` name their number and their
    game; for others both are drawn.

    >>> played = Guess()
    >>> played.reset(Row("", columns={"game": 7, "number": 8}), seed=0)[0]["content"]
    'Game 7: a number from 1 to 9?'
    >>> played.step("5").messages, played.step("8").reward
    ([{'role': 'user', 'content': 'higher'}], 1.0)
    """

    timeout = None  # it cannot hang

    def __init__(self, numbers: int = game.NUMBERS, wrong: float = 0.0) -> None:
        if numbers < 2 or not 0 <= wrong < 0.5:
            raise ConversationError(
                f"The game guess takes 2 or more numbers and wrong answers below one half; got "
                f"numbers: {numbers}, wrong: {wrong}."
            )
        self.numbers, self.wrong = numbers, wrong

    def reset(self, row: Row, seed: int) -> list[Message]:
        self._rng = random.Random(f"guess {seed}")
        number = row.columns.get("number")
        if not isinstance(number, int) or not 1 <= number <= self.numbers:
            number = self._rng.randint(1, self.numbers)
        self._number = number
        self._low, self._high, self._said = 1, self.numbers, list[str]()
        return [from_user(game.opening(row.columns.get("game", seed), self.numbers))]

    def step(self, reply: str) -> Step:
        guess = game.read_guess(reply)
        if guess is None:
            return self._say("a number", "")
        said = game.answer(guess, self._number)
        if said == game.FOUND:
            return Step([from_user(game.FOUND)], reward=1.0, done=True, success=True)
        if self._rng.random() < self.wrong:
            said = game.LOWER if said == game.HIGHER else game.HIGHER
        self._low, self._high = game.narrow(self._low, self._high, guess, said)
        return self._say(said, f"{guess} {said}")

    def _say(self, text: str, told: str) -> Step:
        """The state is all that matters for the next guess: how many were made, what is left."""
        self._said.append(told)
        left = f"{self._low}-{self._high}" if not self.wrong else ", ".join(sorted(self._said))
        return Step([from_user(text)], state=f"{len(self._said)}: {left}", success=False)


class TextArena:
    """A game such as `Mastermind-v0`; the row's prompt is not used.

    The reward is the game's, for the turn that ends it. A game that takes the whole score counts
    as a success.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        try:
            import textarena
        except ModuleNotFoundError as error:
            raise ConversationError(
                f"textarena:{name} needs the package {error.name}: pip install 'marlhf[textarena]'."
            ) from error
        raw = f"{name}-raw"  # the game alone, without wrappers that repeat what was said before
        if raw not in textarena.envs.registration.ENV_REGISTRY:
            raise ConversationError(
                f"TextArena has no game {name!r}. Its list: python -c 'import textarena as t; "
                "t.pprint_registry_detailed()'."
            )
        self._name, self._random = name, random.Random()
        try:
            self._game = textarena.make(raw, **settings)
        except Exception as error:  # some want nltk's words, or a key of a service
            raise ConversationError(
                f"TextArena's {name} cannot be set up: {type(error).__name__}: {error}"
            ) from error

    def reset(self, row: Row, seed: int) -> list[Message]:
        def reset() -> None:
            random.seed(seed)
            self._game.reset(num_players=1, seed=seed)

        try:
            self._play(reset)
        except AssertionError as error:
            raise ConversationError(
                f"TextArena's {self._name} cannot be played by one player: {error}"
            ) from error
        return [self._said()]

    def step(self, reply: str) -> Step:
        done, _ = self._play(lambda: self._game.step(action=reply))
        if not done:
            return Step([self._said()], success=False)
        rewards, _ = self._play(self._game.close)
        reward = (rewards or {}).get(0, 0.0)
        # Some games have a text there after an invalid move.
        reward = float(reward) if isinstance(reward, int | float) else 0.0
        return Step([self._said()], reward=reward, done=True, success=reward >= 1)

    def _said(self) -> Message:
        """What the game said since the last turn, without the player's own words."""
        _, seen = self._play(self._game.get_observation)
        text = "\n".join(str(text) for speaker, text, _ in seen if speaker != 0)
        return from_user(text or "(nothing)")

    def _play(self, move: Any) -> Any:
        lock = MOVES.acquire()
        before = random.getstate()
        random.setstate(self._random.getstate())
        try:
            return move()
        finally:
            self._random.setstate(random.getstate())
            random.setstate(before)
            lock.release()
