"""Prompt by prompt: the distribution of scores, and how each prompt changed."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from marlhf.evaluate.results import expected_best, read_grids
from marlhf.intervals import mean, thin, win_rate
from marlhf.report.charts import distribution, histogram, scatter
from marlhf.report.groups import START_COLOUR, Group, measured_alike, same_prompts
from marlhf.report.page import Cell, figure, grid, heading, percent, section

MAX_ROWS = 1000
MAX_SHIFTS = 12
MAX_RIDGES = 12
BEST = 8
"""The paper compares training with best-of-8 of the SFT model."""


def prompts(policies: list[Group], others: list[Group]) -> Markup:
    """Where the change of the mean comes from: all prompts a little, or some a lot."""
    figures = [
        _distribution_figure(policies, title, field)
        for title, field in (
            ("Score", "scores"),
            ("Gold score", "gold"),
            ("Length (tokens)", "length"),
        )
    ]
    shifts = grid(_shifts(policies, others))
    return section(
        "distributions", grid(figures), heading("Shift of each prompt") + shifts if shifts else ""
    )


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
        for samples in read_grids(run.path).values():
            temperature = min(samples.lines, key=lambda each: abs(each - 1))
            rows = [
                (str(line["key"]), mean(line["scores"]), expected_best(line["scores"], BEST))
                for line in samples.lines[temperature]
                if len(line["scores"]) >= BEST
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
