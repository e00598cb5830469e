"""Best of n: what the highest-scored of n samples is worth, at each n and temperature.

The largest n is sampled once a temperature; smaller ones are read from the same samples without
bias. Scores are kept in `best_of_n/` of the run folder, with the best response of each prompt, so
the same command goes on after a stop, and a larger n adds to what is there. No torch in the
estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from marlhf.data import Encoded, decode
from marlhf.data.rows import is_blank
from marlhf.evaluate.best_of_n_grid import BEST, Grid, expected_best
from marlhf.evaluate.eval_plan import (
    EvaluationError,
    Question,
    file_name,
    find_donor,
    find_subjects,
    make_plan,
    setting_of,
)
from marlhf.evaluate.sampling import (
    Bench,
    Judge,
    Writer,
    find_judges,
    key_of,
    load_prompts,
    seed_of,
)
from marlhf.models.base import pick_device
from marlhf.models.load import load_tokenizer
from marlhf.runs.jsonl import Line, append_jsonl, read_keyed, write_jsonl

ROWS = 512
"""Responses sampled and judged at once: about what a stop can cost."""


def best_of_n(
    path: Path | str,
    question: Question,
    ns: Sequence[int],
    temperatures: Sequence[float] = (),
    notice: Callable[[str], None] = lambda words: None,
) -> Grid:
    """Sample, score and keep; the grid of mean best scores, and the lines it was made from."""
    if not ns or min(ns) < 1:
        raise EvaluationError(f"Give one n or more, each at least 1; got {list(ns)}.")
    subjects = find_subjects([path])
    if len(subjects) > 1:
        raise EvaluationError(f"{path} holds {len(subjects)} runs. Give the folder of one.")
    [subject] = subjects
    donor = find_donor(subjects, question.like)
    plan = make_plan(subject, replace(question, reference="none"), donor)
    tokenizer = load_tokenizer(subject.model, trust_remote_code=plan.trust_remote_code)
    prompts = load_prompts(subject, plan, tokenizer, question.prompts)
    judges = [judge for judge in find_judges(plan) if judge.weight]
    bench = Bench(pick_device(question.device))
    writer: Writer | None = None
    found: dict[float, list[Line]] = {}
    for heat in sorted(set(temperatures)) or [plan.sampling.temperature]:
        warm = make_plan(subject, replace(question, reference="none", temperature=heat), donor)
        setting = setting_of(subject, warm, question.seed, [(j.stamp, j.weight) for j in judges])
        names = "+".join(judge.name.replace("/", "_").replace(":", "_") for judge in judges)
        file = subject.folder / BEST / f"{file_name(warm, question.seed)}-{names}.jsonl"
        known = read_keyed(file, setting)
        left = [p for p in prompts if _count(known, p) < max(ns)]
        notice(f"temperature {heat:g}: {len(prompts) - len(left)} of {len(prompts)} prompts")
        if left:
            writer = writer or Writer(subject, warm, tokenizer, bench.device)
            writer.plan = warm
            _sample(left, max(ns), known, writer, judges, bench, question.seed, setting, file)
            write_jsonl(file, known.values())
        while bench.warnings:
            notice(bench.warnings.pop())
        found[heat] = [known[key_of(p.row)] for p in prompts]
    return Grid(sorted(set(ns)), found)


def _count(known: Mapping[str, Line], prompt: Encoded) -> int:
    line = known.get(key_of(prompt.row))
    return len(line["scores"]) if line else 0


def _sample(
    left: Sequence[Encoded],
    n: int,
    known: dict[str, Line],
    writer: Writer,
    judges: Sequence[Judge],
    bench: Bench,
    seed: int,
    setting: str,
    file: Path,
) -> None:
    """Bring every prompt to n samples, some prompts at a time."""
    size = max(1, ROWS // n)
    for start in range(0, len(left), size):
        chunk = left[start : start + size]
        asked = [(p, number) for p in chunk for number in range(_count(known, p), n)]
        prompts = [p for p, _ in asked]
        seeds = [seed_of(key_of(p.row), number, seed) for p, number in asked]
        rollout = writer.write(prompts, seeds)
        totals = [0.0] * len(asked)
        for judge in judges:
            scores = bench.score(judge, writer.plan, writer.tokenizer, prompts, rollout.responses)
            totals = [t + judge.weight * (s or 0.0) for t, s in zip(totals, scores)]
        ended = rollout.ended.tolist()
        for (prompt, number), ids, total, end in zip(asked, rollout.responses, totals, ended):
            key = key_of(prompt.row)
            line = known.setdefault(key, _empty(setting, key, prompt))
            line["scores"].append(total)
            line["lengths"].append(len(ids))
            if line["best"] is None or total > line["best"]["score"]:
                text = decode(writer.tokenizer, ids)
                line["best"] = {"number": number, "score": total, "response": text, "ended": end}
        append_jsonl(file, [known[key_of(p.row)] for p in chunk])


def _empty(setting: str, key: str, prompt: Encoded) -> Line:
    line: Line = {"setting": setting, "key": key, "prompt": prompt.row.prompt}
    return line | {"scores": [], "lengths": [], "best": None}


def export(grid: Grid, file: Path) -> tuple[float, int, int]:
    """Write the best response to each prompt as data for `marlhf sft`.

    Of several temperatures the one whose best responses score highest is taken. Responses that
    were cut off or are empty are left out: they would teach to stop in mid-sentence. Returns the
    temperature, the rows written and the rows left out.
    """
    most = {heat: min(len(line["scores"]) for line in ls) for heat, ls in grid.lines.items()}
    means = {
        heat: math.fsum(expected_best(line["scores"], most[heat]) for line in lines) / len(lines)
        for heat, lines in grid.lines.items()
    }
    heat = max(means, key=lambda each: means[each])
    rows: list[dict[str, Any]] = []
    for line in grid.lines[heat]:
        best = line["best"]
        if best["ended"] and not is_blank(best["response"]):
            row = {"prompt": line["prompt"], "chosen": best["response"]}
            rows.append(row | {"score": best["score"], "samples": len(line["scores"])})
    if not rows:
        raise EvaluationError(
            "No best response ended by itself, so there is nothing to export. Raise "
            "--max-new-tokens."
        )
    write_jsonl(file, rows)
    return heat, len(rows), len(grid.lines[heat]) - len(rows)
