"""The page and its parts: a section is a title, a sentence, and tables and figures below it.

All HTML is in `templates`, filled in with escaping on: only `Markup` is markup, all other text
stays text. The style sheet is inside the page, so there is nothing to fetch. It also does what
reacts to the reader: values under the pointer, runs switched off, samples in another order. One
script, report.js, adds a search box. The page's content policy allows that script alone, by its
digest, so that text written by a model could not run even if an escape were forgotten.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from marlhf.intervals import Interval

DASH = "\u2013"
"""Shown where there is no number."""

bold = Markup("<b>{}</b>").format
code = Markup("<code>{}</code>").format
warn = Markup('<span class="warn">{}</span>').format


def num(value: float | None, digits: int = 3) -> str:
    """A number with its significant digits kept and a real minus sign; a dash for none.

    What differs from zero by rounding only, such as a mean of normalised scores, is zero.
    """
    if value is None or not math.isfinite(value):
        return DASH
    value = 0.0 if abs(value) < 1e-4 else value
    size = abs(value)
    if size >= 1e6:
        shown = f"{value:.{digits - 1}e}"
    else:
        decimals = digits - 1 - (math.floor(math.log10(size)) if size >= 1 else 0)
        shown = f"{value:.{max(0, decimals)}f}"
    if float(shown) == 0:
        shown = shown.removeprefix("-")  # no minus before what rounds to nothing
    return shown.replace("-", "\u2212")


def signed(value: float, digits: int = 3) -> str:
    return ("+" if value > 0 else "") + num(value, digits)


def percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    shown = f"{100 * value:.0f}%"
    # Not quite all is not all.
    return f"{100 * value:.1f}%" if shown in ("0%", "100%") and value not in (0, 1) else shown


def duration(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


Cell = str | float | int | None
NUM_COLOURS = 8
"""Colours in report.css that runs are told apart by; later runs repeat them, dashed."""
STYLE = files("marlhf.report").joinpath("report.css").read_text(encoding="utf-8")
SCRIPT = files("marlhf.report").joinpath("report.js").read_text(encoding="utf-8")
SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\ud800-\udfff\ufffe\uffff]")


def run_class(colour: str) -> str:
    """The CSS class of whatever is drawn in a run's colour; empty for other colours.

    Runs have a colour each, so that a checkbox can hide all of a run by this class.
    """
    match = re.fullmatch(r"var\(--c(\d+)\)", colour)
    return f"r{match[1]}" if match else ""


def class_of(colour: str, kind: str = "") -> Markup:
    """The class attribute of what is drawn in a colour: its own `kind`, and its run's."""
    names = " ".join(filter(None, (kind, run_class(colour))))
    return Markup(' class="{}"').format(names) if names else Markup()


class JoinedLines(Extension):
    """Templates without line breaks and indentation, which would add text to the page.

    A line break in a comment keeps the line numbers of errors.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])", "{#\n#}", source)


_TEMPLATES = Environment(
    loader=PackageLoader("marlhf.report"),
    autoescape=True,
    undefined=StrictUndefined,
    extensions=[JoinedLines],
)
_TEMPLATES.globals |= {"inf": math.inf, "num": num, "signed": signed}
_TEMPLATES.tests["finite"] = math.isfinite
_TEMPLATES.filters |= {"classes": class_of, "run_class": run_class, "num": num, "percent": percent}
_TEMPLATES.filters |= {"g": "{:g}".format, "f1": "{:.1f}".format}
_MACROS = {
    name: macro
    for file in ("parts.html.j2", "charts.svg.j2", "sections.html.j2", "findings.html.j2")
    for name, macro in vars(_TEMPLATES.get_template(file).module).items()
}

TITLES: Mapping[str, str] = _MACROS["titles"]
"""Of the sections, by id."""


def part(macro: str, /, *values: Any, **named: Any) -> Markup:
    """A macro of the templates, filled in."""
    return _MACROS[macro](*values, **named)


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


def section(name: str, *parts: str, folded: bool = False, **words: Any) -> Markup:
    """A section, with `words` for the sentence on how to read it; empty where all its parts are.

    A folded one shows its title alone. Links to it, searches in the page and printing open it.
    """
    if not any(parts):
        return Markup()
    lead = part(f"lead_{name.replace('-', '_')}", **words)
    return part("section", name, TITLES[name], lead, parts, folded)


def grid(figures: Sequence[str], kind: str = "") -> Markup:
    shown = [figure for figure in figures if figure]
    return part("grid", figures=shown, kind=kind) if shown else Markup()


def heading(title: str, lead: str = "") -> Markup:
    """A title within a section, and how to read what is below it."""
    return part("heading", title=title, lead=lead)


def render(
    title: str,
    subtitle: str,
    sections: Mapping[str, str],
    runs: Sequence[tuple[str, str]] = (),
    *,
    switches: int = 0,
    refresh: float | None = None,
) -> str:
    """The whole page; `sections` are HTML by id, `runs` are (label, colour).

    The first `switches` runs can be switched off. With `refresh` the browser loads the page again
    after so many seconds.
    """
    page = _TEMPLATES.get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        sections={name: html for name, html in sections.items() if html},
        switches=runs[:switches] if switches > 1 else (),
        style=Markup(STYLE),
        runs=runs,
        num_colours=NUM_COLOURS,
        script=Markup(SCRIPT),
        digest=SCRIPT_DIGEST,
        refresh=refresh,
    )
    return _UNPRINTABLE.sub("\ufffd", page)  # what no page may hold
