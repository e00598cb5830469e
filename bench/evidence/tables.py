"""Markdown tables and how their numbers are written."""

from __future__ import annotations

from collections.abc import Sequence

MINUS = "\u2212"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    first, *others = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join([first, f"|---{'|---:' * (len(head) - 1)}|\n", *others])


def number(value: float, decimals: int = 2) -> str:
    """With a real minus sign, and none before what rounds to zero."""
    shown = f"{value:.{decimals}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown.replace("-", MINUS)


def points(value: float) -> str:
    """A difference of shares in percentage points."""
    shown = number(100 * value, 0)
    return f"+{shown}" if value > 0 and float(shown) else shown


def signed(value: float) -> str:
    shown = number(value)
    return f"+{shown}" if value > 0 and float(shown) else shown
