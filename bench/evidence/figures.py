"""The report's own charts as files that stand alone: with their style and their key inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from marlhf.report.charts import LARGE, Series, line_chart
from marlhf.report.groups import Group
from marlhf.report.page import STYLE, text

ROW, CHARACTER = 17, 6.4
"""Pixels of a row of the key, and of a letter in it."""
RULES = "".join(re.findall(r"^(?:svg text|svg \.name|\.grid path|\.line|\.hit) \{.*$", STYLE, re.M))
ROOTS = STYLE[STYLE.index(":root") : STYLE.index("* { box-sizing")]


def curve(groups: Sequence[Group], key: str, name: str, *, pace: Sequence[float] = ()) -> str:
    """A number over steps; over seconds where `pace` gives each group's seconds per step."""
    series: list[Series] = []
    for i, group in enumerate(groups):
        unit = pace[i] if pace else 1.0
        points = [(p.step * unit, p.mean, p.low, p.high) for p in group.curve(key)]
        band = [(x, low, high) for x, _, low, high in points] if group.num_seeds > 1 else ()
        line = [(x, y) for x, y, *_ in points]
        series.append(Series(group.label, line, group.colour, band, group.dash))
    share = key in ("eval/repetition", "eval/ended")
    label = "seconds" if pace else "step"
    drawn = line_chart(series, x_label=label, y_label=name, size=LARGE, is_share=share)
    return standalone(drawn, groups, name)


def frontier(groups: Sequence[Group]) -> str:
    """Score against KL, one point per evaluation."""
    series: list[Series] = []
    for group in groups:
        kl = {p.step: p.mean for p in group.curve("eval/kl")}
        points = [(kl[p.step], p.mean) for p in group.curve("eval/score") if p.step in kl]
        series.append(Series(group.label, points, group.colour, dash=group.dash))
    drawn = line_chart(series, x_label="KL (nats per response)", y_label="score", size=LARGE)
    return standalone(drawn, groups, "score")


def standalone(svg: str, groups: Sequence[Group], name: str) -> str:
    """An SVG file: a title, the key below, light and dark."""
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert found
    width, height = int(found[1]), int(found[2])
    keys: list[str] = []
    x, y = 46.0, height + 10.0
    for group in groups:
        wide = 26 + CHARACTER * len(group.label)
        if x + wide > width:
            x, y = 46.0, y + ROW
        dash = f' stroke-dasharray="{group.dash}"' if group.dash else ""
        keys.append(
            f'<path d="M{x:g} {y - 4:g}h14" stroke="{group.colour}" stroke-width="2.5"{dash}/>'
            f'<text x="{x + 19:g}" y="{y:g}">{text(group.label)}</text>'
        )
        x += wide
    top = 22
    size = f'viewBox="0 -{top} {width} {y + 8 + top:g}" width="{width * 1.5:g}"'
    title = f'<text class="name" x="46" y="-6">{text(name)}</text>'
    style = f"<style>{ROOTS}svg{{font-family:sans-serif}}{RULES}</style>"
    ground = f'<rect y="-{top}" width="100%" height="100%" fill="var(--bg)"/>'
    body = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{text(name)}">'
        f"{style}{ground}{title}{body}{''.join(keys)}</svg>\n"
    )


def write(folder: Path, name: str, svg: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.svg"
    file.write_text(svg, encoding="utf-8")
    return file
