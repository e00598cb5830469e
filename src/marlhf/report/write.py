"""One HTML file that shows runs honestly: no network, no script, no plotting library.

>>> from marlhf.report.write import write_report
>>> write_report(["runs/tldr"], "report.html")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from marlhf.report.groups import Group, group_runs
from marlhf.report.page import render, text
from marlhf.report.sections.best_of_n import best_of_n
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
from marlhf.runs.read import Run, find_runs


def write_report(paths: Sequence[Path | str], output: Path | str) -> Path:
    """Write the report of all runs under `paths` to `output`, and return where it is.

    Runs that differ only in their seed are shown as one line with its spread. The file
    holds everything it needs, so it can be mailed, archived or opened offline.

    >>> import tempfile
    >>> from marlhf import DataConfig, SFTConfig, SFTTrainer
    >>> folder = tempfile.mkdtemp()
    >>> data = DataConfig(source="toy", limit=100)
    >>> args = SFTConfig(output_dir=f"{folder}/sft", data=data, batch_size=4, num_steps=1)
    >>> _ = SFTTrainer(model="tiny", args=args).train()
    >>> write_report([f"{folder}/sft"], f"{folder}/report.html").name
    'report.html'
    """
    page = report_html(find_runs(paths))
    output = Path(output)
    if output.is_dir():
        output = output / "report.html"
    write_text(output, page)
    return output


def report_html(runs: list[Run]) -> str:
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
    return render(_title(runs), _subtitle(runs, groups), parts)


def _title(runs: list[Run]) -> str:
    """The folder the runs share, else their names."""
    if len(runs) == 1:
        return runs[0].name
    shared = Path(os.path.commonpath([run.path.resolve() for run in runs]))
    return shared.name or "Comparison of runs"


def _subtitle(runs: list[Run], groups: list[Group]) -> str:
    count = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    if len(groups) not in (0, len(runs)):
        count += f" of {len(groups)} settings"
    started = sorted(str(run.about["started"]) for run in runs if run.about.get("started"))
    version = sorted({str(run.about["marlhf"]) for run in runs if run.about.get("marlhf")})
    words = [count]
    if started:
        words.append(f"started {started[0][:16].replace('T', ' ')}")
    if version:
        words.append(f"marlhf {', '.join(version)}")
    return " &middot; ".join(text(word) for word in words)
