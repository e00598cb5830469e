"""The page around the figures: its parts as HTML, with its style sheet inside and nothing to fetch.

What reacts to the reader (values under the pointer, runs switched off, samples in another order) is
done by the style sheet. One script, report.js, adds a search box. The page's content policy allows
that script alone, by its digest, so that text written by a model stays text even if an escape were
ever forgotten.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from urllib.parse import quote

from marlhf.intervals import Interval

Cell = str | float | int | None
NUM_COLOURS = 8
"""Colours in report.css that runs are told apart by; later runs repeat them, dashed."""
STYLE = files("marlhf.report").joinpath("report.css").read_text(encoding="utf-8")
SCRIPT = files("marlhf.report").joinpath("report.js").read_text(encoding="utf-8")
SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\ud800-\udfff\ufffe\uffff]")


def text(value: object) -> str:
    """Anything as harmless HTML text: escaped, and without what no page may hold."""
    return escape(_UNPRINTABLE.sub("\ufffd", str(value)))


def num(value: float | None, digits: int = 3) -> str:
    """A number with its significant digits kept and a real minus sign; a dash for none.

    What differs from zero by rounding only, such as a mean of normalised scores, is zero.
    """
    if value is None or not math.isfinite(value):
        return '<span class="none">&ndash;</span>'
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
        return num(None)
    shown = f"{100 * value:.0f}%"
    # Not quite all is not all.
    return f"{100 * value:.1f}%" if shown in ("0%", "100%") and value not in (0, 1) else shown


def duration(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if seconds is None or not math.isfinite(seconds):
        return num(None)
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def csv_link(name: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A link that holds the data itself, so that it works from a mail attachment."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_csv_cell(cell) for cell in header])
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)
    file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "data"
    data = quote(out.getvalue(), safe=",.:/ ()=+-_", errors="replace")
    return (
        f'<a class="csv" download="{file}.csv" href="data:text/csv;charset=utf-8,{data}" '
        f'title="The data of this figure">CSV</a>'
    )


def _csv_cell(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    if isinstance(cell, float):
        return f"{cell:.6g}"
    # A spreadsheet would run text that begins like a formula.
    words = str(cell)
    return f"'{words}" if words[:1] in ("=", "+", "-", "@", "\t", "\r") else words


def interval_cell(
    value: Interval | None, form: Callable[[float], str] = num, *, bold: bool = False
) -> str:
    """A number in a table, with its interval below it."""
    if value is None or math.isnan(value.mean):
        return num(None)
    shown = f"<b>{form(value.mean)}</b>" if bold else form(value.mean)
    return f"{shown}<small>{bounds}</small>" if (bounds := value.bounds(form)) else shown


def figure(
    title: str,
    chart: str,
    *,
    file: str,
    key: str = "",
    note: str = "",
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
) -> str:
    """One chart with its name, its colour key, what to note about it, and its data."""
    caption = f"<p>{note}</p>" if note else ""
    return (
        f"<figure><figcaption><b>{text(title)}</b>{csv_link(file, header, rows)}</figcaption>"
        f"{key}{chart}{caption}</figure>"
    )


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, csv: str = "", words: int = 1
) -> str:
    """A table of ready HTML cells; all but the first `words` columns are numbers, on the right."""
    kind = ["w" if i < words else "n" for i in range(len(header))]
    head = "".join(f'<th scope="col" class="{k}">{cell}</th>' for k, cell in zip(kind, header))
    body = "".join(
        "<tr>" + "".join(f'<td class="{k}">{cell}</td>' for k, cell in zip(kind, row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{csv}"
    )


def section(name: str, title: str, lead: str, *parts: str, folded: bool = False) -> str:
    """A section that begins with how to read it; empty where all its parts are.

    A folded one shows its title alone. Links to it, searches in the page and printing open it.
    """
    shown = "".join(part for part in parts if part)
    if not shown:
        return ""
    head, lead = f"<h2>{text(title)}</h2>", f'<p class="lead">{lead}</p>'
    if folded:
        body = f'<section id="{name}">{lead}{shown}</section>'
        return f'<details class="fold"><summary>{head}</summary>{body}</details>'
    return f'<section id="{name}">{head}{lead}{shown}</section>'


def grid(figures: Sequence[str], kind: str = "") -> str:
    shown = [figure for figure in figures if figure]
    return f'<div class="grid-of {kind}">{"".join(shown)}</div>' if shown else ""


def run_class(colour: str) -> str:
    """The CSS class of whatever is drawn in a run's colour; empty for other colours.

    Runs have a colour each, so that a checkbox can hide all of a run by this class.
    """
    match = re.fullmatch(r"var\(--c(\d+)\)", colour)
    return f"r{match[1]}" if match else ""


def class_of(colour: str, kind: str = "") -> str:
    """The class attribute of what is drawn in a colour: its own `kind`, and its run's."""
    names = " ".join(filter(None, (kind, run_class(colour))))
    return f' class="{names}"' if names else ""


def chip(label: str, colour: str) -> str:
    """A run's name behind a dot of its colour."""
    dot = f'<i{class_of(colour)} style="background:{colour}"></i>'
    return f'<span class="chip">{dot}{text(label)}</span>'


def run_switches(runs: Sequence[tuple[str, str]]) -> str:
    """Checkboxes that show and hide runs, (label, colour) each; none for a single run."""
    if len(runs) < 2:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" name="{run_class(colour)}" checked>'
        f'<i style="background:{colour}"></i>{text(label)}</label>'
        for label, colour in runs
    )
    return f'<fieldset class="runs"><legend>Show runs</legend>{boxes}</fieldset>'


def _run_style(runs: Sequence[tuple[str, str]]) -> str:
    """Rules that hide what belongs to a run that is switched off; more colours than the palette."""
    rules: list[str] = []
    for _, colour in runs:
        name = run_class(colour)
        index = int(name[1:])
        if index >= NUM_COLOURS:
            rules.append(f":root{{--c{index}:var(--c{index % NUM_COLOURS})}}")
        if len(runs) > 1:
            rules.append(
                f"body:has(input[name={name}]:not(:checked)) :is(.{name},.answer:has(.{name}),"
                f"tbody tr:has(>td:first-child .{name})){{display:none}}"
            )
    return "\n".join(rules)


def render(
    title: str,
    subtitle: str,
    sections: Sequence[tuple[str, str, str]],
    *,
    runs: Sequence[tuple[str, str]] = (),
    switches: int = 0,
    refresh: float | None = None,
) -> str:
    """The whole page; sections are (id, short name for the contents, html).

    `runs` are (label, colour); the first `switches` of them can be switched off.
    With `refresh` the browser loads the page again after so many seconds.
    """
    shown = [entry for entry in sections if entry[2]]
    contents = "".join(f'<a href="#{name}">{text(short)}</a>' for name, short, _ in shown)
    reload = f'<meta http-equiv="refresh" content="{refresh:g}">' if refresh else ""
    return _PAGE.substitute(
        title=text(title),
        subtitle=subtitle,
        contents=contents,
        switches=run_switches(runs[:switches]),
        body="\n".join(html for *_, html in shown),
        style=f"{STYLE}\n{_run_style(runs)}",
        script=SCRIPT,
        digest=SCRIPT_DIGEST,
        reload=reload,
    )


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-$digest';
 base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
$reload<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1><p class="subtitle">$subtitle</p></header>
<div class="top"><nav aria-label="Contents">$contents</nav>
$switches</div>
<main>
$body
</main>
<script>$script</script>
</body>
</html>
""")
