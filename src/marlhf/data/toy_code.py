"""One-line programs: a coding task that needs no download, for a very small model.

    Read a number and add 3.
    print(int(input())+3)

The solutions to imitate are right two times in five. The others use another number or sign, forget
`int`, or do not compile, so that the unit tests have something to reward.
"""

from __future__ import annotations

import random

from marlhf.data.code import code_row
from marlhf.data.rows import Row

SIGNS = {"+": "add", "-": "subtract", "*": "multiply by"}
REQUESTS = (
    "Read a number and {what} {n}.",
    "Please read a number, then {what} {n}.",
    "Take the number, {what} {n}, and print.",
    "Input: a number. Output: {what} {n}.",
)
INPUTS = (2, 7)


def rows(num_rows: int = 2000, seed: int = 0) -> list[Row]:
    """Some tasks with a solution each, right or wrong; the same for the same seed."""
    draw = random.Random(f"toy code {seed}")
    return [_row(draw) for _ in range(num_rows)]


def _row(draw: random.Random) -> Row:
    sign, n = draw.choice(list(SIGNS)), draw.randint(1, 9)
    prompt = draw.choice(REQUESTS).format(what=SIGNS[sign], n=n) + "\n"
    outputs = [str({"+": x + n, "-": x - n, "*": x * n}[sign]) for x in INPUTS]
    tests = {"kind": "stdin", "inputs": [f"{x}\n" for x in INPUTS], "outputs": outputs}
    return code_row(prompt, tests, solutions=[_solution(draw, sign, n)], difficulty=SIGNS[sign])


def _solution(draw: random.Random, sign: str, n: int) -> str:
    chance = draw.random()
    if chance < 0.4:
        return f"print(int(input()){sign}{n})"
    if chance < 0.55:
        return f"print(int(input()){sign}{draw.randint(1, 9)})"
    if chance < 0.7:
        return f"print(int(input()){draw.choice(list(SIGNS))}{n})"
    if chance < 0.85:
        return f"print(input(){sign}{n}.0)"
    return f"print(int(input(){sign}{n})"
