"""Numbers over the course of training: held-out curves, batches, the models behind, seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from markupsafe import Markup

from marlhf.intervals import mean, quantiles, thin
from marlhf.report.charts import Series, legend_of, line_chart
from marlhf.report.dots import Bars, stacked_bars
from marlhf.report.groups import CurvePoint, Group
from marlhf.report.numbers import duration, percent
from marlhf.report.page import grid, heading, part, section, words
from marlhf.report.tables import Below, Cell, Chip, Column, figure, table
from marlhf.runs.layout import facts_of
from marlhf.runs.read import number

MAX_POINTS = 300
POINTS_PER_CHART = 1500
"""Shared by the lines of a chart, so that forty runs still make a page one can mail."""

SHARES = {"clip_fraction", "ended", "repetition", "win_rate", "accuracy"}
SHARES |= {"first_error", "error_free", "success", "cut_episodes", "failed_episodes"}
LEARNING = list(words("learning_curves").items())
TRAINING = list(words("training_curves").items())
STAGE_MEASURES = ("loss", "accuracy", "margin", "first_error", "error_free", "learning_rate")
"""Of each stage that is not reinforcement learning, where it records them."""


def curve_figure(
    title: str, groups: Sequence[Group], keys: Sequence[str], *, x: str = "step"
) -> Markup:
    """Lines of the first of `keys` that anyone recorded; held-out and training never mix."""
    for key in keys:
        points = [[p for p in g.curve(key) if math.isfinite(getattr(p, x))] for g in groups]
        curves = [(group, each) for group, each in zip(groups, points) if each]
        if curves:
            break
    else:
        return Markup()
    limit = max(40, min(MAX_POINTS, POINTS_PER_CHART // len(curves)))
    # Training batches are noisy, evaluations are not: only the former are smoothed.
    window = 1 if key.startswith("eval/") else _window(points for _, points in curves)
    lines: list[Series] = []
    rows: list[list[Cell]] = []
    for group, points in curves:
        smooth = _running_mean(points, window, limit)
        kept = thin(points, limit)
        band = [(getattr(p, x), p.low, p.high) for p in smooth] if len(group.runs) > 1 else ()
        line = [(getattr(p, x), p.mean) for p in smooth]
        raw = [(getattr(p, x), p.mean) for p in kept] if window > 1 and len(curves) < 4 else ()
        lines.append(Series(group.label, line, group.colour, band, group.dash, raw=raw))
        ends = [[s.mean] if window > 1 else [] for s in smooth]
        rows += [[group.label, *point, *end] for point, end in zip(kept, ends)]
    header = ["run", "step", "seconds", key, "lowest seed", "highest seed"]
    return figure(
        title,
        line_chart(lines, x_label=x, y_label=title, is_share=key.rpartition("/")[2] in SHARES),
        file=f"{title} by {x}",
        key=legend_of(lines),
        note=f"Running means over {window} steps." if window > 1 else "",
        header=[*header, "running mean"] if window > 1 else header,
        rows=rows,
    )


def _window(curves: Iterable[Sequence[CurvePoint]]) -> int:
    """Logged steps that a running mean is taken over: a thirtieth of the longest run."""
    return max(1, max((len(points) for points in curves), default=0) // 30)


def _running_mean(points: list[CurvePoint], window: int, limit: int) -> list[CurvePoint]:
    """At most `limit` points, each averaged with its neighbours, fewer towards the ends."""
    if window == 1:
        return thin(points, limit)
    sums = [list(accumulate((p[i] for p in points), initial=0.0)) for i in (2, 3, 4)]
    smooth: list[CurvePoint] = []
    for i in thin(range(len(points)), limit):
        reach = min(window // 2, i, len(points) - 1 - i)
        first, last = i - reach, i + reach + 1
        means = [(column[last] - column[first]) / (last - first) for column in sums]
        smooth.append(CurvePoint(points[i].step, points[i].seconds, *means))
    return smooth


def learning(policies: list[Group]) -> Markup:
    """Score beside gold, KL, length and repetition, over steps and over seconds."""
    blocks: list[Markup] = []
    for x, measures in (("step", LEARNING), ("seconds", LEARNING[:3])):
        if figures := grid([curve_figure(title, policies, keys, x=x) for title, keys in measures]):
            blocks += [heading(f"Over {x.removesuffix('s')}s"), figures]
    return section(
        "learning",
        *blocks,
        held_out=any(group.curve("eval/score") for group in policies),
        bands=any(len(group.runs) > 1 for group in policies),
    )


def training(policies: list[Group]) -> Markup:
    """Losses, norms and ratios of the training batches."""
    figures = [curve_figure(title, policies, keys) for title, keys in TRAINING]
    return section("training", grid(figures), folded=True)


def stages(groups: list[Group], *, with_table: bool) -> Markup:
    """The SFT and reward models that the policies started from, and DPO, which has no score."""
    figures: list[Markup] = []
    for stage in dict.fromkeys(group.stage for group in groups):
        alike = [group for group in groups if group.stage == stage]
        names = {"reward": "Reward-model", "prm": "Process-model"}
        name = names.get(stage, stage.upper())
        for measure in STAGE_MEASURES:
            what = measure.replace("_", " ")
            figures.append(curve_figure(f"{name} {what}", alike, (f"{stage}/{measure}",)))
            figures.append(curve_figure(f"{name} held-out {what}", alike, (f"eval/{measure}",)))
    numbers = stage_table(groups) if with_table else ""
    return section("stages", numbers, grid(figures), folded=with_table)


def stage_table(groups: list[Group]) -> Markup:
    """The last numbers of each SFT, reward or DPO run."""
    measures = [
        (Column("Loss"), [f"{group.stage}/loss" for group in groups]),
        (Column("Held-out loss"), ["eval/loss"]),
        (Column("Held-out accuracy", form=percent), ["eval/accuracy"]),
        (Column("Where the shorter won", form=percent), ["eval/accuracy_short"]),
        (Column("Calibration error", form=percent), ["eval/calibration_error"]),
        (Column("Correlation with length"), ["eval/length_correlation"]),
    ]
    measures = [m for m in measures if any(g.finals(key) for g in groups for key in m[1])]
    columns = [Column("Run"), Column("Stage"), Column("Steps"), *(m[0] for m in measures)]
    rows: list[list[object]] = []
    for group in groups:
        means = [mean([x for key in {*keys} for x in group.finals(key)]) for _, keys in measures]
        stage = facts_of(group.stage).label
        rows.append([name_cell(group), stage, group.last_step, *means, group.seconds])
    return table([*columns, Column("Time", form=duration)], rows, words=2) if rows else Markup()


def name_cell(group: Group, kind: str = "") -> Below:
    status = sorted({run.status for run in group.runs} - {"unknown"})
    seeds, runs = group.num_seeds, len(group.runs)
    many = f"{seeds} seeds" if seeds > 1 else f"{runs} runs" if runs > 1 else ""
    below = [line for line in (kind, ", ".join(filter(None, [many, *status]))) if line]
    return Below(Chip(group.label, group.colour), below)


PHASES = ("rollout", "score", "credit", "update")
"""In greys, as colours are for runs."""
SCATTER = 2.0
"""Steps scatter where the slowest twentieth takes this many times the median."""


def timing(policies: list[Group]) -> Markup:
    """The phases of the median step, and responses per second."""
    bars: Bars = []
    for group in policies:
        medians = [(phase, _median(group, f"time/{phase}")) for phase in PHASES]
        parts = [(*each, f"var(--t{i})") for i, each in enumerate(medians) if each[1] >= 0]
        whole = _median(group, "time/step")
        rest = whole - sum(value for _, value, _ in parts)
        if parts and rest > 0.005 * whole:
            parts.append(("rest", rest, "var(--t4)"))
        if parts:
            bars.append((group.label, parts))
    if not bars:
        return Markup()
    keys = {phase: Series(phase, (), colour) for _, parts in bars for phase, _, colour in parts}
    rows: list[list[Cell]] = [[run, *each[:2]] for run, parts in bars for each in parts]
    chart = figure(
        "Seconds per step",
        stacked_bars(bars, x_label="median seconds per step"),
        key=part("legend", keys.values()),
        header=["run", "phase", "seconds"],
        rows=rows,
    )
    return section("timing", grid([chart, _speed_figure(policies)], "two"))


def _median(group: Group, key: str) -> float:
    return quantiles([value for run in group.runs for *_, value in run.curve(key)], [0.5])[0]


def _speed_figure(policies: list[Group]) -> Markup:
    bars: Bars = []
    rows: list[list[Cell]] = []
    scattered: list[Markup] = []
    name = "responses per second"
    for group in policies:
        seconds = [took for run in group.runs for *_, took in run.curve("time/step")]
        median, slow = quantiles(seconds, [0.5, 0.95])
        rate = _median(group, "time/samples_per_second")
        if math.isnan(rate) and median > 0:
            rate = number(group.config.get("batch_size")) / median
        if rate > 0:
            bars.append((group.label, [(name, rate, group.colour)]))
            rows.append([group.label, rate, median, slow, len(seconds)])
        if slow > SCATTER * median:
            scattered.append(part("scatter", group.label, duration(median), duration(slow)))
    if not bars:
        return Markup()
    return figure(
        "Responses per second",
        stacked_bars(bars, x_label=f"median {name}"),
        note=Markup(" ").join(scattered),
        header=["run", name, "median step", "95% of steps within", "steps"],
        rows=rows,
    )
