"""Tables, and figures with their data: each has its numbers as a CSV inside the page."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from marlhf.intervals import Interval
from marlhf.report.numbers import num
from marlhf.report.page import bold, part

Cell = str | float | int | None


class Chip(NamedTuple):
    """A run's name behind a dot of its colour."""

    label: str
    colour: str


class Below(NamedTuple):
    """A table cell with lines in small print below it."""

    value: object
    lines: Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of a table: its title on the page and its name in the CSV, each empty to omit it."""

    title: str
    name: str = ""
    form: Callable[[Any], str] | None = None
    is_bold: bool = False

    def html(self, value: Any) -> object:
        """A cell as the page shows it: an interval has its bounds below the mean."""
        if isinstance(value, Below):
            return part("below", shown=self.html(value.value), lines=value.lines)
        if isinstance(value, Chip):
            return part("chip", label=value.label, colour=value.colour)
        if isinstance(value, Interval):
            bounds = value.bounds(self.form or num)
            return part("below", shown=self.html(value.mean), lines=[bounds] if bounds else [])
        if value is None or value != value:
            return part("missing")
        form = self.form or (num if isinstance(value, float) else str)
        shown = value if isinstance(value, Markup) else form(value)
        return bold(shown) if self.is_bold else shown

    def data(self, value: Any) -> list[Cell]:
        """A cell as the CSV has it: an interval takes three."""
        if isinstance(value, Below):
            return self.data(value.value)
        if isinstance(value, Interval):
            return list(value[:3])
        return [value.label if isinstance(value, Chip) else value]


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[object]],
    *,
    file: str = "",
    csv: str = "",
    words: int = 1,
) -> Markup:
    """A table; all but the first `words` columns are numbers, on the right.

    With `file` there is a CSV of the same cells; `csv` is a link to other data.
    """
    if file:
        header: list[str] = []
        data: list[list[Cell]] = [[] for _ in rows]
        for i, column in enumerate(columns):
            if column.name:
                cells = [column.data(row[i]) for row in rows]
                width = max(map(len, cells), default=1)
                header += [column.name, f"{column.name} low", f"{column.name} high"][:width]
                for line, cell in zip(data, cells):
                    line += [*cell, None, None][:width]
        csv = csv_link(file, header, data)
    shown = [(i, column) for i, column in enumerate(columns) if column.title]
    return part(
        "table",
        header=[column.title for _, column in shown],
        rows=[[column.html(row[i]) for i, column in shown] for row in rows],
        words=words,
        csv=csv,
    )


def csv_link(name: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Markup:
    """A link that holds the data itself, so that it works from a mail attachment."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_csv_cell(cell) for cell in header])
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)
    file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "data"
    data = quote(out.getvalue(), safe=",.:/ ()=+-_", errors="replace")
    return part("csv", file=file, data=data)


def _csv_cell(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    if isinstance(cell, float):
        return f"{cell:.6g}"
    # A spreadsheet would run text that begins like a formula.
    words = str(cell)
    return f"'{words}" if words[:1] in ("=", "+", "-", "@", "\t", "\r") else words


def figure(
    title: str,
    chart: str,
    *,
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    file: str = "",
    key: str = "",
    note: str = "",
) -> Markup:
    """One chart with its name, its colour key, what to note about it, and its data.

    The CSV is named `file`, or like the figure.
    """
    csv = csv_link(file or title, header, rows)
    return part("figure", title=title, chart=chart, csv=csv, key=key, note=note)
