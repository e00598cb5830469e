"""Samples several solutions to each held-out problem, and counts those that pass its tests.

Every problem is a line of `pass_at_k.jsonl` in the run folder as soon as it is judged. The same
command resumes after a stop, and more samples are added to those there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marlhf.data import DataError, Encoded, decode
from marlhf.errors import SettingError
from marlhf.evaluate.eval_plan import (
    EvaluationOptions,
    EvaluationPlan,
    PolicySource,
    find_policies,
    make_plan,
    setting_of,
)
from marlhf.evaluate.pass_rates import summarise
from marlhf.evaluate.sampling import ResponseSampler, key_of, load_prompts, seed_of
from marlhf.models.base import pick_device
from marlhf.models.load import load_tokenizer
from marlhf.reward.code import UnitTests
from marlhf.runs.atomic import write_json
from marlhf.runs.jsonl import Line, append_jsonl, read_keyed
from marlhf.runs.layout import PASS_AT_K, PASS_AT_K_LINES

CHUNK = 16
"""Problems sampled and judged at once: what a stop can cost."""


@dataclass(frozen=True)
class PassAtKOptions(EvaluationOptions):
    """What the user chose; what is None is as in the run."""

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
    options: PassAtKOptions,
    unit_tests: UnitTests,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure pass@k of a run, write it into its folder, and return what was written."""
    policy = find_policies([folder])[0]
    plan = make_plan(policy, options, None)
    tokenizer = load_tokenizer(policy.model, trust_remote_code=plan.trust_remote_code)
    problems = load_prompts(policy, plan, tokenizer, options.prompts)
    if "tests" not in problems[0].row.columns:
        raise DataError(
            "There are no held-out problems with tests. Set data.eval_size in the recipe, or name "
            "other data with --source, --path or --split; its rows need a column `tests`."
        )
    limits = (unit_tests.seconds, unit_tests.memory_mb, unit_tests.max_tests)
    setting = setting_of(policy, plan, options.seed, *limits)
    file = policy.folder / PASS_AT_K_LINES
    known = read_keyed(file, setting)
    left = [p for p in problems if len(_results(known, p)) < options.samples]
    progress(len(problems) - len(left), len(problems))
    if left:
        sampler = ResponseSampler(policy, plan, tokenizer, pick_device(options.device))
        for start in range(0, len(left), CHUNK):
            chunk = left[start : start + CHUNK]
            new = _ask(chunk, known, options, sampler, unit_tests, setting)
            append_jsonl(file, new)
            known |= {line["key"]: line for line in new}
            progress(len(problems) - len(left) + start + len(chunk), len(problems))
    return _write(policy, plan, options, problems, known, setting, unit_tests)


def _results(known: dict[str, Line], problem: Encoded) -> list[str]:
    line = known.get(key_of(problem.row))
    return line["results"] if line else []


def _ask(
    chunk: Sequence[Encoded],
    known: dict[str, Line],
    options: PassAtKOptions,
    sampler: ResponseSampler,
    unit_tests: UnitTests,
    setting: str,
) -> list[Line]:
    """The results of some problems, old and new; without those that the sandbox failed on."""
    asked = [
        (problem, number)
        for problem in chunk
        for number in range(len(_results(known, problem)), options.samples)
    ]
    seeds = [seed_of(key_of(p.row), number, options.seed) for p, number in asked]
    rollout = sampler.sample([p for p, _ in asked], seeds)
    responses = [decode(sampler.tokenizer, response) for response in rollout.responses]
    verdicts = unit_tests.judge(responses, [p.row.columns["tests"] for p, _ in asked])
    by_problem = {key_of(problem.row): list(_results(known, problem)) for problem in chunk}
    for (problem, _), verdict in zip(asked, verdicts):
        by_problem[key_of(problem.row)].append(verdict.result)
    return [
        {"setting": setting, "key": key, "results": results}
        for key, results in by_problem.items()
        if "sandbox_error" not in results
    ]


def _write(
    policy: PolicySource,
    plan: EvaluationPlan,
    options: PassAtKOptions,
    problems: Sequence[Encoded],
    known: dict[str, Line],
    setting: str,
    unit_tests: UnitTests,
) -> dict[str, Any]:
    judged = [
        {
            "difficulty": str(problem.row.columns.get("difficulty") or ""),
            "results": _results(known, problem)[: options.samples],
        }
        for problem in problems
        if len(_results(known, problem)) >= options.samples
    ]
    if not judged:
        raise DataError("No problem could be judged: the sandbox failed on each. See the log.")
    summary = {
        "setting": setting,
        "k": sorted(options.k),
        "samples": options.samples,
        "sampling": asdict(plan.sampling),
        "without_verdict": len(problems) - len(judged),
        "sandbox": unit_tests.layers,
        "rows": summarise(judged, sorted(options.k)),
    }
    write_json(policy.folder / PASS_AT_K, summary)
    return summary
