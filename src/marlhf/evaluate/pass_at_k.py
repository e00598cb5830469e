"""Asks a run's model to solve held-out problems, several times each, and counts.

Every problem is a line of `pass_at_k.jsonl` in the run folder as soon as it is judged. The same
command goes on after a stop; more samples are added to those there are. A sample depends on its
problem, its number and the seed alone, so neither order nor interruptions change any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from marlhf.data import DataConfig, DataError, Encoded, Row, decode, fit_prompts, load_data
from marlhf.data.rows import prompt_key
from marlhf.evaluate.coding import SUMMARY, summarise
from marlhf.evaluate.runs import Run, read_run
from marlhf.models.load import end_tokens, load_policy, load_tokenizer, pick_device
from marlhf.reward.code import UnitTests
from marlhf.rollout import NativeEngine, Sampling

LINES = "pass_at_k.jsonl"
CHUNK = 16
"""Problems sampled and judged at once: what a stop can cost."""


@dataclass(frozen=True)
class Question:
    """What to ask, and how; what is None is as in the run."""

    k: tuple[int, ...] = (1, 5)
    samples: int = 10
    """Samples a problem, at least the largest k."""
    prompts: int | None = None
    """Only so many problems."""
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    source: str | None = None
    """With source, path or split all rows of that data are asked, not the run's held-out ones."""
    path: str | None = None
    split: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if not self.k or min(self.k) < 1:
            raise ValueError(f"Give one k or more, each at least 1; got {list(self.k)}.")
        if self.samples < max(self.k):
            raise ValueError(
                f"pass@{max(self.k)} needs at least {max(self.k)} samples a problem, and there "
                f"would be {self.samples}. Raise --samples."
            )


def measure(
    folder: Path | str,
    question: Question,
    judge: UnitTests,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure pass@k of a run, write it into its folder, and return what was written."""
    run = read_run(folder)
    if not (run.path / "model").is_dir():
        raise DataError(
            f"{run.path} has no model yet: the run is not finished. Finish it first, by the "
            "command that began it."
        )
    sampling = _sampling(run, question)
    model_path = str(run.path / "model")
    remote = bool(run.config.get("trust_remote_code"))
    tokenizer = load_tokenizer(model_path, trust_remote_code=remote)
    data = _data(run, question)
    problems = _problems(data, question, tokenizer)
    setting = _setting(run, question, sampling, data, judge)
    file = run.path / LINES
    known = _read(file, setting)
    left = [p for p in problems if len(known.get(_key(p.row), [])) < question.samples]
    progress(len(problems) - len(left), len(problems))
    if left:
        model = load_policy(model_path, trust_remote_code=remote)
        model = model.to(pick_device(question.device)).eval()
        ends = end_tokens(model, tokenizer)
        engine = NativeEngine(model, ends, tokenizer.pad_token_id)
        for start in range(0, len(left), CHUNK):
            chunk = left[start : start + CHUNK]
            new = _ask(chunk, known, question, sampling, engine, tokenizer, judge)
            _append(file, setting, new)
            known |= new
            progress(len(problems) - len(left) + start + len(chunk), len(problems))
    answered = [p.row for p in problems if len(known.get(_key(p.row), [])) >= question.samples]
    return _write(run, question, sampling, setting, answered, known, len(problems), judge)


def _sampling(run: Run, question: Question) -> Sampling:
    told = {"temperature": question.temperature, "max_new_tokens": question.max_new_tokens}
    raw = dict(run.config.get("sampling") or {})
    raw |= {name: value for name, value in told.items() if value is not None}
    return TypeAdapter(Sampling).validate_python(raw)


def _data(run: Run, question: Question) -> DataConfig:
    """The run's own data, of which the held-out rows count; or other data, of which all do."""
    raw = dict(run.config.get("data") or {})
    told = {"source": question.source, "path": question.path, "split": question.split}
    told = {name: value for name, value in told.items() if value is not None}
    if told:
        if "source" in told or "path" in told:  # another data set altogether
            raw = {k: v for k, v in raw.items() if k in ("max_prompt_tokens", "too_long")}
        raw |= {**told, "parts": {}, "eval_size": 0, "limit": None}
    return TypeAdapter(DataConfig).validate_python(raw)


def _problems(data: DataConfig, question: Question, tokenizer: Any) -> list[Encoded]:
    loaded = load_data(data, next(iter(data.parts), "ppo"))
    rows = loaded.eval if data.eval_size else loaded.train
    rows = list({prompt_key(row): row for row in rows}.values())
    if not rows or "tests" not in rows[0].columns:
        raise DataError(
            "There are no held-out problems with tests. Set data.eval_size in the recipe, or name "
            "other data with --source, --path or --split; its rows need a column `tests`."
        )
    fitting, _ = fit_prompts(rows, tokenizer, data.max_prompt_tokens, data.too_long)
    return fitting[: question.prompts]


def _setting(
    run: Run, question: Question, sampling: Sampling, data: DataConfig, judge: UnitTests
) -> str:
    """A short name for all that decides a sample and its verdict."""
    limits = [judge.seconds, judge.memory_mb, judge.max_tests]
    which = [run.about.get("started"), run.last_step, asdict(sampling), question.seed]
    prompts = [data.source, data.path, data.split, data.max_prompt_tokens, data.too_long]
    text = json.dumps([which, prompts, limits])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _key(row: Row) -> str:
    return hashlib.sha256(prompt_key(row).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _seed(key: str, number: int, seed: int) -> int:
    digest = hashlib.sha256(f"{seed} {key} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _ask(
    chunk: Sequence[Encoded],
    known: dict[str, list[str]],
    question: Question,
    sampling: Sampling,
    engine: NativeEngine,
    tokenizer: Any,
    judge: UnitTests,
) -> dict[str, list[str]]:
    """The results of some problems, old and new; without those that the sandbox failed on."""
    asked = [
        (problem, number)
        for problem in chunk
        for number in range(len(known.get(_key(problem.row), [])), question.samples)
    ]
    seeds = [_seed(_key(p.row), number, question.seed) for p, number in asked]
    rollout = engine.generate([p.prompt_ids for p, _ in asked], sampling, seeds)
    responses = [decode(tokenizer, response) for response in rollout.responses]
    verdicts = judge.judge(responses, [p.row.columns["tests"] for p, _ in asked])
    found = {_key(problem.row): list(known.get(_key(problem.row), [])) for problem in chunk}
    for (problem, _), verdict in zip(asked, verdicts):
        found[_key(problem.row)].append(verdict.result)
    return {key: results for key, results in found.items() if "sandbox_error" not in results}


def _read(file: Path, setting: str) -> dict[str, list[str]]:
    """What was judged before under the same setting; a torn last line is left out."""
    known: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("setting") == setting:
            known[said["problem"]] = said["results"]
    return known


def _append(file: Path, setting: str, found: dict[str, list[str]]) -> None:
    torn = file.is_file() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as lines:
        lines.write("\n" if torn else "")
        for key, results in found.items():
            line = {"setting": setting, "problem": key, "results": results}
            lines.write(json.dumps(line) + "\n")


def _write(
    run: Run,
    question: Question,
    sampling: Sampling,
    setting: str,
    answered: Sequence[Row],
    known: dict[str, list[str]],
    asked: int,
    judge: UnitTests,
) -> dict[str, Any]:
    problems = [
        {
            "difficulty": str(row.columns.get("difficulty") or ""),
            "results": known[_key(row)][: question.samples],
        }
        for row in answered
    ]
    if not problems:
        raise DataError("No problem could be judged: the sandbox failed on each. See the log.")
    found = {
        "setting": setting,
        "k": sorted(question.k),
        "samples": question.samples,
        "sampling": asdict(sampling),
        "without_verdict": asked - len(answered),
        "sandbox": judge.layers,
        "rows": summarise(problems, sorted(question.k)),
    }
    new = run.path / f"{SUMMARY}.new"
    new.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    new.replace(run.path / SUMMARY)
    return found
