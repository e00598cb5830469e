"""Splits by prompt, the same on every machine.

A hash of its text and the seed decides in which part a prompt is, never its
position in the file, so the parts of two stages stay disjoint even when one
reads the rows in another order.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from marlhf.data.rows import DataError, Row, prompt_key

STAGE_PARTS = {"sft": 0.2, "reward": 0.4, "ppo": 0.4}
"""The paper's shares of the rows for each stage."""


def split_rows(
    rows: Sequence[Row], fractions: Mapping[str, float] = STAGE_PARTS, seed: int = 0
) -> dict[str, list[Row]]:
    """Rows by part, each part near its fraction of all rows, no prompt in two of them.

    Prompts are put in a random order; each goes to the part within whose
    share its middle row falls, so a part misses its size by at most one
    prompt's rows. Where the fractions sum to less than 1, the rest is in no part.

    >>> parts = split_rows([Row(f"Question {n}") for n in range(10)], {"sft": 0.2, "ppo": 0.8})
    >>> {name: len(rows) for name, rows in parts.items()}
    {'sft': 2, 'ppo': 8}
    """
    check_fractions(fractions)
    keys = [prompt_key(row) for row in rows]
    bounds = _running_sums(fractions, total=len(rows))
    part_of: dict[str, str] = {}
    done = 0
    for key, size in _shuffled(keys, f"parts {seed}"):
        middle = done + size / 2
        done += size
        part = next((name for name, bound in bounds.items() if middle <= bound), None)
        if part is not None:
            part_of[key] = part
    parts: dict[str, list[Row]] = {name: [] for name in fractions}
    for row, key in zip(rows, keys, strict=True):
        if key in part_of:
            parts[part_of[key]].append(row)
    return parts


def held_out(rows: Sequence[Row], size: int | float, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """(train, eval): whole prompts held out, about `size` rows or that fraction of them.

    Anything above 0 holds out at least one prompt, so that a small data
    set is evaluated too.

    >>> train, evaluation = held_out([Row(f"Question {n}") for n in range(10)], 2)
    >>> len(train), len(evaluation)
    (8, 2)
    """
    if isinstance(size, float) and not 0 <= size < 1:
        raise DataError(f"An evaluation share of {size} is not in [0, 1). For rows, give an int.")
    if size < 0 or (isinstance(size, int) and size >= len(rows) > 0):
        raise DataError(
            f"{size} rows cannot be held out for evaluation of {len(rows)}: "
            "none would be left to train on. Lower `eval_size`."
        )
    target = size * len(rows) if isinstance(size, float) else size
    keys = [prompt_key(row) for row in rows]
    held: set[str] = set()
    done = 0
    for key, number in _shuffled(keys, f"held out {seed}")[:-1]:  # leave one to train on
        if done + number / 2 > target and (held or target == 0):
            break
        held.add(key)
        done += number
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    evaluation = [row for row, key in zip(rows, keys, strict=True) if key in held]
    return train, evaluation


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Refuse shares outside (0, 1] or above 1 in sum."""
    wrong = {name: share for name, share in fractions.items() if not 0 < share <= 1}
    if wrong:
        raise DataError(f"Each part must be a share in (0, 1], but these are not: {wrong}.")
    total = math.fsum(fractions.values())
    if total > 1 + 1e-9:
        raise DataError(f"The parts {dict(fractions)} add up to {total:g}; make it 1 or less.")


def _running_sums(fractions: Mapping[str, float], total: int) -> dict[str, float]:
    """Where each part ends, in rows. The 1e-6 is for 0.2 + 0.4 + 0.4 < 1 in floats.

    Parts are ordered by name, so that recipes that list them in another order make the same parts.
    """
    names = sorted(fractions)
    shares = [fractions[name] for name in names]
    return {name: math.fsum(shares[: i + 1]) * total + 1e-6 for i, name in enumerate(names)}


def _shuffled(keys: Sequence[str], salt: str) -> list[tuple[str, int]]:
    """Each prompt with its number of rows, in an order that depends on the salt alone."""

    def place(key: str) -> bytes:
        # surrogatepass: JSON may hold half a surrogate pair, and it must not stop a run
        return hashlib.sha256(f"{salt}\0{key}".encode("utf-8", "surrogatepass")).digest()

    return sorted(Counter(keys).items(), key=lambda item: place(item[0]))
