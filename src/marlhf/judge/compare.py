"""Which of two models writes the better responses, by a judge of your choice.

>>> from marlhf.judge.compare import judge
>>> judge("runs/macro", "runs/ppo", "openai:gpt-4o", task="tldr")  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from marlhf.judge.client import Cache, OpenAIJudge
from marlhf.judge.criteria import Answer, Question, find_criteria, slug
from marlhf.judge.pairs import JudgeError, Pair, home, prompt_text, read_pairs
from marlhf.judge.verdicts import FOLDER, Judgement, Verdict, write_verdicts

CACHE = "replies.sqlite"
SWAPPED: dict[str, Verdict] = {"first": "b", "second": "a", "tie": "tie"}
STRAIGHT: dict[str, Verdict] = {"first": "a", "second": "b", "tie": "tie"}

Progress = Callable[[int, int], None]


class Judge(Protocol):
    """Anything that says which of two responses is better."""

    def answer(self, questions: Sequence[Question], progress: Progress) -> list[Answer | None]: ...


@dataclass(frozen=True)
class Prices:
    """In any currency, for a million tokens; None where nobody said."""

    tokens_in: float | None = None
    tokens_out: float | None = None

    def __call__(self, tokens_in: int, tokens_out: int) -> str:
        words = f"{tokens_in:,} tokens in, {tokens_out:,} out"
        if self.tokens_in is None and self.tokens_out is None:
            return words
        cost = tokens_in * (self.tokens_in or 0) + tokens_out * (self.tokens_out or 0)
        return f"{words}, {cost / 1e6:.4f} at the given prices"


def judge(
    a: Path | str,
    b: Path | str,
    by: str,
    *,
    task: str = "hh",
    order: str = "both",
    limit: int | None = None,
    seed: int = 0,
    base_url: str | None = None,
    concurrency: int = 8,
    timeout: float = 120.0,
    prices: Prices | None = None,
    dry_run: bool = False,
    output: Path | str | None = None,
    cache: Path | str | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Judge A against B on the prompts they share; write the verdicts, return their summary.

    `by` is `openai:MODEL`, `reward:PATH`, `model:PATH` or `scores:NAME`. With `order="both"` each
    pair is asked both ways round and a disagreement is a tie; `"random"` asks one, by `seed`.
    Verdicts go to `output`, else into `judged/` of A's folder. A dry run asks and writes nothing.
    """
    kind, _, name = by.partition(":")
    if kind not in ("openai", "reward", "model", "scores") or not name:
        raise JudgeError(
            f"Cannot read the judge {by!r}. Write openai:MODEL, reward:PATH, model:PATH or "
            "scores:NAME."
        )
    if order not in ("both", "random"):
        raise JudgeError(f"There is no order {order!r}. Take both or random.")
    criteria = find_criteria(task)
    found = read_pairs(a, b, limit)
    name_of_all = slug(f"{found.name_a}-{found.name_b}-{by}-{task}-{order}")
    file = Path(output or home(Path(a)) / FOLDER / f"{name_of_all}.jsonl")
    if file.suffix != ".jsonl":
        raise JudgeError(f"Verdicts go to a .jsonl file, not to {file}. Give another -o.")
    # A score does not depend on what it is compared with, so one order is all there is to ask.
    turns = _turns(found.pairs, "first" if kind in ("scores", "reward") else order, seed)
    open_pairs = [i for i, pair in enumerate(found.pairs) if pair.a.text != pair.b.text]
    asked = [(i, swapped) for i in open_pairs for swapped in turns[i]]
    questions = [_question(found.pairs[i], swapped) for i, swapped in asked]
    say(_what(found.name_a, found.name_b, len(found.pairs), found.only_a + found.only_b))

    answers: list[Answer | None]
    if kind == "openai":
        store = Path(cache or file.parent / CACHE)
        replies = Cache(None if dry_run and not store.is_file() else store)
        client = OpenAIJudge(
            name, criteria, replies, base_url=base_url, concurrency=concurrency, timeout=timeout
        )
        try:
            answers = _ask_server(client, questions, prices or Prices(), dry_run, say, progress)
        finally:
            replies.close()
    elif dry_run:
        say(f"{len(questions)} questions, nothing to pay")
        answers = []
    else:
        answers = _offline(kind, name, criteria, device).answer(questions, progress)
    if dry_run:
        return {}
    judgements = _combine(found.pairs, asked, answers, turns)
    if not judgements:
        raise JudgeError(
            f"{by} gave no verdict on any of {len(found.pairs)} pairs. Try another judge model, or "
            "look at the reasons above."
        )
    about = {"judge": by, "task": task, "order": order, "a": found.name_a, "b": found.name_b}
    summary = write_verdicts(file, judgements, about)
    return summary | {"path": str(file), "without_verdict": len(found.pairs) - len(judgements)}


def _ask_server(
    client: OpenAIJudge,
    questions: Sequence[Question],
    prices: Prices,
    dry_run: bool,
    say: Callable[[str], None],
    progress: Progress,
) -> list[Answer | None]:
    """The answers, with what they will cost said before and what they did cost after."""
    plan = client.plan(questions)
    say(
        f"{plan.questions} questions, {plan.known} answered before; about "
        f"{prices(plan.tokens_in, plan.tokens_out)} to go"
    )
    if dry_run:
        return []
    before = client.spent(questions)
    try:
        return client.answer(questions, progress)
    finally:  # what a stopped judging has cost is worth knowing, too
        after = client.spent(questions)
        say(f"Used now: {prices(after[0] - before[0], after[1] - before[1])}")
        say(f"Used in all: {prices(*after)}")
        for fault, count in client.faults.items():
            say(f"{count} questions without an answer: {fault}")


def describe(summary: dict[str, Any]) -> list[str]:
    """A summary in a few lines."""
    shares = [
        f"{name} {100 * s['share']:.1f}% [{100 * s['low']:.1f}, {100 * s['high']:.1f}]"
        for name, s in ((name, summary[name]) for name in ("win", "tie", "loss"))
    ]
    lines = [f"{summary['a']} against {summary['b']}: {', '.join(shares)}"]
    for name, sides in summary["dimensions"].items():
        a, b, d = (sides[side] for side in ("a", "b", "difference"))
        lines.append(
            f"  {name}: {a['mean']:.2f} against {b['mean']:.2f}, difference {d['mean']:+.2f} "
            f"[{d['low']:+.2f}, {d['high']:+.2f}]"
        )
    if "orders_disagreed" in summary:
        count, total = summary["orders_disagreed"], summary["pairs"]
        lines.append(f"The two orders disagreed on {count} of {total} pairs, counted as ties.")
    if summary["without_verdict"]:
        lines.append(f"{summary['without_verdict']} pairs are without a verdict.")
    return lines


def _offline(kind: str, name: str, criteria: Any, device: str) -> Judge:
    from marlhf.judge import local as offline_judges  # torch loads only when it is needed

    if kind == "scores":
        return offline_judges.ScoreJudge(name)
    if kind == "reward":
        return offline_judges.RewardJudge(name, device)
    return offline_judges.ModelJudge(name, criteria, device)


def _turns(pairs: Sequence[Pair], order: str, seed: int) -> list[tuple[bool, ...]]:
    """Which ways round each pair is asked: whether B comes first."""
    if order == "both":
        return [(False, True)] * len(pairs)
    if order == "first":
        return [(False,)] * len(pairs)
    return [(_coin(pair, seed),) for pair in pairs]


def _coin(pair: Pair, seed: int) -> bool:
    """By the pair and the seed alone, so that more or fewer pairs change no order."""
    data = json.dumps([seed, prompt_text(pair.prompt), pair.a.text, pair.b.text])
    return hashlib.sha256(data.encode()).digest()[0] % 2 == 1


def _question(pair: Pair, swapped: bool) -> Question:
    first, second = (pair.b, pair.a) if swapped else (pair.a, pair.b)
    return Question(pair.prompt, first, second, pair.reference)


def _combine(
    pairs: Sequence[Pair],
    asked: Sequence[tuple[int, bool]],
    answers: Sequence[Answer | None],
    turns: Sequence[tuple[bool, ...]],
) -> list[Judgement]:
    """A judgement a pair; a pair without all its answers has none. The same text twice is a tie."""
    by_pair: dict[int, list[tuple[bool, Answer]]] = {}
    for (i, swapped), answer in zip(asked, answers):
        if answer is not None:
            by_pair.setdefault(i, []).append((swapped, answer))
    judgements = []
    for i, pair in enumerate(pairs):
        heard = by_pair.get(i, [])
        if pair.a.text != pair.b.text and len(heard) < len(turns[i]):
            continue
        said: tuple[Verdict, ...] = tuple(
            (SWAPPED if swapped else STRAIGHT)[answer.side] for swapped, answer in heard
        )
        verdict: Verdict = said[0] if said and len(set(said)) == 1 else "tie"
        sides = [
            {n: (v[1], v[0]) if swapped else v for n, v in answer.dimensions.items()}
            for swapped, answer in heard
        ]
        dimensions = {
            n: (_mean([s[n][0] for s in sides]), _mean([s[n][1] for s in sides]))
            for n in (sides[0] if sides else {})
        }
        judgements.append(
            Judgement(pair.prompt, pair.a.text, pair.b.text, verdict, said, dimensions)
        )
    return judgements


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _what(a: str, b: str, pairs: int, rest: int) -> str:
    alone = f"; {rest} prompts are on one side only" if rest else ""
    return f"{a} against {b}: {pairs} pairs{alone}"
