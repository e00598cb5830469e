"""Asks a run's model to solve held-out problems, several times each, and counts.

Every problem is a line of `pass_at_k.jsonl` in the run folder as soon as it is judged. The same
command goes on after a stop, and more samples are added to those there are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marlhf.data import DataError, Encoded, decode
from marlhf.errors import SettingError
from marlhf.evaluate.eval_plan import Plan, Subject, find_subjects, make_plan, setting_of
from marlhf.evaluate.eval_plan import Question as AnyQuestion
from marlhf.evaluate.pass_rates import SUMMARY, summarise
from marlhf.evaluate.sampling import Writer, key_of, load_prompts, seed_of
from marlhf.models.base import pick_device
from marlhf.models.load import load_tokenizer
from marlhf.reward.code import UnitTests
from marlhf.runs.jsonl import Line, append_jsonl, read_keyed

LINES = "pass_at_k.jsonl"
CHUNK = 16
"""Problems sampled and judged at once: what a stop can cost."""


@dataclass(frozen=True)
class Question(AnyQuestion):
    """What to ask, and how; what is None is as in the run."""

    prompts: int = sys.maxsize
    """Only so many problems."""
    rewards: tuple[str, ...] = ("marlhf.reward.code:unit_tests",)
    k: tuple[int, ...] = (1, 5)
    samples: int = 10
    """Samples a problem, at least the largest k."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.k or min(self.k) < 1:
            raise SettingError(f"Give one k or more, each at least 1; got {list(self.k)}.")
        if self.samples < max(self.k):
            raise SettingError(
                f"pass@{max(self.k)} needs at least {max(self.k)} samples per problem, and there "
                f"would be {self.samples}. Raise --samples."
            )


def measure(
    folder: Path | str,
    question: Question,
    judge: UnitTests,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure pass@k of a run, write it into its folder, and return what was written."""
    subject = find_subjects([folder])[0]
    plan = make_plan(subject, question, None)
    tokenizer = load_tokenizer(subject.model, trust_remote_code=plan.trust_remote_code)
    problems = load_prompts(subject, plan, tokenizer, question.prompts)
    if "tests" not in problems[0].row.columns:
        raise DataError(
            "There are no held-out problems with tests. Set data.eval_size in the recipe, or name "
            "other data with --source, --path or --split; its rows need a column `tests`."
        )
    limits = (judge.seconds, judge.memory_mb, judge.max_tests)
    setting = setting_of(subject, plan, question.seed, *limits)
    file = subject.folder / LINES
    known = read_keyed(file, setting)
    left = [p for p in problems if len(_results(known, p)) < question.samples]
    progress(len(problems) - len(left), len(problems))
    if left:
        writer = Writer(subject, plan, tokenizer, pick_device(question.device))
        for start in range(0, len(left), CHUNK):
            chunk = left[start : start + CHUNK]
            new = _ask(chunk, known, question, writer, judge, setting)
            append_jsonl(file, new)
            known |= {line["key"]: line for line in new}
            progress(len(problems) - len(left) + start + len(chunk), len(problems))
    return _write(subject, plan, question, problems, known, setting, judge)


def _results(known: dict[str, Line], problem: Encoded) -> list[str]:
    line = known.get(key_of(problem.row))
    return line["results"] if line else []


def _ask(
    chunk: Sequence[Encoded],
    known: dict[str, Line],
    question: Question,
    writer: Writer,
    judge: UnitTests,
    setting: str,
) -> list[Line]:
    """The results of some problems, old and new; without those that the sandbox failed on."""
    asked = [
        (problem, number)
        for problem in chunk
        for number in range(len(_results(known, problem)), question.samples)
    ]
    seeds = [seed_of(key_of(p.row), number, question.seed) for p, number in asked]
    rollout = writer.write([p for p, _ in asked], seeds)
    responses = [decode(writer.tokenizer, response) for response in rollout.responses]
    verdicts = judge.judge(responses, [p.row.columns["tests"] for p, _ in asked])
    found = {key_of(problem.row): list(_results(known, problem)) for problem in chunk}
    for (problem, _), verdict in zip(asked, verdicts):
        found[key_of(problem.row)].append(verdict.result)
    return [
        {"setting": setting, "key": key, "results": results}
        for key, results in found.items()
        if "sandbox_error" not in results
    ]


def _write(
    subject: Subject,
    plan: Plan,
    question: Question,
    problems: Sequence[Encoded],
    known: dict[str, Line],
    setting: str,
    judge: UnitTests,
) -> dict[str, Any]:
    judged = [
        {
            "difficulty": str(problem.row.columns.get("difficulty") or ""),
            "results": _results(known, problem)[: question.samples],
        }
        for problem in problems
        if len(_results(known, problem)) >= question.samples
    ]
    if not judged:
        raise DataError("No problem could be judged: the sandbox failed on each. See the log.")
    found = {
        "setting": setting,
        "k": sorted(question.k),
        "samples": question.samples,
        "sampling": asdict(plan.sampling),
        "without_verdict": len(problems) - len(judged),
        "sandbox": judge.layers,
        "rows": summarise(judged, sorted(question.k)),
    }
    new = subject.folder / f"{SUMMARY}.new"
    new.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    new.replace(subject.folder / SUMMARY)
    return found
