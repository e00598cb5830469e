"""A guessing game: rows to imitate, and what `marlhf.environments.games` plays.

    user       Game 4711: a number from 1 to 9?
    assistant  4
    user       higher
    assistant  7
    user       lower
    ...

A row is one game: its number, a clumsy player's game up to some turn as the prompt, and that
player's next guess as the response. The player (`CLUMSY`) writes numbers and mostly heeds the
answers, but guesses anywhere that is left, and now and then anywhere at all. It finds the number
within `TURNS` turns about every other time, a tiny model that imitates it about one time in three,
and halving what is left in seven games of nine.

The game's name makes prompts differ, so that no game is in two stages; it says nothing.
"""

from __future__ import annotations

import random
import re

from marlhf.data.rows import Message, Row, Source

NUMBERS = 9
TURNS = 3
HIGHER, LOWER, FOUND = "higher", "lower", "found"
GAMES = 100_000
"""Games have numbers below this as their names."""
CLUMSY = 0.3
"""Share of the clumsy player's guesses that heed no answer."""
GUESS = re.compile(r"\d{1,9}", re.A)


def rows(num_rows: int = 8000, seed: int = 0) -> list[Row]:
    """Games with different names; the same for the same seed, fewer the first of more."""
    rng = random.Random(f"guess {seed}")
    games: dict[int, Row] = {}
    while len(games) < min(num_rows, GAMES):
        name = _below(rng, GAMES)
        if name not in games:
            games[name] = _row(name, rng)
    return [*games.values()]


def opening(name: int, numbers: int = NUMBERS) -> str:
    return f"Game {name}: a number from 1 to {numbers}?"


def read_guess(reply: str) -> int | None:
    """The first number that a reply has.

    >>> read_guess("16!"), read_guess("sixteen")
    (16, None)
    """
    match = GUESS.search(reply)
    return int(match[0]) if match else None


def answer(guess: int, number: int) -> str:
    return FOUND if guess == number else HIGHER if guess < number else LOWER


def narrow(low: int, high: int, guess: int, said: str) -> tuple[int, int]:
    """What is left after an answer.

    >>> narrow(1, 32, 16, "higher")
    (17, 32)
    """
    if said == HIGHER:
        return max(low, guess + 1), high
    return low, min(high, guess - 1)


def _row(name: int, rng: random.Random) -> Row:
    number, turns = 1 + _below(rng, NUMBERS), _below(rng, TURNS)
    game: list[Message] = [{"role": "user", "content": opening(name)}]
    low, high = 1, NUMBERS
    guess = _clumsy_guess(low, high, rng)
    while len(game) < 2 * turns and guess != number:
        said = answer(guess, number)
        game.append({"role": "assistant", "content": str(guess)})
        game.append({"role": "user", "content": said})
        low, high = narrow(low, high, guess, said)
        guess = _clumsy_guess(low, high, rng)
    chosen: list[Message] = [{"role": "assistant", "content": str(guess)}]
    return Row(game, chosen=chosen, columns={"game": name, "number": number})


def _clumsy_guess(low: int, high: int, rng: random.Random) -> int:
    if rng.random() < CLUMSY:
        return 1 + _below(rng, NUMBERS)
    return low + _below(rng, high - low + 1)


def _below(rng: random.Random, limit: int) -> int:
    """Only `random()` draws the same numbers in every version of Python."""
    return int(rng.random() * limit)


GUESSING = Source("guess", generate=rows)
