"""Tables for the terminal: plain text, as wide as it needs to be, the same in a pipe."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """The first `words` columns on the left, numbers on the right.

    >>> print(text_table(["run", "score"], [["ppo", "0.92"], ["macro-ppo", "1.5"]]))
    run        score
    ppo         0.92
    macro-ppo    1.5
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
