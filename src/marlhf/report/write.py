"""One HTML file that shows runs honestly: no network, no plotting library.

>>> from marlhf.report.write import write_report
>>> write_report(["runs/tldr"], "report.html")  # doctest: +SKIP
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from marlhf.report.groups import Group, group_runs
from marlhf.report.page import part, render
from marlhf.report.sections.credit import credit
from marlhf.report.sections.curves import learning, stages, timing, training
from marlhf.report.sections.evaluations import best_of_n, held_out, problems, prompts, temperatures
from marlhf.report.sections.frontier import frontier
from marlhf.report.sections.judged import judged
from marlhf.report.sections.samples import conversations, samples
from marlhf.report.sections.summary import settings, summary
from marlhf.report.sections.sweeps import scaling, size_text, sweeps
from marlhf.runs.atomic import write_text
from marlhf.runs.read import NoRuns, Run, find_runs, num_parameters

MAX_NAMES = 3
"""A sweep over many models or data sets shows the first of them."""


def write_report(
    paths: Sequence[Path | str], output: Path | str, *, refresh: float | None = None
) -> Path:
    """Write the report of all runs under `paths` to `output`, and return where it is.

    Runs that differ only in their seed are shown as one line with its spread. The file
    holds everything it needs, so it can be mailed, archived or opened offline. With `refresh`
    an open page loads itself again after so many seconds.

    >>> import tempfile
    >>> from marlhf import DataConfig, SFTConfig, SFTTrainer
    >>> folder = tempfile.mkdtemp()
    >>> data = DataConfig(source="toy", limit=100)
    >>> args = SFTConfig(output_dir=f"{folder}/sft", data=data, batch_size=4, num_steps=1)
    >>> _ = SFTTrainer(model="tiny", args=args).train()
    >>> write_report([f"{folder}/sft"], f"{folder}/report.html").name
    'report.html'
    """
    page = report_html(find_runs(paths), refresh=refresh)
    output = Path(output)
    if output.is_dir():
        output = output / "report.html"
    write_text(output, page)
    return output


def report_html(runs: list[Run], *, refresh: float | None = None) -> str:
    """The report as text."""
    groups = group_runs([run for run in runs if not run.is_empty])
    policies = [group for group in groups if group.runs[0].is_policy]
    others = [group for group in groups if not group.runs[0].is_policy]
    sections = {
        "summary": summary(policies, others, runs),
        "pass-at-k": problems(groups),
        "learning": learning(policies),
        "frontier": frontier(policies),
        "sweeps": sweeps(policies),
        "scaling": scaling(policies),
        "distributions": prompts(policies, others),
        "credit": credit(policies),
        "held_out": held_out(groups),
        "temperatures": temperatures(groups),
        "best_of_n": best_of_n(groups),
        "judged": judged(runs, groups),
        "samples": samples(policies),
        "conversations": conversations(policies),
        "training": training(policies),
        "timing": timing(policies),
        "stages": stages(others, with_table=bool(policies)),
        "settings": settings(groups),
    }
    return render(
        _title(runs),
        _subtitle(runs, groups),
        sections,
        runs=[(group.label, group.colour) for group in groups],
        switches=len(policies),
        refresh=refresh,
    )


def watch_report(
    paths: Sequence[Path | str], output: Path | str, *, every: float = 30.0
) -> Iterator[Path]:
    """Write the report every `every` seconds while runs are being trained; yields each time.

    A page that is open in a browser follows: it loads itself again, except after the last time.
    It ends when no run has been in training for two looks, as a recipe pauses between stages.
    """
    idle = 0
    while idle < 2:
        idle = 0 if any(_is_training(Path(path)) for path in paths) else idle + 1
        try:
            yield write_report(paths, output, refresh=every if idle < 2 else None)
        except NoRuns:
            if idle == 2:
                raise
        if idle < 2:
            time.sleep(every)


def _is_training(path: Path) -> bool:
    try:
        return any(run.status == "running" for run in find_runs([path]))
    except NoRuns:
        return path.is_dir()  # nothing recorded yet


def _title(runs: list[Run]) -> str:
    """The folder the runs share, else their names."""
    if len(runs) == 1:
        return runs[0].name
    shared = Path(os.path.commonpath([run.path.resolve() for run in runs]))
    return shared.name or "Comparison of runs"


def _subtitle(runs: list[Run], groups: list[Group]) -> Markup:
    """Two lines: the runs; the model that training began with, the data and the hardware."""
    models = _names(value for group in groups for value in _base_models(group.chosen))
    sizes = {count for run in runs if run.is_policy and (count := num_parameters(run))}
    if models and len(sizes) == 1:
        models += f" ({size_text(sizes.pop())} parameters)"
    data = _names(value for group in groups for value in _data_of(group.chosen))
    hardware = ", ".join(_recorded(runs, "hardware"))
    inputs = [("model", models), ("data", data), ("on", hardware)]
    return part(
        "subtitle",
        len(runs),
        len(groups),
        started=_recorded(runs, "started"),
        versions=_recorded(runs, "marlhf"),
        unfinished=sum(run.status == "running" for run in runs),
        inputs=[each for each in inputs if each[1]],
    )


def _base_models(chosen: dict[str, Any]) -> Iterable[str]:
    """Not the models that earlier stages made."""
    for key, value in chosen.items():
        is_model = key == "model" or key.endswith(".model")
        if is_model and isinstance(value, str) and value and not value.startswith(("@", "../")):
            yield value


def _data_of(chosen: dict[str, Any]) -> Iterable[str]:
    named = [chosen.get("data.source"), chosen.get("data.path")]
    if words := ", ".join(value for value in named if isinstance(value, str) and value):
        yield words


def _names(values: Iterable[str]) -> str:
    names = list(dict.fromkeys(values))
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _recorded(runs: Sequence[Run], key: str) -> list[str]:
    return sorted({str(run.about[key]) for run in runs if run.about.get(key)})
