"""The page around the figures: its parts as HTML, its one style sheet, and nothing to fetch.

The page runs no script at all, and its content policy forbids any, so that text written
by a model stays text even if an escape were ever forgotten.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from html import escape
from string import Template
from urllib.parse import quote

Cell = str | float | int | None

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


def section(name: str, title: str, lead: str, *parts: str) -> str:
    """A section that begins with how to read it; empty where all its parts are."""
    shown = [part for part in parts if part]
    if not shown:
        return ""
    return (
        f'<section id="{name}"><h2>{text(title)}</h2><p class="lead">{lead}</p>'
        f"{''.join(shown)}</section>"
    )


def grid(figures: Sequence[str], kind: str = "") -> str:
    shown = [figure for figure in figures if figure]
    return f'<div class="grid-of {kind}">{"".join(shown)}</div>' if shown else ""


def chip(label: str, colour: str) -> str:
    """A run's name behind a dot of its colour."""
    return f'<span class="chip"><i style="background:{colour}"></i>{text(label)}</span>'


def render(title: str, subtitle: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """The whole page; sections are (id, short name for the contents, html)."""
    shown = [entry for entry in sections if entry[2]]
    contents = "".join(f'<a href="#{name}">{text(short)}</a>' for name, short, _ in shown)
    return _PAGE.substitute(
        title=text(title),
        subtitle=subtitle,
        contents=contents,
        body="\n".join(html for *_, html in shown),
        style=STYLE,
    )


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1><p class="subtitle">$subtitle</p></header>
<nav aria-label="Contents">$contents</nav>
<main>
$body
</main>
</body>
</html>
""")

# Colours after Okabe and Ito, which stay apart for colour-blind eyes; lighter on dark.
STYLE = """
:root{--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b5598c;--c4:#c98a00;--c5:#3d9bd6;--c6:#7a5bd0;
--c7:#8a6d3b;--start:#8b929c;--bg:#fdfdfc;--ink:#1d2127;--soft:#5d6673;--faint:#9aa2ad;
--rule:#e6e8eb;--wash:#f4f5f6;--accent:#0072b2;--warn:#a24a00;
--t0:#44566b;--t1:#7e92a8;--t2:#aab8c7;--t3:#cdd6df;--t4:#e9ecef;
--m0:#dcebf5;--m1:#f7e8d8;--pos:0,114,178;--neg:213,94,0}
@media screen and (prefers-color-scheme:dark){
:root{--c0:#56b4e9;--c1:#f0894a;--c2:#2fc39b;--c3:#e29ac4;
--c4:#f0c04a;--c5:#8fc7ee;--c6:#b3a0f0;--c7:#c9ab78;--start:#8d96a3;--bg:#14171b;
--ink:#e5e8ec;--soft:#a3acb8;--faint:#737d8a;--rule:#2b3138;--wash:#1e2329;--accent:#7cc4f0;
--warn:#f0a875;--t0:#a9bccf;--t1:#7e92a7;--t2:#5b6c7e;--t3:#414d5a;--t4:#2e363f;--m0:#1f3a4d;--m1:#4a3424;--pos:86,180,233;--neg:240,137,74}}
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
header,main{max-width:1240px;margin:0 auto;padding:0 28px}
header{padding-top:40px}
h1,h2,h3,p,li,figcaption,.legend{overflow-wrap:anywhere}
figcaption b{min-width:0}
h1{font-size:30px;line-height:1.2;letter-spacing:-.015em;margin:0 0 6px;font-weight:680}
.subtitle{margin:0;color:var(--soft)}
nav{position:sticky;top:0;z-index:2;display:flex;gap:2px 16px;max-width:1184px;margin:20px auto 0;
padding:11px 0;font-size:14px;border:solid var(--rule);border-width:1px 0;background:var(--bg);
flex-wrap:wrap}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
section{padding:34px 0 10px;scroll-margin-top:36px}
h2{font-size:21px;letter-spacing:-.01em;margin:0 0 4px;font-weight:650}
h3{font-size:15px;margin:22px 0 6px;font-weight:650}
.lead{margin:0 0 16px;color:var(--soft);max-width:78ch}
.verdict{font-size:20px;line-height:1.45;margin:30px 0 0;max-width:76ch}
.table{overflow-x:auto;margin:0 0 4px}
.table+.grid-of{margin-top:22px}
table{border-collapse:collapse;font-size:14px;line-height:1.4}
#summary table{min-width:100%}
th{font-weight:550;color:var(--soft);vertical-align:bottom;border-bottom:1px solid var(--faint)}
td,th{padding:8px 12px;white-space:nowrap;text-align:left}
td{border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right}
td:first-child,th:first-child{padding-left:2px;position:sticky;left:0;background:var(--bg)}
td small,th small{display:block;color:var(--soft);font-size:12px;font-weight:400}
td.wrap{white-space:normal}
.none{color:var(--faint)}
.chip{font-weight:600;overflow-wrap:anywhere}td .chip{white-space:nowrap}
.chip i,.legend i{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:7px}
.grid-of{display:grid;gap:22px 26px;grid-template-columns:repeat(auto-fill,minmax(350px,1fr))}
.grid-of.two{grid-template-columns:repeat(2,1fr)}
.grid-of.three{grid-template-columns:repeat(3,1fr);margin-bottom:20px}
.beside{display:grid;grid-template-columns:minmax(300px,420px) 1fr;gap:16px 36px;align-items:start}
.beside>*{min-width:0}.beside figure{max-width:440px}
.grid-of+.table{margin-top:18px}
figure{margin:0;min-width:0;break-inside:avoid}
figcaption{display:flex;justify-content:space-between;align-items:baseline;gap:10px;font-size:14px}
figcaption b{font-weight:620}
figure p{font-size:13px;color:var(--soft);margin:2px 0 0;line-height:1.45}
.csv{flex:none;white-space:nowrap;font-size:11.5px;color:var(--faint);letter-spacing:.02em}
.legend{display:flex;flex-wrap:wrap;gap:0 14px;font-size:12.5px;color:var(--soft);margin:2px 0 3px}
.legend i{width:8px;height:8px;margin-right:5px;background:var(--key)}
.legend i.dashed{width:15px;height:3px;border-radius:0;vertical-align:middle;
background:repeating-linear-gradient(90deg,var(--key) 0 6px,transparent 6px 9px)}
svg{display:block;width:100%;height:auto;overflow:hidden}
svg text{font-size:11px;fill:var(--soft)}
svg .name{fill:var(--ink);font-weight:600}
.grid path{stroke:var(--rule);fill:none}.grid .base{stroke:var(--faint)}
.line{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.hit{fill:transparent;stroke:none}
.whisker{fill:none;stroke-width:2.2;stroke-linecap:round}
.seed{fill:var(--bg);stroke-width:1.3}
.join{fill:none;stroke-width:1.4}.leader{fill:none;stroke-width:1.2;stroke-dasharray:1 3}
.raw{fill:none;stroke-width:1;opacity:.28}
.key{stroke-width:3;stroke-linecap:round}
.zero{stroke:var(--soft);stroke-dasharray:3 3;fill:none}
.mean{stroke:var(--ink);stroke-width:1.6;fill:none}
svg .end{fill:var(--ink);font-size:11.5px}
svg .value{fill:var(--ink);text-anchor:end;font-weight:600}
svg .in{fill:var(--bg);text-anchor:middle;font-weight:600}
svg .pale{fill:var(--ink)}
svg .soft{fill:var(--soft);font-weight:400}
.diagonal{stroke:var(--faint);stroke-dasharray:4 3}
.says{display:grid;grid-template-columns:1fr 1fr;gap:8px 44px;margin-top:22px}
.says h3{margin-top:6px}
.says ul{margin:0;padding-left:18px}.says li{margin:0 0 7px}
.warn{color:var(--warn);font-weight:600}
.sample{border-top:1px solid var(--rule);padding:16px 0 10px;break-inside:avoid}
.prompt{white-space:pre-wrap;overflow-wrap:anywhere;color:var(--soft);font-size:14px;
max-height:11em;overflow:auto;margin:0 0 12px;unicode-bidi:isolate}
.prompt b{color:var(--faint);font-weight:600;font-size:12px;margin-right:8px}
.answers{display:grid;gap:14px 20px;grid-template-columns:repeat(auto-fit,minmax(260px,1fr))}
.answer{min-width:0}
.said{white-space:pre-wrap;overflow-wrap:anywhere;font-size:14.5px;line-height:1.7;
max-height:24em;overflow:auto;margin:4px 0;unicode-bidi:isolate}
.said i{font-style:normal;border-radius:3px;padding:1px 0}
.a{background:var(--m0)}.b{background:var(--m1)}
.p1{background:rgba(var(--pos),.12)}.p2{background:rgba(var(--pos),.24)}
.p3{background:rgba(var(--pos),.38)}.p4{background:rgba(var(--pos),.54)}
.n1{background:rgba(var(--neg),.12)}.n2{background:rgba(var(--neg),.24)}
.n3{background:rgba(var(--neg),.38)}.n4{background:rgba(var(--neg),.54)}
.said .m{box-shadow:inset 2px 0 rgba(var(--pos),.8);padding-left:3px}
.said .m.n1,.said .m.n2,.said .m.n3,.said .m.n4{box-shadow:inset 2px 0 rgba(var(--neg),.9)}
.said .n1,.said .n2,.said .n3,.said .n4{text-underline-offset:3px;
text-decoration:underline dotted 1.5px rgba(var(--neg),1)}
.said .a.m,.said .b.m{box-shadow:inset 2px 0 var(--faint)}
summary{cursor:pointer;color:var(--accent);margin:0 0 7px 18px}
.shades{font-size:13px;margin:0 0 14px;max-height:none}.shades i{padding:2px 9px;margin-right:3px}
.shades span{margin-right:16px;white-space:nowrap}
.facts{font-size:12.5px;color:var(--soft);margin:0}
footer{color:var(--faint);font-size:13px;padding:24px 0 40px}
@media (max-width:1000px){.beside{grid-template-columns:1fr}}
@media (max-width:1240px){nav{margin-left:28px;margin-right:28px}}
@media (max-width:700px){header,main{padding-left:16px;padding-right:16px}
nav{margin-left:16px;margin-right:16px;flex-wrap:nowrap;overflow-x:auto;white-space:nowrap}header{padding-top:24px}
h1{font-size:25px}.grid-of,.grid-of.three,.grid-of.two,.beside,.says,.answers{grid-template-columns:1fr}
.verdict{font-size:17px}section{padding-top:26px}td,th{padding:7px 9px}}
@page{margin:13mm}
@media print{:root{--bg:#fff;--ink:#000;--soft:#444;--faint:#888;--rule:#ddd}
body{font-size:10.5pt}nav,.csv{display:none}header,main{max-width:none;padding:0}
.table,.said,.prompt{overflow:visible;max-height:none}table{font-size:8pt}td,th{padding:4px 6px}
h2,h3,.lead{break-after:avoid}section{padding-top:18px}.grid-of{grid-template-columns:1fr 1fr}
.two,.three,.beside{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
