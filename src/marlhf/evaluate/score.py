"""Scores of held-out responses, for any model: SFT, PPO, RLOO, DPO, or a plain folder.

Every response is a line of `evaluation/<name>.jsonl` in the run folder, with its scores by each
judge, KL, length and repetition, so that whatever comes after needs no GPU. The same command goes
on after a stop; another reward model is asked about the responses there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marlhf.data import Encoded, Row, decode
from marlhf.evaluate.eval_plan import (
    Plan,
    Question,
    Subject,
    file_name,
    find_donor,
    find_subjects,
    make_plan,
    setting_of,
    stamp,
)
from marlhf.evaluate.held_out import FOLDER, Summary, summarise
from marlhf.evaluate.sampling import (
    Bench,
    Judge,
    Writer,
    find_judges,
    key_of,
    kl_to,
    load_prompts,
    load_reference,
    seed_of,
)
from marlhf.models.base import Model, Tokenizer, pick_device
from marlhf.models.load import load_tokenizer
from marlhf.rollout.repetition import repetition
from marlhf.runs.jsonl import Line, append_jsonl, read_keyed, write_jsonl

CHUNK = 256
"""Prompts asked and judged at once: what a stop can cost."""

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Scored:
    """A subject's answers to the question, and the file that keeps them."""

    name: str
    file: Path
    lines: list[Line]

    @property
    def summary(self) -> Summary:
        return summarise(self.lines)


def evaluate(
    paths: Sequence[Path | str], question: Question, notice: Notice = lambda words: None
) -> list[Scored]:
    """Ask every policy under `paths` the same, score the answers, and keep them in its folder."""
    subjects = find_subjects(paths)
    donor = find_donor(subjects, question.like)
    plans = [make_plan(subject, question, donor) for subject in subjects]
    bench = Bench(pick_device(question.device))
    found: list[Scored] = []
    for subject, plan in zip(subjects, plans):
        found.append(_evaluate(subject, plan, question, bench, notice))
        while bench.warnings:
            notice(bench.warnings.pop())
    return found


def _evaluate(
    subject: Subject, plan: Plan, question: Question, bench: Bench, notice: Notice
) -> Scored:
    tokenizer = load_tokenizer(subject.model, trust_remote_code=plan.trust_remote_code)
    prompts = load_prompts(subject, plan, tokenizer, question.prompts)
    judges = find_judges(plan)
    tied = None if plan.reference is None else stamp(plan.reference)
    setting = setting_of(subject, plan, question.seed, tied)
    file = subject.folder / FOLDER / f"{file_name(plan, question.seed)}.jsonl"
    known = read_keyed(file, setting)
    left = [p for p in prompts if not _complete(known.get(key_of(p.row)), judges)]
    notice(f"{subject.name}: {len(prompts) - len(left)} of {len(prompts)} prompts are there")
    if left:
        asks = any(key_of(p.row) not in known for p in left)
        writer = Writer(subject, plan, tokenizer, bench.device) if asks else None
        reference = load_reference(subject, plan, tokenizer, bench.device) if asks else None
        for start in range(0, len(left), CHUNK):
            chunk = left[start : start + CHUNK]
            if writer is not None:
                new = [p for p in chunk if key_of(p.row) not in known]
                known |= _ask(new, writer, reference, question.seed, setting)
            lines = [known[key_of(p.row)] for p in chunk]
            _judge(lines, chunk, judges, plan, tokenizer, bench)
            append_jsonl(file, lines)
            done = len(prompts) - len(left) + start + len(chunk)
            notice(f"{subject.name}: {done} of {len(prompts)} prompts")
        _forget_others(known, judges)
        write_jsonl(file, known.values())
    return Scored(subject.name, file, [known[key_of(p.row)] for p in prompts])


def _complete(line: Line | None, judges: Sequence[Judge]) -> bool:
    return line is not None and all(line["judges"].get(j.name) == j.stamp for j in judges)


def _forget_others(known: dict[str, Line], judges: Sequence[Judge]) -> None:
    """Drop scores of a reward model that has been trained anew: one name, one judge."""
    for line in known.values():
        for judge in judges:
            if line["judges"].get(judge.name, judge.stamp) != judge.stamp:
                del line["judges"][judge.name], line["scores"][judge.name]


@torch.no_grad()
def _ask(
    prompts: Sequence[Encoded], writer: Writer, reference: Model | None, seed: int, setting: str
) -> dict[str, Line]:
    """A line a prompt: the response and its measures, not yet judged."""
    if not prompts:
        return {}
    keys = [key_of(p.row) for p in prompts]
    rollout = writer.write(prompts, [seed_of(key, 0, seed) for key in keys])
    plan, tokenizer = writer.plan, writer.tokenizer
    kl: list[Any] = [None if plan.reference is None else 0.0] * len(prompts)
    if reference is not None:
        kl = kl_to(reference, prompts, rollout, plan, tokenizer.pad_token_id)
    found: dict[str, Line] = {}
    for i, (prompt, ids) in enumerate(zip(prompts, rollout.responses)):
        found[keys[i]] = {
            "setting": setting,
            "key": keys[i],
            "prompt": prompt.row.prompt,
            "response": decode(tokenizer, ids),
            "scores": {},
            "kl": kl[i],
            "length": len(ids),
            "repetition": repetition(ids),
            "distinct_1": distinct(ids, 1),
            "distinct_2": distinct(ids, 2),
            "ended": bool(rollout.ended[i]),
            "response_ids": ids,
            "judges": {},
        }
        if reference_text := _reference_text(prompt.row):
            found[keys[i]]["reference"] = reference_text
    return found


def _reference_text(row: Row) -> str:
    """What a judge may check an answer against: a column of that name, or WebGPT's quotes."""
    given, quotes = row.columns.get("reference"), row.columns.get("chosen_quotes")
    if isinstance(given, str):
        return given
    if not isinstance(quotes, Mapping):
        return ""
    extracts = quotes.get("extract") or []
    titles = quotes.get("title") or [""] * len(extracts)
    return "\n\n".join(f"{title}\n{text}".strip() for title, text in zip(titles, extracts))


def _judge(
    lines: Sequence[Line],
    prompts: Sequence[Encoded],
    judges: Sequence[Judge],
    plan: Plan,
    tokenizer: Tokenizer,
    bench: Bench,
) -> None:
    """Fill in the scores that lines lack, of each judge that has not seen them."""
    for judge in judges:
        unseen = [i for i, line in enumerate(lines) if not _complete(line, [judge])]
        if not unseen:
            continue
        asked = [prompts[i] for i in unseen]
        responses = [lines[i]["response_ids"] for i in unseen]
        for i, score in zip(unseen, bench.score(judge, plan, tokenizer, asked, responses)):
            lines[i]["scores"][judge.name] = score
            lines[i]["judges"][judge.name] = judge.stamp


def distinct(tokens: Sequence[int], n: int) -> float:
    """Share of n-grams that differ from one another: 1 for all; 0 where there are none.

    >>> distinct([1, 2, 1, 2], n=2)  # 12 21 12: two of three
    0.6666666666666666
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
