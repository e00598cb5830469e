"""Best of n: what the highest-scored of n samples is worth, at each n and temperature.

The largest n is sampled once per temperature; smaller ones are estimated from the same samples
without bias. Scores are kept in `best_of_n/` of the run folder, with the best response of each
prompt, so the same command resumes after a stop, and a larger n adds to what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from marlhf.data import Encoded, decode
from marlhf.data.rows import Message, Text, is_blank
from marlhf.environments import opening
from marlhf.evaluate.eval_plan import (
    EvaluationError,
    EvaluationOptions,
    find_fallback,
    find_policy,
    make_plan,
)
from marlhf.evaluate.results import Grid, expected_best
from marlhf.evaluate.sampling import SamplingTask, key_of
from marlhf.intervals import mean
from marlhf.runs.atomic import Line, write_jsonl
from marlhf.runs.evaluations import as_text, opening_length
from marlhf.runs.layout import BEST_OF_N

ROWS = 512
"""Responses sampled and scored at once: about what a stop can cost."""


def find_task(path: Path | str, options: EvaluationOptions) -> SamplingTask:
    """The one policy under a path, to be sampled for the rewards of its run."""
    policy = find_policy(path)
    fallback = find_fallback([policy], options.like)
    plan = make_plan(policy, replace(options, reference="none"), fallback)
    return SamplingTask(policy, plan, options, fallback)


def best_of_n(
    path: Path | str,
    options: EvaluationOptions,
    ns: Sequence[int],
    temperatures: Sequence[float] = (),
    notice: Callable[[str], None] = lambda words: None,
) -> Grid:
    """Sample, score and keep; the grid of mean best scores, and the lines it was made from."""
    if not ns or min(ns) < 1:
        raise EvaluationError(f"Give one n or more, each at least 1; got {list(ns)}.")
    task = find_task(path, options)
    by_temperature: dict[float, list[Line]] = {}

    def sample(chunk: Sequence[Encoded], known: dict[str, Line]) -> list[Line]:
        lines = [known.get(key_of(p.row)) or _empty(p) for p in chunk]
        _add_samples(lines, chunk, max(ns), task)
        return lines

    for temperature in sorted(set(temperatures)) or [task.plan.sampling.temperature]:
        sampling = replace(task.plan.sampling, temperature=temperature)
        task.plan = replace(task.plan, sampling=sampling)
        settings = task.settings(with_rewards=True)
        by_temperature[temperature] = task.complete_lines(
            task.policy.folder / BEST_OF_N / settings.file_name,
            task.setting([(r.digest, r.weight) for r in task.weighted_rewards]),
            settings,
            lambda line: len(line["scores"]) >= max(ns),
            sample,
            size=max(1, ROWS // max(ns)),
            notice=lambda words, t=temperature: notice(f"temperature {t:g}: {words}"),
        )
    return Grid(sorted(set(ns)), by_temperature)


def _empty(prompt: Encoded) -> Line:
    own = {"key": key_of(prompt.row), "prompt": prompt.row.prompt}
    return own | {"scores": [], "lengths": [], "best": None}


def _add_samples(
    lines: Sequence[Line], prompts: Sequence[Encoded], n: int, task: SamplingTask
) -> None:
    """Bring the line of every prompt to n samples."""
    missing = [(i, k) for i, line in enumerate(lines) for k in range(len(line["scores"]), n)]
    repeated = [prompts[i] for i, _ in missing]
    answers = task.respond(repeated, [k for _, k in missing])
    rollout, episodes = answers.rollout, answers.episodes
    totals = task.total_scores(answers.prompts, rollout.responses, episodes)
    for row, ((i, k), ids, total) in enumerate(zip(missing, rollout.responses, totals)):
        line, record, end = lines[i], episodes[row], bool(rollout.ended[row])
        own = None if rollout.sampled is None else int(rollout.sampled[row].sum())
        line["scores"].append(total)
        line["lengths"].append(len(ids) if own is None else own)
        if line["best"] is None or total > line["best"]["score"]:
            text = decode(task.tokenizer, ids)
            line["best"] = {"number": k, "score": total, "response": text, "ended": end}
            if record is not None:
                line["prompt"] = record.messages[: opening(record)]
                line["best"]["response"] = as_text(record.messages[opening(record) :])
                line["best"]["episode"] = record.to_dict()


def export(grid: Grid, file: Path) -> tuple[float, int, int]:
    """Write the best response to each prompt as data for `marlhf sft`.

    Of several temperatures the one whose best responses score highest is taken. Returns the
    temperature, the rows written and the rows left out.
    """
    means: dict[float, float] = {}
    for temperature, lines in grid.lines.items():
        fewest = min(len(line["scores"]) for line in lines)
        means[temperature] = mean([expected_best(line["scores"], fewest) for line in lines])
    best_temperature = max(means, key=lambda each: means[each])
    lines = grid.lines[best_temperature]
    best = [(line, line["best"], {"samples": len(line["scores"])}) for line in lines]
    return best_temperature, *write_ended(file, best)


def write_ended(file: Path, responses: Sequence[tuple[Line, Line, Line]]) -> tuple[int, int]:
    """Write responses as data for SFT: the line of the prompt, of the response, and what to add.

    Responses that were cut off or are empty are left out: they would teach to stop in mid-sentence.
    Of a conversation each turn is a row. Returns the rows written, and the responses left out.
    """
    kept = [each for each in responses if each[1]["ended"] and not is_blank(each[1]["response"])]
    rows = [
        {"prompt": asked, "chosen": said, "score": best["score"], **more}
        for prompt, best, more in kept
        for asked, said in _lessons(prompt, best)
    ]
    if not rows:
        raise EvaluationError(
            "No response ended by itself, so there is nothing to write. Raise --max-new-tokens."
        )
    write_jsonl(file, rows)
    return len(rows), len(responses) - len(kept)


def _lessons(prompt: Line, best: Line) -> list[tuple[Text, Text]]:
    """What to answer to what: a response to its prompt, or each turn to all that came before it."""
    episode = best.get("episode")
    if episode is None:
        return [(prompt["prompt"], best["response"])]
    messages: list[Message] = episode["messages"]
    return [
        (messages[:i], [message])
        for i, message in enumerate(messages)
        if i >= opening_length(messages, len(episode["turns"]))
        and message["role"] == "assistant"
        and not is_blank(message["content"])
    ]
