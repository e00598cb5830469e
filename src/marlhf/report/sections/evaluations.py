"""Held-out responses: prompt by prompt, and what commands measured after training.

These are pass@k, scores by each reward model, temperatures and best of n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from marlhf.evaluate import results
from marlhf.intervals import NO_INTERVAL, Interval, mean, thin, win_rate
from marlhf.report.charts import Series, distribution, histogram, legend_of, line_chart, scatter
from marlhf.report.dots import Dot, Trail, dots_figure, heat_map, sweep_chart
from marlhf.report.groups import START_COLOUR, Group, labelled, measured_alike, same_prompts
from marlhf.report.numbers import percent
from marlhf.report.page import NUM_COLOURS, grid, heading, section
from marlhf.report.tables import Below, Cell, Chip, Column, figure, table

SHARES = ("repetition", "distinct_1", "distinct_2", "ended", "success")
MAX_DISTRIBUTIONS = 12
MAX_TEMPERATURES = 24
MAX_ROWS = 1000
MAX_SHIFTS = 12
MAX_RIDGES = 12
ByRun = dict[tuple[str, str], dict[float, Interval]]
"""Numbers of runs, (label, colour), by temperature."""
BEST = 8
"""The paper compares training with best-of-8 of the SFT model."""


def problems(groups: Sequence[Group]) -> Markup:
    """One row per run and difficulty: pass@k with its interval, and how the samples ended."""
    measured = [
        (Chip(label, group.colour), rates.samples, row)
        for label, group, run in labelled(groups)
        if (rates := results.read_summary(run.path))
        for row in rates.rows
    ]
    ks = sorted({k for *_, row in measured for k in row.pass_at})
    if not ks:
        return Markup()
    columns = [Column("Run", "run"), Column("Difficulty", "difficulty")]
    columns += [Column("Problems", "problems"), Column("Samples", "samples")]
    columns += [Column(f"pass@{k}", f"pass@{k}", lambda share: f"{100 * share:.2f}") for k in ks]
    rows: list[list[object]] = []
    dots: dict[str, list[Dot]] = {f"pass@{k}": [] for k in ks[:3]}
    for run, samples, row in measured:
        ends = ", ".join(f"{share:.0%} {end}" for end, share in row.results.items())
        rates = [row.pass_at.get(k, NO_INTERVAL) for k in ks]
        rows.append([run, row.difficulty, row.problems, samples, *rates, ends.replace("_", " ")])
        name = run.label if row.difficulty == results.ALL else f"{run.label}: {row.difficulty}"
        for k in filter(row.pass_at.get, ks[:3]):
            dots[f"pass@{k}"].append(Dot(name, row.pass_at[k], run.colour))
    look = {"names": "run and difficulty", "is_share": True}
    figures = [dots_figure(name, each, x_label=name, **look) for name, each in dots.items()]
    numbers = table([*columns, Column("Ended")], rows, file="pass at k", words=2)
    return section("pass-at-k", grid(figures), numbers)


def held_out(groups: Sequence[Group]) -> Markup:
    """One row per run and sampling, and the distribution of each judge's scores."""
    evaluations = [
        (Chip(label, group.colour), file, results.summarise(file.lines))
        for label, group, run in labelled(groups)
        for file in results.read_scored(run.path)
    ]
    if not evaluations:
        return Markup()
    judges = list(dict.fromkeys(name for *_, summary in evaluations for name in summary.scores))
    columns = [Column("Run", "run"), Column("Sampling"), Column("", "sampling")]
    columns += [Column("Prompts", "prompts"), *(Column(j, j, is_bold=True) for j in judges)]
    measures = results.measures_of(summary for *_, summary in evaluations)
    columns += [Column(t, key, percent if key in SHARES else None) for t, key in measures]
    rows: list[list[object]] = []
    spread: dict[tuple[str, str], list[tuple[str, list[float], str]]] = {}
    for run, file, summary in evaluations:
        scores = [summary.scores.get(judge, NO_INTERVAL) for judge in judges]
        sampling = Below(file.label, [] if file.label == file.name else [file.name])
        means = [summary.measures[key].mean for _, key in measures]
        rows.append([run, sampling, file.name, summary.prompts, *scores, *means])
        for judge in judges:
            series = spread.setdefault((file.label, judge), [])
            if values := list(filter(math.isfinite, results.scores_of(file.lines, judge))):
                series.append((run.label, values, run.colour))
    figures = [
        distribution_figure(f"Score by {judge}, {sampling}", series, x_label=f"score by {judge}")
        for (sampling, judge), series in spread.items()
        if series
    ]
    numbers = table(columns, rows, file="evaluations", words=2)
    return section("held_out", numbers, grid(figures[:MAX_DISTRIBUTIONS]))


def temperatures(groups: Sequence[Group]) -> Markup:
    """One line per run: score by each judge, with KL, length and repetition."""
    by_title: dict[str, ByRun] = {}
    sampled: dict[str, ByRun] = {}
    for label, group, run in labelled(groups):
        name = label, group.colour
        for file in results.read_scored(run.path):
            if file.settings is None:
                continue
            summary, rest = results.summarise(file.lines), file.settings.label_without_temperature
            values = {f"Score by {judge}, {rest}": v for judge, v in summary.scores.items()}
            values |= {f"{t}, {rest}": summary.measures[key] for t, key in results.MEASURES[:3]}
            for title, value in values.items():
                line = by_title.setdefault(title, {}).setdefault(name, {})
                line[file.settings.temperature] = value
        for rest, samples in results.read_grids(run.path).items():
            means = {t: samples.cell(t, 1) for t in samples.lines}
            sampled.setdefault(f"Score, {rest}", {})[name] = means
    figures = [_temperature_figure(title, runs) for title, runs in by_title.items()]
    if not any(figures):  # the mean of what was sampled for best of n says the same
        figures = [_temperature_figure(title, runs) for title, runs in sampled.items()]
    return section("temperatures", grid([each for each in figures if each][:MAX_TEMPERATURES]))


def _temperature_figure(title: str, runs: ByRun) -> Markup:
    temperatures = sorted({t for values in runs.values() for t in values})
    trails: list[Trail] = []
    for (label, colour), values in runs.items():
        dots = [
            (temperatures.index(t), Dot(f"{label}, {t:g}", value, colour))
            for t, value in sorted(values.items())
            if math.isfinite(value.mean)
        ]
        trails += [Trail(label, colour, dots)] if dots else []
    if not any(len(trail.dots) > 1 for trail in trails):
        return Markup()
    name, places = title.partition(",")[0], [f"{t:g}" for t in temperatures]
    is_share = title.startswith("Repetition")
    return figure(
        title,
        sweep_chart(trails, places, x_label="temperature", y_label=name, is_share=is_share),
        file=f"by temperature {title}",
        key=legend_of(trails),
        note=trails[0].label if len(trails) == 1 else "",
        header=["run", "temperature", name, "low", "high"],
        rows=[[t.label, temperatures[at], *dot.value[:3]] for t in trails for at, dot in t.dots],
    )


def best_of_n(groups: Sequence[Group]) -> Markup:
    """One heat map per run: the mean best score at each temperature and n.

    Where blocks were decided, two figures more: score against the KL bound and against tokens.
    """
    figures: list[Markup] = []
    for label, _, run in labelled(groups):
        for name, samples in results.read_grids(run.path).items():
            figures.append(_heat_figure(f"{label}, {name}", samples))
        for name, ways in results.read_frontiers(run.path).items():
            figures += _frontier_figures(f"{label}, {name}", ways)
    return section("best_of_n", grid(figures, "two"))


def _heat_figure(title: str, samples: results.Grid) -> Markup:
    cells = {(t, n): samples.cell(t, n) for t in samples.lines for n in samples.ns}
    means = [[cells[t, n].mean for n in samples.ns] for t in samples.lines]
    names = {"x_label": "n", "y_label": "temperature"}
    return figure(
        title,
        heat_map([f"{t:g}" for t in samples.lines], list(map(str, samples.ns)), means, **names),
        file=f"best of n {title}",
        header=["temperature", "n", "score", "low", "high", "length", "kl bound"],
        rows=[
            [t, n, *value[:3], samples.length(t, n), results.kl_bound(n)]
            for (t, n), value in cells.items()
        ],
    )


def _frontier_figures(
    title: str, ways: Mapping[str, Sequence[results.FrontierPoint]]
) -> list[Markup]:
    header = ["chosen", "k or n", "score", "low", "high", "kl bound", "tokens sampled", "length"]
    rows: list[list[Cell]] = [
        [name, p.candidates, *p.score[:3], p.kl_bound, p.tokens, p.length]
        for name, points in ways.items()
        for p in points
    ]
    figures: list[Markup] = []
    for measure, x_label in (("kl_bound", "KL bound, nats"), ("tokens", "tokens sampled")):
        series = [
            Series(
                name,
                sorted((getattr(p, measure), p.score.mean) for p in points),
                f"var(--l{i % NUM_COLOURS})",
                band=sorted((getattr(p, measure), p.score.low, p.score.high) for p in points),
            )
            for i, (name, points) in enumerate(ways.items())
        ]
        chart = line_chart(series, x_label=x_label, y_label="score")
        name = f"Score by {x_label}: {title}"
        file = f"blocks {measure} {title}"
        figures.append(figure(name, chart, file=file, header=header, rows=rows))
    return figures


def prompts(policies: list[Group], others: list[Group]) -> Markup:
    """Where the change of the mean comes from: all prompts a little, or some a lot."""
    shown = {"Score": "scores", "Gold score": "gold", "Length (tokens)": "length"}
    figures = grid([_distribution_figure(policies, *each) for each in shown.items()])
    shifts = grid(_shifts(policies, others))
    below = heading("Shift of each prompt") + shifts if shifts else ""
    return section("distributions", figures, below)


def _distribution_figure(policies: list[Group], title: str, field: str) -> Markup:
    before = [values for group in policies if (values := group.all_prompts(field, first=True))]
    entries = [("before RL", values, START_COLOUR) for values in before[:1]]
    for group in policies[:MAX_RIDGES]:
        if values := group.all_prompts(field):
            entries.append((group.label, values, group.colour))
    return distribution_figure(title, entries, x_label=title.lower()) if entries else Markup()


def distribution_figure(
    title: str, entries: Sequence[tuple[str, Sequence[float], str]], *, x_label: str
) -> Markup:
    """Histograms of (label, values, colour) in shared bins."""
    edges, shares = histogram([values for _, values, _ in entries])
    return figure(
        title,
        distribution(entries, x_label=x_label),
        file=f"distribution of {title}",
        header=["from", "to", *(label for label, *_ in entries)],
        rows=[[low, high, *bins] for low, high, bins in zip(edges, edges[1:], zip(*shares))],
    )


def _shifts(policies: list[Group], others: list[Group]) -> list[Markup]:
    """Best of 8 without training, then before RL to each policy, then baseline to each."""
    figures = [_best_figure(group) for group in [*others, *policies]]
    for group in policies:
        before = group.per_prompt("scores", first=True)
        figures.append(_shift_figure("before RL", before, group))
    for group in policies[1:]:
        if same_prompts(policies[0], group) and measured_alike(policies[0], group):
            before = policies[0].per_prompt("scores")
            figures.append(_shift_figure(policies[0].label, before, group))
    return [each for each in figures if each][:MAX_SHIFTS]


def _shift_figure(name: str, before: list[float] | None, group: Group) -> Markup:
    after = group.per_prompt("scores")
    if not before or not after or len(before) != len(after):
        return Markup()
    rows = list(zip(range(len(before)), before, after))
    return _cloud(f"{name} \u2192 {group.label}", (name, group.label), group.colour, rows)


def _best_figure(group: Group) -> Markup:
    """One sample against the best of 8, at the temperature nearest to 1 of a run's first grid."""
    for run in group.runs:
        for samples in results.read_grids(run.path).values():
            temperature = min(samples.lines, key=lambda each: abs(each - 1))
            scores = [(str(line["key"]), line["scores"]) for line in samples.lines[temperature]]
            rows = [
                (key, mean(each), results.expected_best(each, BEST))
                for key, each in scores
                if len(each) >= BEST
            ]
            if rows:
                title = f"{group.label} \u2192 its best of {BEST}"
                names = f"{group.label}, one sample", f"{group.label}, best of {BEST}"
                note = f" At temperature {temperature:g}; raw scores of the model that chose."
                return _cloud(title, names, group.colour, rows, note)
    return Markup()


def _cloud(
    title: str,
    names: tuple[str, str],
    colour: str,
    rows: Sequence[tuple[Cell, float, float]],
    more: str = "",
) -> Markup:
    _, before, after = zip(*rows)
    above = percent(win_rate(before, after))
    x_label, y_label = (f"score, {name}" for name in names)
    return figure(
        title,
        scatter(list(zip(before, after)), colour, x_label=x_label, y_label=y_label),
        file=f"shift {title}",
        note=f"{above} of {len(rows)} dots are above the diagonal; those on it count half.{more}",
        header=["prompt", *names],
        rows=thin(rows, MAX_ROWS),
    )
