"""The top of the page: its title, how many runs, and which model, data and hardware."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from marlhf.report.groups import Group
from marlhf.report.page import text
from marlhf.report.sections.scaling import size_text
from marlhf.runs.lineage import num_parameters
from marlhf.runs.read import Run

MAX_NAMES = 3
"""A sweep over many models or data sets shows the first of them."""


def title_of(runs: list[Run]) -> str:
    """The folder the runs share, else their names."""
    if len(runs) == 1:
        return runs[0].name
    shared = Path(os.path.commonpath([run.path.resolve() for run in runs]))
    return shared.name or "Comparison of runs"


def subtitle_of(runs: list[Run], groups: list[Group]) -> str:
    """Two lines: the runs; the model, data and hardware behind them."""
    lines = [_about_runs(runs, groups), _about_inputs(runs, groups)]
    return "<br>".join(line for line in lines if line)


def _about_runs(runs: list[Run], groups: list[Group]) -> str:
    count = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    if len(groups) not in (0, len(runs)):
        count += f" of {len(groups)} settings"
    started = sorted(str(run.about["started"]) for run in runs if run.about.get("started"))
    words = [count]
    if started:
        words.append(f"started {started[0][:16].replace('T', ' ')}")
    if version := _recorded(runs, "marlhf"):
        words.append(f"marlhf {', '.join(version)}")
    if unfinished := sum(run.status == "running" for run in runs):
        words.append(f"{unfinished} unfinished")
    return " &middot; ".join(text(word) for word in words)


def _about_inputs(runs: list[Run], groups: list[Group]) -> str:
    """The model that training began with, not the ones that earlier stages made of it."""
    models = _names(value for group in groups for value in _base_models(group.chosen))
    sizes = {count for run in runs if run.is_policy and (count := num_parameters(run))}
    if models and len(sizes) == 1:
        models += f" ({size_text(sizes.pop())} parameters)"
    data = _names(value for group in groups for value in _data_of(group.chosen))
    hardware = ", ".join(_recorded(runs, "hardware"))
    parts = [("model", models), ("data", data), ("on", hardware)]
    return " &middot; ".join(f"{name} <b>{text(shown)}</b>" for name, shown in parts if shown)


def _base_models(chosen: dict[str, Any]) -> Iterable[str]:
    for key, value in chosen.items():
        is_model = key == "model" or key.endswith(".model")
        if is_model and isinstance(value, str) and value and not value.startswith(("@", "../")):
            yield value


def _data_of(chosen: dict[str, Any]) -> Iterable[str]:
    source, path = chosen.get("data.source"), chosen.get("data.path")
    if isinstance(path, str) and path:
        yield f"{source}, {path}" if source else path
    elif isinstance(source, str) and source:
        yield source


def _names(values: Iterable[str]) -> str:
    names = list(dict.fromkeys(values))
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _recorded(runs: Sequence[Run], key: str) -> list[str]:
    return sorted({str(run.about[key]) for run in runs if run.about.get(key)})
