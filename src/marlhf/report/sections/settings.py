"""The settings in which runs of the same stage differ."""

from __future__ import annotations

from marlhf.report.groups import Group, differences
from marlhf.report.page import chip, csv_link, num, section, table, text


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
    return section(
        "settings",
        "Settings that differ",
        "All other settings were the same in all runs of the stage, seeds and folders aside.",
        *parts,
    )


def _setting_cell(value: str | None) -> str:
    if value is None:
        return num(None)
    return text(value if len(value) <= 80 else value[:79] + "\u2026")
