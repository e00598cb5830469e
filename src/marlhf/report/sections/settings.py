"""The settings in which runs of the same stage differ, and the whole config of each."""

from __future__ import annotations

import yaml

from marlhf.report.groups import Group, differences
from marlhf.report.page import chip, csv_link, num, section, table, text

MAX_CONFIG_CHARS = 20_000
MAX_CONFIGS = 40


def settings(groups: list[Group]) -> str:
    """The settings in which runs of one stage differ, seeds and output folders aside."""
    parts: list[str] = []
    for stage in dict.fromkeys(group.stage for group in groups):
        alike = [group for group in groups if group.stage == stage]
        rows = differences(alike)
        if rows:
            header = ["Setting", *(chip(group.label, group.colour) for group in alike)]
            cells = [[f"<code>{text(key)}</code>", *map(_setting_cell, row)] for key, row in rows]
            names = ["setting", *(group.label for group in alike)]
            link = csv_link(f"settings {stage}", names, [[key, *row] for key, row in rows])
            parts.append(table(header, cells, csv=link, words=len(header)))
    lead = "All other settings were the same in all runs of the stage, seeds and folders aside."
    return section(
        "settings",
        "Settings that differ" if parts else "Settings",
        lead if parts else "What each run was trained with.",
        *parts,
        *(_whole_config(group) for group in groups[:MAX_CONFIGS] if group.config),
    )


def _whole_config(group: Group) -> str:
    """Everything that was set for a run, as a recipe would have it; of several seeds, the first."""
    config = yaml.safe_dump(group.config, sort_keys=False, allow_unicode=True)
    return (
        f"<details><summary>Whole config of {text(group.label)}</summary>"
        f'<pre class="config">{text(config[:MAX_CONFIG_CHARS])}</pre></details>'
    )


def _setting_cell(value: str | None) -> str:
    if value is None:
        return num(None)
    return text(value if len(value) <= 80 else value[:79] + "\u2026")
