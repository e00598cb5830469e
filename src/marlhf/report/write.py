"""One HTML file that shows runs honestly: no network, no script, no plotting library.

>>> from marlhf.report.write import write_report
>>> write_report(["runs/tldr"], "report.html")  # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from marlhf.report.groups import group_runs
from marlhf.report.header import subtitle_of, title_of
from marlhf.report.page import render
from marlhf.report.sections.best_of_n import best_of_n
from marlhf.report.sections.credit import credit
from marlhf.report.sections.frontier import frontier
from marlhf.report.sections.held_out import held_out
from marlhf.report.sections.judged import judged
from marlhf.report.sections.learning import learning
from marlhf.report.sections.problems import problems
from marlhf.report.sections.prompts import prompts
from marlhf.report.sections.samples import samples
from marlhf.report.sections.scaling import scaling
from marlhf.report.sections.settings import settings
from marlhf.report.sections.stages import stages
from marlhf.report.sections.summary import summary
from marlhf.report.sections.sweeps import sweeps
from marlhf.report.sections.temperatures import temperatures
from marlhf.report.sections.timing import timing
from marlhf.report.sections.training import training
from marlhf.runs.atomic import write_text
from marlhf.runs.read import NoRuns, Run, find_runs


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
    parts = [
        ("summary", "Summary", summary(policies, others, runs)),
        ("pass-at-k", "Problems", problems(groups)),
        ("learning", "Learning", learning(policies)),
        ("frontier", "KL", frontier(policies)),
        ("sweeps", "Sweeps", sweeps(policies)),
        ("scaling", "Sizes", scaling(policies)),
        ("distributions", "Prompts", prompts(policies, others)),
        ("credit", "Credit", credit(policies)),
        ("held_out", "Held-out", held_out(groups)),
        ("temperatures", "Temperature", temperatures(groups)),
        ("best_of_n", "Best of n", best_of_n(groups)),
        ("judged", "Judges", judged(runs, groups)),
        ("samples", "Samples", samples(policies)),
        ("training", "Training", training(policies)),
        ("timing", "Time", timing(policies)),
        ("stages", "Stages", stages(others, with_table=bool(policies))),
        ("settings", "Settings", settings(groups)),
    ]
    return render(
        title_of(runs),
        subtitle_of(runs, groups),
        parts,
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
