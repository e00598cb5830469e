"""Chained sums: a reasoning task that needs no download, where the first wrong line is known.

    7+2413
    a7+2=9
    b9+4=3
    c3+1=4
    d4+3=7
    e7+2=9
    ...

The prompt gives a digit to start from and `CYCLE` digits to add in turn, again and again. Each of
the `NUM_LINES` lines has a letter as its label, adds the next digit to the result of the line above
it and keeps the last digit of the sum. Every line builds on the one above, so one slip spoils what
follows, and credit should fall on the line of the slip.

The solutions to imitate have slips (`SLIP`), and continue from what they wrote. A policy that
imitates them knows how to add, but solves fewer than half of the prompts: the rest is left to a
reward.

`sums-steps` has lines with labels for a process model; half of them are wrong.
"""

from __future__ import annotations

import random
import re
from itertools import product
from string import ascii_lowercase

from marlhf.data.rows import Row, Source

CYCLE = 4
"""How many digits are added in turn."""
STEPS = (1, 2, 3, 4, 5)
"""Digits that may be added. So few that a sum depends visibly on each summand: a tiny model learns
it within minutes, while sums of any two digits, without the carry, are as hard as a parity."""
NUM_LINES = 24
"""Lines of a solution. A line has seven tokens with its line break, or the end: 168 in all."""
SLIP = 1 / 30
"""Share of the lines to imitate that are wrong, unless given."""
LINE = re.compile(r"[a-z]\d\+\d=(\d)")


def rows(num_rows: int = 6000, seed: int = 0, slip: float = SLIP) -> list[Row]:
    """Different prompts with a solution each, in which a share `slip` of the lines is wrong.

    Fewer rows are the first of more rows, and every Python writes the same ones. There are 6,250
    prompts. `columns` keeps the right answer, the last digit of all.
    """
    rng = random.Random(f"sums {seed}")
    tasks = product(range(10), *[STEPS] * CYCLE)
    prompts = [f"{start}+{''.join(map(str, steps))}\n" for start, *steps in tasks]
    # Sorting by drawn numbers: only `random()` is the same in every Python version.
    prompts.sort(key=lambda _: rng.random())
    return [_write_row(prompt, rng, slip) for prompt in prompts[:num_rows]]


def step_rows(num_rows: int = 6000, seed: int = 0) -> list[Row]:
    """The same prompts, each with labelled lines for a process model: `sums-steps`.

    Nearly all lines that a policy writes are right, so a process model learns little from them.
    Here the share of wrong lines is drawn for each row, from none to all, and a wrong line may
    miscopy either summand or have any other digit as its sum. Where there are more rows than
    prompts, prompts come again with other lines.
    """
    rng = random.Random(f"sums-steps {seed}")
    prompts = [row.prompt for row in rows(num_rows, seed)]
    return [_write_steps(str(prompts[i % len(prompts)]), rng) for i in range(num_rows)]


def solution(prompt: str) -> str:
    """The right lines.

    >>> solution("7+2413\\n")[:14]
    'a7+2=9\\nb9+4=3\\n'
    """
    return _write_lines(prompt, slips={})


def first_wrong_line(prompt: str, response: str) -> int | None:
    """The first line that is not that of the right solution, from 0; None if all are right.

    A line that is missing is wrong, and so is one too many.

    >>> first_wrong_line("7+2413\\n", "a7+2=9\\nb9+4=4\\n")
    1
    """
    written, right = response.split("\n"), solution(prompt).split("\n")
    for number, line in enumerate(right):
        if number >= len(written) or written[number] != line:
            return number
    return None if len(written) == len(right) else len(right)


def right_lines(prompt: str, response: str) -> list[bool]:
    """Whether each of the `NUM_LINES` lines follows from the prompt and from the line before it.

    A line after a slip is right if it adds the right digit to what was written, and is wrong only
    if it has a slip of its own. So the first False is at `first_wrong_line`, unless the response
    has lines too many.

    >>> right_lines("7+2413\\n", "a7+2=9\\nb9+4=4\\nc4+1=5")[:4]
    [True, False, True, False]
    """
    value, steps = _read(prompt)
    right: list[bool] = []
    for number, line in enumerate(response.split("\n")[:NUM_LINES]):
        right.append(line == _write_line(number, value, steps[number % CYCLE]))
        match = LINE.fullmatch(line)
        if match is None:
            break  # nothing to build on
        value = int(match[1])
    return right + [False] * (NUM_LINES - len(right))


def _write_row(prompt: str, rng: random.Random, slip: float) -> Row:
    slips: dict[int, int] = {}
    for number in range(NUM_LINES):
        wrong, off = rng.random() < slip, -1 if rng.random() < 0.5 else 1
        if wrong:
            slips[number] = off
    answer = solution(prompt)[-1]
    return Row(prompt, chosen=_write_lines(prompt, slips), columns={"answer": answer})


def _write_steps(prompt: str, rng: random.Random) -> Row:
    value, steps = _read(prompt)
    share = rng.random()
    lines: list[str] = []
    for number in range(NUM_LINES):
        digits = [value, steps[number % CYCLE], 0]  # the summands, and how far off the sum is
        wrong, place, off = rng.random() < share, int(4 * rng.random()), 1 + int(9 * rng.random())
        if wrong:  # every other time in the sum, which is the hardest to judge
            digits[min(place, 2)] += off
        lines.append(_write_line(number, digits[0] % 10, digits[1] % 10, digits[2]))
        value = int(lines[-1][-1])
    labels = right_lines(prompt, "\n".join(lines))
    return Row(prompt, columns={"completions": lines, "labels": labels})


def _read(prompt: str) -> tuple[int, list[int]]:
    """Where to start, and what to add in turn."""
    start, _, steps = prompt.strip().partition("+")
    return int(start), [int(step) for step in steps]


def _write_lines(prompt: str, slips: dict[int, int]) -> str:
    value, steps = _read(prompt)
    lines: list[str] = []
    for number in range(NUM_LINES):
        lines.append(_write_line(number, value, steps[number % CYCLE], slips.get(number, 0)))
        value = int(lines[-1][-1])
    return "\n".join(lines)


def _write_line(number: int, value: int, step: int, slip: int = 0) -> str:
    return f"{ascii_lowercase[number]}{value}+{step}={(value + step + slip) % 10}"


def _solved(prompt: str, response: str) -> float:
    return float(first_wrong_line(prompt, response) is None)


SUMS = Source("sums", generate=rows, true_score=_solved)
SUMS_STEPS = Source("sums-steps", generate=step_rows)
