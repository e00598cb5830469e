"""The guessing game of `marlhf.data.guess`, as an environment."""

from __future__ import annotations

import random

from marlhf.data.guess import (
    FOUND,
    HIGHER,
    LOWER,
    NUMBERS,
    TURNS,
    answer,
    narrow,
    opening,
    read_guess,
)
from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import ConversationError, Step


class Guess:
    """Find a number; the game answers `higher` or `lower`, wrongly with probability `wrong`.

    The reward is 1 for the turn that finds it. Rows of `source: guess` name their number and their
    game; for others both are drawn.

    >>> game = Guess()
    >>> game.reset(Row("", columns={"game": 7, "number": 8}), seed=0)[0]["content"]
    'Game 7: a number from 1 to 9?'
    >>> game.step("5").messages, game.step("8").reward
    ([{'role': 'user', 'content': 'higher'}], 1.0)
    """

    timeout = None  # it cannot hang

    def __init__(self, numbers: int = NUMBERS, wrong: float = 0.0) -> None:
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
        return [{"role": "user", "content": opening(row.columns.get("game", seed), self.numbers)}]

    def step(self, reply: str) -> Step:
        guess = read_guess(reply)
        if guess is None:
            return self._say("a number", "")
        said = answer(guess, self._number)
        if said == FOUND:
            return Step([_from_game(FOUND)], reward=1.0, done=True, success=True)
        if self._rng.random() < self.wrong:
            said = LOWER if said == HIGHER else HIGHER
        self._low, self._high = narrow(self._low, self._high, guess, said)
        return self._say(said, f"{guess} {said}")

    def _say(self, text: str, told: str) -> Step:
        """The state is all that matters for the next guess: how many were made, what is left."""
        self._said.append(told)
        left = f"{self._low}-{self._high}" if not self.wrong else ", ".join(sorted(self._said))
        return Step([_from_game(text)], state=f"{len(self._said)}: {left}", success=False)


def optimum(numbers: int = NUMBERS, turns: int = TURNS) -> float:
    """The best chance to find the number, if every answer is right: that of halving.

    With k turns, halving tells 2^k - 1 numbers apart. Wrong answers only lower it.

    >>> optimum(32, 6), optimum(32, 4)
    (1.0, 0.46875)
    """
    return min(1.0, (2**turns - 1) / numbers)


def _from_game(text: str) -> Message:
    return {"role": "user", "content": text}
