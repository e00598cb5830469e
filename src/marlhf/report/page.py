"""The page and its parts: a section is a title, a sentence, and tables and figures below it.

All HTML is in `templates`, filled in with escaping on: only `Markup` is markup, all other text
stays text. The style sheet is inside the page, so there is nothing to fetch. It also does what
reacts to the reader: values under the pointer, runs switched off, samples in another order. One
script, report.js, adds a search box. The page's content policy allows that script alone, by its
digest, so that text written by a model could not run even if an escape were forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from marlhf.report.numbers import num, percent, signed

bold = Markup("<b>{}</b>").format
code = Markup("<code>{}</code>").format
warn = Markup('<span class="warn">{}</span>').format


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


def words(name: str) -> Mapping[str, Any]:
    """A dictionary of the templates."""
    return _MACROS[name]


def part(macro: str, /, *values: Any, **named: Any) -> Markup:
    """A macro of the templates, filled in."""
    return _MACROS[macro](*values, **named)


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
