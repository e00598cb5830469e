"""Charts as SVG files of their own: one panel per reward model, style and key inside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from evidence.predicted import Prediction
from evidence.results import BETA, LABELS, OTHER_BETAS, Results, gold, kl, score
from marlhf.intervals import Interval
from marlhf.report.charts import BOTTOM, LEFT, TOP, Scale, frame, span
from marlhf.report.groups import NUM_COLOURS
from marlhf.report.page import STYLE

PANEL = (250, 240)
"""Width and height of a panel, in the figure's own units."""
TITLE, ROW, CHARACTER = 26, 17, 6.2
"""Height of the title, height of a row of the key, width of a letter in it."""
RULES = "".join(re.findall(r"^(?:svg text|svg \.name|\.grid path|\.line) \{[^}]*\}", STYLE, re.M))
ROOTS = STYLE[STYLE.index(":root") : STYLE.index("* { box-sizing")]


def end_points(results: Results) -> str:
    """Score against KL after the last step. On the dashed line all are as good as PPO."""
    drawn: list[str] = []
    for i, teacher in enumerate(results.teachers):
        steps = {m: results.last_step(m, teacher) for m in results.methods(teacher)}
        points = {
            m: tuple(results.mean(measure, m, teacher, step) for measure in (kl, score))
            for m, step in steps.items()
        }
        x_axis, y_axis = _axes(i, [x for x, _ in points.values()], [y for _, y in points.values()])
        drawn.append(frame(x_axis, y_axis, "KL (nats per response)", "score"))
        drawn.append(_panel_title(i, teacher))
        final = max(steps.values())
        if steps.get("ppo") == final:
            drawn.append(_level_line(points["ppo"], x_axis, y_axis))
        for method, (x, y) in points.items():
            note = f"{_plain(method)}, step {steps[method]}: {y:.2f} at KL {x:.1f}"
            drawn.append(_mark(method, x_axis(x), y_axis(y), note, hollow=steps[method] < final))
    return _figure("Score against KL at the last evaluation", drawn, *_shown(results))


def frontier(results: Results) -> str:
    """Score and gold against KL at the end, a line through the betas of each method."""
    lines: dict[str, list[tuple[str, list[float]]]] = {}
    [teacher] = {t for m, t in results.runs if m.endswith(tuple(OTHER_BETAS))}
    for method in results.methods(teacher):
        base = re.sub(f"({'|'.join(OTHER_BETAS)})$", "", method)
        step = results.last_step(method, teacher)
        ends = [results.mean(measure, method, teacher, step) for measure in (kl, score, gold)]
        lines.setdefault(base, []).append((method, ends))
    lines = {
        base: sorted(points, key=lambda point: point[1])
        for base, points in lines.items()
        if len(points) > 1
    }
    drawn: list[str] = []
    for panel, name in enumerate(("score", "gold")):
        xs = [ends[0] for points in lines.values() for _, ends in points]
        ys = [ends[1 + panel] for points in lines.values() for _, ends in points]
        x_axis, y_axis = _axes(panel, xs, ys)
        drawn += [frame(x_axis, y_axis, "KL (nats per response)", name), _panel_title(panel, name)]
        for base, points in lines.items():
            places = [(x_axis(ends[0]), y_axis(ends[1 + panel])) for _, ends in points]
            path = "L".join(f"{x} {y}" for x, y in places)
            drawn.append(f'<path class="line" stroke="{_colour(base)}" d="M{path}"/>')
            for (x, y), (method, _) in zip(places, points, strict=True):
                drawn.append(_mark(base, x, y, _plain(method)))
    return _figure("End points over several betas", drawn, list(lines), panels=2)


def predicted_gains(starts: Mapping[str, Sequence[Prediction]]) -> str:
    """What each rule gained against its cosine before, a panel per start; bars: 95% intervals."""
    drawn: list[str] = []
    names: list[str] = []
    for panel, (title, predicted) in enumerate(starts.items()):
        bars = [
            (each, (each.cosine - 2 * each.error, each.cosine + 2 * each.error))
            for each in predicted
        ]
        xs = [0.0, *(x for _, ends in bars for x in ends)]
        ys = [0.0, *(y for each in predicted for y in (each.gained.low, each.gained.high))]
        x_axis, y_axis = _axes(panel, xs, ys)
        drawn.append(frame(x_axis, y_axis, "cosine with the true gradient", "gained in 30 steps"))
        drawn.append(_panel_title(panel, f"from {title}"))
        zeros = f"M{x_axis(0)} {y_axis(y_axis.low)}V{y_axis(y_axis.high)}"
        zeros += f"M{x_axis(x_axis.low)} {y_axis(0)}H{x_axis(x_axis.high)}"
        drawn.append(f'<path stroke="var(--soft)" stroke-dasharray="4 3" fill="none" d="{zeros}"/>')
        for each, (left, right) in bars:
            method = {"n5": "n5-start"}.get(each.method, each.method)
            names += [method] * (method not in names)
            x, y = x_axis(each.cosine), y_axis(each.gained.mean)
            cross = f"M{x_axis(left)} {y}H{x_axis(right)}"
            cross += f"M{x} {y_axis(each.gained.low)}V{y_axis(each.gained.high)}"
            style = f'stroke="{_colour(method)}" stroke-opacity="0.5" fill="none"'
            drawn.append(f'<path {style} d="{cross}"/>')
            note = f"{_plain(method)}: {each.gained.mean:+.2f}, cosine {each.cosine:.2f}"
            drawn.append(_mark(method, x, y, note))
    shown = [method for method in LABELS if method in names]
    return _figure(
        "Score \u2212 0.05 KL gained in 30 steps, against the cosine before",
        drawn,
        shown,
        len(starts),
    )


def scatter(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Sequence[tuple[float, Interval, str]]],
) -> str:
    """Shares with their intervals in points, against a number: a colour per series."""
    drawn: list[str] = []
    every = [each for points in series.values() for each in points]
    ys = [0.0, *(100 * y for _, each, _ in every for y in (each.low, each.high))]
    x_axis, y_axis = _axes(0, [1.0, *(x for x, _, _ in every)], ys, panels=2)
    drawn.append(frame(x_axis, y_axis, across, up))
    zero = f"M{x_axis(x_axis.low)} {y_axis(0)}H{x_axis(x_axis.high)}"
    drawn.append(f'<path stroke="var(--soft)" stroke-dasharray="4 3" fill="none" d="{zero}"/>')
    keys = list(LABELS)[: len(series)]  # for their colours
    for key, points in zip(keys, series.values(), strict=True):
        for x, each, note in points:
            bar = f"M{x_axis(x)} {y_axis(100 * each.low)}V{y_axis(100 * each.high)}"
            drawn.append(f'<path stroke="{_colour(key)}" stroke-opacity="0.5" d="{bar}"/>')
            note = f"{note}: {100 * each.mean:+.1f}, headroom {x:.2f}"
            drawn.append(_mark(key, x_axis(x), y_axis(100 * each.mean), note))
    return _figure(title, drawn, keys, 2, dict(zip(keys, series, strict=True)))


def _axes(
    panel: int, xs: Sequence[float], ys: Sequence[float], panels: int = 1
) -> tuple[Scale, Scale]:
    width, height = PANEL
    left = panel * width
    right = left + panels * width - 8
    x_axis = Scale(*span(xs, margin=0.08), left + LEFT, right)
    return x_axis, Scale(*span(ys, margin=0.08), height - BOTTOM, TOP + 12)


def _panel_title(panel: int, teacher: str) -> str:
    return f'<text class="name" x="{panel * PANEL[0] + LEFT}" y="12">{escape(teacher)}</text>'


def _level_line(ppo: tuple[float, ...], x_axis: Scale, y_axis: Scale) -> str:
    """Where score - BETA KL is that of PPO, as far as it lies inside the panel."""
    level = ppo[1] - BETA * ppo[0]
    low = max(x_axis.low, (y_axis.low - level) / BETA)
    high = min(x_axis.high, (y_axis.high - level) / BETA)
    ends = [f"{x_axis(x)} {y_axis(level + BETA * x)}" for x in (low, high)]
    return f'<path stroke="var(--soft)" stroke-dasharray="4 3" fill="none" d="M{"L".join(ends)}"/>'


def _colour(method: str) -> str:
    return f"var(--c{list(LABELS).index(method) % NUM_COLOURS})"


def _in_palette(method: str) -> bool:
    return list(LABELS).index(method) < NUM_COLOURS


def _mark(method: str, x: str, y: str, note: str, *, hollow: bool = False) -> str:
    """A circle; a square for methods beyond the palette. Hollow: stopped before the last step."""
    colour = _colour(method)
    fill = "var(--bg)" if hollow else colour
    style = f'fill="{fill}" stroke="{colour}" stroke-width="1.6"'
    title = f"<title>{escape(note)}</title>"
    if _in_palette(method):
        return f'<circle cx="{x}" cy="{y}" r="3.6" {style}>{title}</circle>'
    corner = f'x="{float(x) - 3.4:.1f}" y="{float(y) - 3.4:.1f}"'
    return f'<rect {corner} width="6.8" height="6.8" {style}>{title}</rect>'


def _plain(method: str) -> str:
    return LABELS[method].replace("`", "")


def _shown(results: Results) -> tuple[list[str], int]:
    """All methods, and a panel for each reward model."""
    shown = {method for teacher in results.teachers for method in results.methods(teacher)}
    return [method for method in LABELS if method in shown], len(results.teachers)


def _figure(
    title: str,
    drawn: Sequence[str],
    methods: Sequence[str],
    panels: int,
    named: Mapping[str, str] | None = None,
) -> str:
    """An SVG file: a title, the panels, the key below; light and dark."""
    named = named or {method: _plain(method) for method in methods}
    width, height = PANEL[0] * panels, PANEL[1]
    keys: list[str] = []
    x, y = float(LEFT), height + 12.0
    for method in methods:
        wide = 26 + CHARACTER * len(named[method])
        if x + wide > width and x > LEFT:
            x, y = float(LEFT), y + ROW
        keys.append(_mark(method, f"{x:g}", f"{y - 4:g}", named[method]))
        keys.append(f'<text x="{x + 9:g}" y="{y:g}">{escape(named[method])}</text>')
        x += wide
    whole = f'viewBox="0 -{TITLE} {width} {y + 10 + TITLE:g}" width="{width * 1.3:g}"'
    name = escape(title.replace("`", ""))
    style = f"<style>{ROOTS}svg{{font-family:sans-serif}}{RULES}</style>"
    ground = f'<rect y="-{TITLE}" width="100%" height="100%" fill="var(--bg)"/>'
    heading = f'<text class="name" x="{LEFT}" y="-10">{name}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {whole} role="img" aria-label="{name}">'
        f"{style}{ground}{heading}{''.join(drawn)}{''.join(keys)}</svg>\n"
    )
