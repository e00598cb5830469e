"""The settings in which runs of the same stage differ, and the whole config of each."""

from __future__ import annotations

import yaml
from markupsafe import Markup

from marlhf.report.formats import code
from marlhf.report.groups import Group, differences
from marlhf.report.page import Column, csv_link, part, section, table

MAX_CONFIG_CHARS = 20_000
MAX_CONFIGS = 40
MAX_CHARS = 80


def settings(groups: list[Group]) -> Markup:
    """The settings in which runs of one stage differ, seeds and output folders aside."""
    tables: list[Markup] = []
    for stage in dict.fromkeys(group.stage for group in groups):
        alike = [group for group in groups if group.stage == stage]
        rows = [[key, *values] for key, values in differences(alike)]
        if rows:
            chips = [part("chip", label=group.label, colour=group.colour) for group in alike]
            columns = [Column("Setting", form=code), *(Column(each, form=_short) for each in chips)]
            names = ["setting", *(group.label for group in alike)]
            link = csv_link(f"settings {stage}", names, rows)
            tables.append(table(columns, rows, csv=link, words=len(columns)))
    # Everything that was set for a run, as a recipe would have it; of several seeds, the first.
    configs = [
        (group.label, yaml.safe_dump(group.config, sort_keys=False, allow_unicode=True))
        for group in groups[:MAX_CONFIGS]
        if group.config
    ]
    return section(
        "settings",
        *tables,
        *(part("config", label=label, text=text[:MAX_CONFIG_CHARS]) for label, text in configs),
        differ=bool(tables),
    )


def _short(value: str) -> str:
    return value if len(value) <= MAX_CHARS else value[: MAX_CHARS - 1] + "\u2026"
