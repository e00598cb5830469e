"""Prompt by prompt: the distribution of scores, and how each prompt changed."""

from __future__ import annotations

from collections.abc import Sequence

from marlhf.evaluate.results import expected_best, read_grids
from marlhf.intervals import mean, thin, win_rate
from marlhf.report.charts import Series, distribution, histogram, scatter
from marlhf.report.groups import START_COLOUR, Group, measured_alike, same_prompts
from marlhf.report.page import Cell, figure, grid, percent, section

MAX_ROWS = 1000
MAX_SHIFTS = 12
MAX_RIDGES = 12
BEST = 8
"""The paper compares training with best-of-8 of the SFT model."""


def prompts(policies: list[Group], others: list[Group]) -> str:
    """Where the change of the mean comes from: all prompts a little, or some a lot."""
    figures = [
        _distribution_figure(policies, "Score", "scores"),
        _distribution_figure(policies, "Gold score", "gold"),
        _distribution_figure(policies, "Length (tokens)", "length"),
    ]
    shifts = _shifts(policies, others)
    return section(
        "distributions",
        "Prompt by prompt",
        "The histograms show how the held-out prompts spread, with a line at each mean. Below, "
        "each dot is a prompt: above the diagonal it scores higher after than before.",
        grid(figures),
        "<h3>Shift of each prompt</h3>" if shifts else "",
        grid(shifts),
    )


def _distribution_figure(policies: list[Group], title: str, field: str) -> str:
    entries: list[tuple[str, list[float], str]] = []
    for group in policies:
        if before := group.all_prompts(field, first=True):
            entries.append(("before RL", before, START_COLOUR))
            break
    for group in policies[:MAX_RIDGES]:
        if values := group.all_prompts(field):
            entries.append((group.label, values, group.colour))
    if not entries:
        return ""
    edges, shares = histogram([values for _, values, _ in entries])
    rows = [[*bin_edges, *column] for *bin_edges, column in zip(edges, edges[1:], zip(*shares))]
    return figure(
        title,
        distribution(entries, x_label=title.lower()),
        file=f"distribution of {title}",
        header=["from", "to", *(label for label, *_ in entries)],
        rows=rows,
    )


def _shifts(policies: list[Group], others: list[Group]) -> list[str]:
    """Best of 8 without training, then before RL to each policy, then baseline to each."""
    pairs = [_best_figure(group) for group in [*others, *policies]]
    for group in policies:
        before, after = group.per_prompt("scores", first=True), group.per_prompt("scores")
        pairs.append(_shift_figure("before RL", before, group, after))
    for group in policies[1:]:
        if same_prompts(policies[0], group) and measured_alike(policies[0], group):
            before, after = policies[0].per_prompt("scores"), group.per_prompt("scores")
            pairs.append(_shift_figure(policies[0].label, before, group, after))
    return [pair for pair in pairs if pair][:MAX_SHIFTS]


def _shift_figure(
    name: str, before: list[float] | None, group: Group, after: list[float] | None
) -> str:
    if not before or not after or len(before) != len(after):
        return ""
    names = name, group.label
    return _cloud(" \u2192 ".join(names), names, group.colour, range(len(before)), before, after)


def _best_figure(group: Group) -> str:
    """One sample against the best of 8, at the temperature nearest to 1 of a run's first grid."""
    for run in group.runs:
        for samples in read_grids(run.path).values():
            temperature = min(samples.lines, key=lambda each: abs(each - 1))
            lines = [line for line in samples.lines[temperature] if len(line["scores"]) >= BEST]
            if not lines:
                continue
            keys = [str(line["key"]) for line in lines]
            one = [mean(line["scores"]) for line in lines]
            best = [expected_best(line["scores"], BEST) for line in lines]
            title = f"{group.label} \u2192 its best of {BEST}"
            names = f"{group.label}, one sample", f"{group.label}, best of {BEST}"
            note = f" At temperature {temperature:g}; raw scores of the model that chose."
            return _cloud(title, names, group.colour, keys, one, best, note)
    return ""


def _cloud(
    title: str,
    names: tuple[str, str],
    colour: str,
    prompts: Sequence[Cell],
    before: Sequence[float],
    after: Sequence[float],
    more: str = "",
) -> str:
    cloud = Series(title, list(zip(before, after)), colour)
    above = percent(win_rate(before, after))
    rows: list[tuple[Cell, ...]] = list(zip(prompts, before, after))
    return figure(
        title,
        scatter(cloud, x_label=f"score, {names[0]}", y_label=f"score, {names[1]}"),
        file=f"shift {title}",
        note=f"{above} of {len(rows)} dots are above the diagonal; those on it count half.{more}",
        header=["prompt", *names],
        rows=thin(rows, MAX_ROWS),
    )
