"""Samples several solutions to each held-out problem, and counts those that pass its tests.

Every problem is a line of `pass_at_k.jsonl` in the run folder as soon as it is judged. The same
command resumes after a stop, and more samples are added to those there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marlhf.data import DataError, Encoded, decode
from marlhf.errors import SettingError
from marlhf.evaluate.best_of_n import find_task
from marlhf.evaluate.eval_plan import EvaluationOptions
from marlhf.evaluate.results import summarise_passes
from marlhf.evaluate.sampling import SamplingTask, key_of
from marlhf.reward.code import UnitTests
from marlhf.runs.atomic import append_jsonl, read_keyed, write_json
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
    environment: str | None = "none"
    """Single responses: a conversation may see the tests' results."""
    samples: int = 10
    """Samples per problem, at least the largest k."""

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
    task = find_task(folder, options)
    problems = task.prompts
    if "tests" not in problems[0].row.columns:
        raise DataError(
            "There are no held-out problems with tests. Set data.eval_size in the recipe, or name "
            "other data with --source, --path or --split; its rows need a column `tests`."
        )
    setting = task.setting(unit_tests.seconds, unit_tests.memory_mb, unit_tests.max_tests)
    file = task.policy.folder / PASS_AT_K_LINES
    known = {key: line["results"] for key, line in read_keyed(file, setting).items()}
    results = {key_of(p.row): known.get(key_of(p.row), []) for p in problems}
    left = [p for p in problems if len(results[key_of(p.row)]) < options.samples]
    progress(len(problems) - len(left), len(problems))
    for start in range(0, len(left), CHUNK):
        chunk = left[start : start + CHUNK]
        new = _test(chunk, results, options.samples, task, unit_tests)
        append_jsonl(file, [{"setting": setting, "key": k, "results": r} for k, r in new.items()])
        results |= new
        progress(len(problems) - len(left) + start + len(chunk), len(problems))
    judged = [
        {
            "difficulty": str(problem.row.columns.get("difficulty") or ""),
            "results": own[: options.samples],
        }
        for problem, own in zip(problems, results.values())
        if len(own) >= options.samples
    ]
    if not judged:
        raise DataError("No problem could be judged: the sandbox failed on each. See the log.")
    summary = {
        "setting": setting,
        "k": sorted(options.k),
        "samples": options.samples,
        "sampling": asdict(task.plan.sampling),
        "without_verdict": len(problems) - len(judged),
        "sandbox": unit_tests.layers,
        "rows": summarise_passes(judged, sorted(options.k)),
    }
    write_json(task.policy.folder / PASS_AT_K, summary)
    return summary


def _test(
    chunk: Sequence[Encoded],
    before: Mapping[str, list[str]],
    samples: int,
    task: SamplingTask,
    unit_tests: UnitTests,
) -> dict[str, list[str]]:
    """The results of some problems, old and new; without those that the sandbox failed on."""
    asked = [(p, number) for p in chunk for number in range(len(before[key_of(p.row)]), samples)]
    rollout = task.sample([p for p, _ in asked], [number for _, number in asked])
    responses = [decode(task.tokenizer, response) for response in rollout.responses]
    verdicts = unit_tests.judge(responses, [p.row.columns["tests"] for p, _ in asked])
    results = {key_of(p.row): [*before[key_of(p.row)]] for p in chunk}
    for (problem, _), verdict in zip(asked, verdicts):
        results[key_of(problem.row)].append(verdict.result)
    return {key: each for key, each in results.items() if "sandbox_error" not in each}
