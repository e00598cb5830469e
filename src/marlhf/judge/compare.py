"""Compare the responses of two models, by a judge of your choice.

>>> from marlhf.judge.compare import judge
>>> judge("runs/macro", "runs/ppo", "openai:gpt-4o", task="tldr")  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from marlhf.intervals import Interval, mean
from marlhf.judge.client import Cache, OpenAIJudge
from marlhf.judge.criteria import Answer, Criteria, find_criteria, slug
from marlhf.judge.pairs import JudgeError, Pair, home, prompt_text, read_pairs
from marlhf.judge.verdicts import REVERSED, Judgement, Verdict, write_verdicts
from marlhf.runs.layout import JUDGED

CACHE = "replies.sqlite"
Progress = Callable[[int, int], None]


class Prices(NamedTuple):
    """Per million tokens, in any currency; None if unknown."""

    tokens_in: float | None = None
    tokens_out: float | None = None

    def describe(self, tokens_in: int, tokens_out: int) -> str:
        text = f"{tokens_in:,} tokens in, {tokens_out:,} out"
        if self == Prices():
            return text
        cost = tokens_in * (self.tokens_in or 0) + tokens_out * (self.tokens_out or 0)
        return f"{text}, {cost / 1e6:.4f} at the given prices"


NO_PRICES = Prices()


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
    prices: Prices = NO_PRICES,
    dry_run: bool = False,
    output: Path | str | None = None,
    cache: Path | str | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Judge A against B on the prompts they share; write the verdicts and return a summary.

    `by` is `openai:MODEL`, `reward:PATH`, `model:PATH` or `scores:NAME`. With `order="both"` each
    pair is judged in both orders and a disagreement is a tie; `"random"` uses one order, by `seed`.
    Verdicts are written to `output`, else into `judged/` of A's folder. A dry run only estimates.
    """
    kind, _, name = by.partition(":")
    if kind not in ("openai", "reward", "model", "scores") or not name:
        raise JudgeError(
            f"Cannot read the judge {by!r}. Write openai:MODEL, reward:PATH, model:PATH or "
            "scores:NAME."
        )
    if order not in ("both", "random"):
        raise JudgeError(f"There is no order {order!r}. Choose both or random.")
    criteria = find_criteria(task)
    pairs = read_pairs(a, b, limit)
    file_name = slug(f"{pairs.name_a}-{pairs.name_b}-{by}-{task}-{order}")
    file = Path(output or home(Path(a)) / JUDGED / f"{file_name}.jsonl")
    if file.suffix != ".jsonl":
        raise JudgeError(f"Verdicts are written to a .jsonl file, not to {file}. Give another -o.")
    orders, questions = _questions(pairs.pairs, kind, order, seed)
    unmatched = pairs.only_a + pairs.only_b
    rest = f"; {unmatched} prompts are on one side only" if unmatched else ""
    say(f"{pairs.name_a} against {pairs.name_b}: {len(pairs.pairs)} pairs{rest}")

    answers: list[Answer | None]
    if kind == "openai":
        store = Path(cache or file.parent / CACHE)
        limits = {"concurrency": concurrency, "timeout": timeout}
        with closing(Cache(None if dry_run and not store.is_file() else store)) as replies:
            client = OpenAIJudge(name, criteria, replies, base_url=base_url, **limits)
            answers = _ask_server(client, questions, prices, dry_run, say, progress)
    elif dry_run:
        say(f"{len(questions)} questions, no cost")
        answers = []
    else:
        answers = _local_judge(kind, name, criteria, device).answer(questions, progress)
    if dry_run:
        return {}
    judgements = [j for j in _combine(pairs.pairs, orders, answers) if j]
    if not judgements:
        raise JudgeError(
            f"{by} gave no verdict on any of {len(pairs.pairs)} pairs. See the reasons above, or "
            "try another judge model."
        )
    about = {"judge": by, "task": task, "order": order, "a": pairs.name_a, "b": pairs.name_b}
    summary = write_verdicts(file, judgements, about)
    return summary | {"path": str(file), "without_verdict": len(pairs.pairs) - len(judgements)}


class PairJudge:
    """A judge of pairs at hand, in both orders: for training, where responses are in no file.

    `by` is as in `judge`, except for `scores:NAME`. Replies of a server are kept in `cache`.
    """

    def __init__(
        self, by: str, *, task: str, cache: Path, base_url: str | None = None, device: str = "auto"
    ) -> None:
        self.by, criteria = by, find_criteria(task)
        self.kind, _, name = by.partition(":")
        if self.kind == "openai":
            self.judge: Any = OpenAIJudge(name, criteria, Cache(cache), base_url=base_url)
        else:
            self.judge = _local_judge(self.kind, name, criteria, device)

    def __call__(self, pairs: Sequence[Pair]) -> list[Verdict | None]:
        """A verdict on each pair, None where the judge gave none."""
        orders, questions = _questions(pairs, self.kind, "both", 0)
        answers = self.judge.answer(questions, lambda done, total: None) if questions else []
        judgements = _combine(pairs, orders, answers)
        verdicts: list[Verdict | None] = [j.verdict if j else None for j in judgements]
        if pairs and not any(verdicts):
            faults = "; ".join(getattr(self.judge, "faults", ())) or "no reply could be read"
            raise JudgeError(f"{self.by} gave no verdict on any of {len(pairs)} pairs: {faults}.")
        return verdicts


def _questions(
    pairs: Sequence[Pair], kind: str, order: str, seed: int
) -> tuple[list[tuple[bool, ...]], list[Pair]]:
    """The orders in which each pair is judged, and the pairs as they are then shown."""
    # A score does not depend on the other response, so one order is enough.
    order = "first" if kind in ("scores", "reward") else order
    orders = [_orders(pair, order, seed) for pair in pairs]
    questions = [
        replace(pair, a=pair.b, b=pair.a) if swapped else pair
        for pair, swaps in zip(pairs, orders)
        for swapped in swaps
    ]
    return orders, questions


def _ask_server(
    client: OpenAIJudge,
    questions: Sequence[Pair],
    prices: Prices,
    dry_run: bool,
    say: Callable[[str], None],
    progress: Progress,
) -> list[Answer | None]:
    """Ask the questions; reports the estimated cost before and the actual cost after."""
    count, known, *tokens = client.estimate(questions)
    cost = prices.describe(*tokens)
    say(f"{count} questions, {known} answered before; remaining: about {cost}")
    if dry_run:
        if prices == NO_PRICES:
            say("For a cost give --price-in and --price-out.")
        return []
    before = client.spent(questions)
    try:
        return client.answer(questions, progress)
    finally:  # also after Ctrl-C: the replies so far were paid for
        after = client.spent(questions)
        say(f"Used now: {prices.describe(after[0] - before[0], after[1] - before[1])}")
        say(f"Used in total: {prices.describe(*after)}")
        for fault, count in client.faults.items():
            say(f"{count} questions without an answer: {fault}. They are asked again next time.")
        if client.unreadable:
            say(f"A reply that could not be read: {client.unreadable[:300]!r}")


def describe(summary: dict[str, Any]) -> list[str]:
    """A summary in a few lines."""
    shares = [f"{name} {_percent(summary[name])}" for name in ("win", "tie", "loss")]
    lines = [f"{summary['a']} against {summary['b']}: {', '.join(shares)}"]
    equal, (chars_a, chars_b) = summary["win_rate_at_equal_length"], summary["mean_chars"]
    at_equal = "" if math.isnan(equal["share"]) else f"; at equal length {_percent(equal)}"
    lines.append(
        f"  win rate, ties as half: {100 * summary['win_rate']:.1f}%{at_equal} "
        f"({chars_a:.0f} against {chars_b:.0f} characters)"
    )
    for name, sides in summary["dimensions"].items():
        a, b, d = (sides[side] for side in ("a", "b", "difference"))
        difference = Interval(d["mean"], d["low"], d["high"], summary["pairs"])
        lines.append(
            f"  {name}: {a['mean']:.2f} against {b['mean']:.2f}, difference "
            f"{difference.text('{:+.2f}'.format)}"
        )
    if "orders_disagreed" in summary:
        count, total = summary["orders_disagreed"], summary["pairs"]
        lines.append(f"The two orders disagreed on {count} of {total} pairs, counted as ties.")
    if summary["without_verdict"]:
        lines.append(f"{summary['without_verdict']} pairs have no verdict.")
    return lines


def _percent(part: dict[str, float]) -> str:
    """`45.0% [40.2, 49.8]`."""
    share = Interval(part["share"], part["low"], part["high"], 0)
    return f"{100 * share.mean:.1f}% {share.bounds(lambda x: f'{100 * x:.1f}')}".rstrip()


def _local_judge(kind: str, name: str, criteria: Criteria, device: str) -> Any:
    from marlhf.judge import local  # torch loads only when it is needed

    if kind == "scores":
        return local.ScoreJudge(name)
    if kind == "reward":
        return local.RewardJudge(name, device)
    return local.ModelJudge(name, criteria, device)


def _orders(pair: Pair, order: str, seed: int) -> tuple[bool, ...]:
    """The orders in which a pair is judged: whether B comes first. Equal texts are not judged."""
    if pair.a.text == pair.b.text:
        return ()
    if order != "random":
        return (False, True) if order == "both" else (False,)
    # Depends only on the pair and the seed, so that other pairs do not change the order.
    data = json.dumps([seed, prompt_text(pair.prompt), pair.a.text, pair.b.text])
    return (hashlib.sha256(data.encode()).digest()[0] % 2 == 1,)


def _combine(
    pairs: Sequence[Pair], orders: Sequence[tuple[bool, ...]], answers: Sequence[Answer | None]
) -> list[Judgement | None]:
    """One judgement per pair, None where an answer is missing. Two equal texts are a tie."""
    remaining = iter(answers)
    judgements: list[Judgement | None] = []
    for pair, swaps in zip(pairs, orders):
        received = [(swapped, answer) for swapped in swaps if (answer := next(remaining))]
        if len(received) < len(swaps):
            judgements.append(None)
            continue
        verdicts: list[Verdict] = [
            REVERSED[answer.verdict] if swapped else answer.verdict for swapped, answer in received
        ]
        sides = [
            {n: v[::-1] if swapped else v for n, v in answer.dimensions.items()}
            for swapped, answer in received
        ]
        dimensions = {
            n: (mean([s[n][0] for s in sides]), mean([s[n][1] for s in sides]))
            for n in (sides[0] if sides else {})
        }
        verdict: Verdict = verdicts[0] if len(set(verdicts)) == 1 else "tie"
        texts = pair.prompt, pair.a.text, pair.b.text
        judgements.append(Judgement(*texts, verdict, tuple(verdicts), dimensions))
    return judgements
