"""Verdicts of any judge: written, read and counted, and how far judges agree. No torch, no network.

A verdict file has one JSON object per line: `prompt`, `response_a`, `response_b`, `verdict` (`a`,
`b` or `tie`) and `judge`. The format is the same for models, scores and people.

Judges prefer longer responses, and length is cheap to learn; hence win rates at equal length,
as in length-controlled AlpacaEval (Dubois et al., 2024): a logistic regression explains wins by the
difference in length, and the win rate is what it predicts for responses of equal length.

How much of an agreement is chance is told by Cohen's and Fleiss' kappa.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from marlhf.evaluate.results import text_table
from marlhf.intervals import NO_INTERVAL, Floats, Interval, bootstrap, interval, mean, wilson
from marlhf.judge.pairs import JudgeError, read_lines
from marlhf.runs.atomic import write_json, write_jsonl
from marlhf.runs.layout import JUDGED

if TYPE_CHECKING:
    from marlhf.data.rows import Text

Verdict = Literal["a", "b", "tie"]
VERDICTS: tuple[Verdict, ...] = ("a", "tie", "b")
WINS = {"a": 1.0, "tie": 0.5, "b": 0.0}
REVERSED: dict[str, Verdict] = {"a": "b", "b": "a", "tie": "tie"}
RIDGE = 0.01
"""Weak prior on both coefficients: they stay finite where one side always wins."""
STEPS = 25
MIN_PAIRS = 10
"""With fewer, two coefficients would overfit."""
MAX_DRAWN = 4_000_000
"""Resamples times pairs: beyond it there are fewer resamples, so that memory stays small."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on one pair."""

    prompt: Text
    response_a: str
    response_b: str
    verdict: Verdict
    orders: tuple[Verdict, ...] = ()
    """The verdict in each order that was asked."""
    dimensions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Numbers for (a, b), averaged over the orders."""


def share_with_bounds(count: int, total: int) -> dict[str, float]:
    """A share and its interval, as a summary file has them."""
    share, low, high, _ = wilson(count, total)
    return {"share": share, "low": low, "high": high}


def summarise(judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Win, tie and loss of A with intervals, at equal length too; dimensions and orders."""
    total = len(judgements)
    counts = {v: sum(j.verdict == v for j in judgements) for v in VERDICTS}
    summary: dict[str, Any] = {"pairs": total}
    for name, verdict in (("win", "a"), ("tie", "tie"), ("loss", "b")):
        summary[name] = {"count": counts[verdict], **share_with_bounds(counts[verdict], total)}
    wins = [WINS[j.verdict] for j in judgements]
    chars = [len(j.response_a) for j in judgements], [len(j.response_b) for j in judgements]
    equal = win_rate_at_equal_length(wins, *chars)
    summary["win_rate"] = mean(wins)
    summary["win_rate_at_equal_length"] = dict(zip(("share", "low", "high"), equal[:3]))
    summary["mean_chars"] = [mean(chars[0]), mean(chars[1])]
    both = [j for j in judgements if len(j.orders) > 1]
    if both:
        summary["orders_disagreed"] = sum(len(set(j.orders)) > 1 for j in both)
    names = list(dict.fromkeys(name for j in judgements for name in j.dimensions))
    summary["dimensions"] = {
        name: {
            side: dict(zip(("mean", "low", "high"), interval(values)[:3]))
            for side, values in zip(
                ("a", "b", "difference"), _columns([j.dimensions.get(name) for j in judgements])
            )
        }
        for name in names
    }
    return summary


def _columns(values: Sequence[tuple[float, float] | None]) -> tuple[list[float], ...]:
    known = [value for value in values if value is not None]
    return [a for a, _ in known], [b for _, b in known], [a - b for a, b in known]


def write_verdicts(
    file: Path, judgements: Sequence[Judgement], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the verdicts, and beside them their summary, which is returned."""
    summary = {**about, **summarise(judgements), "file": file.name}
    write_jsonl(file, [{**about, **asdict(judgement)} for judgement in judgements])
    write_json(file.with_suffix(".json"), summary)
    return summary


def read_verdicts(file: Path) -> list[tuple[str, str, Verdict]]:
    """(judge, pair, verdict) per line; of repeated verdicts of a judge the last.

    A pair is identified by its texts, so that A against B and B against A are the same pair with
    the verdict reversed; or by `pair`, if a file has ids instead of texts.
    """
    verdicts: dict[tuple[str, str], Verdict] = {}
    for count, row in enumerate(read_lines(file), start=1):
        verdict = row.get("verdict")
        if verdict not in REVERSED:
            raise JudgeError(
                f"Verdict {count} of {file} is {verdict!r}. Write a, b or tie; leave out pairs "
                "that were not judged."
            )
        pair, reverse = _pair_id(row, file, count)
        judge = str(row.get("judge") or file.stem)
        verdicts[judge, pair] = REVERSED[verdict] if reverse else verdict
    return [(*key, verdict) for key, verdict in verdicts.items()]


def _pair_id(row: Mapping[str, Any], file: Path, count: int) -> tuple[str, bool]:
    if {"prompt", "response_a", "response_b"} <= row.keys():
        a, b = str(row["response_a"]), str(row["response_b"])
        return json.dumps([row["prompt"], *sorted((a, b))], sort_keys=True), a > b
    if "pair" in row:
        return str(row["pair"]), False
    raise JudgeError(
        f"Verdict {count} of {file} names no pair: it needs `prompt`, `response_a` and "
        "`response_b`, or `pair`."
    )


def win_rate_at_equal_length(
    wins: Sequence[float], lengths_a: Sequence[int], lengths_b: Sequence[int], *, seed: int = 0
) -> Interval:
    """A's win rate with the effect of length removed, with a bootstrap interval over pairs.

    `wins` has 1 where A won, 0 where B did and 0.5 for a tie:
    P(A wins) = sigmoid(theta + phi tanh(d / std(d))), d = length of A - length of B, and the
    result is sigmoid(theta).

    >>> wins = [1] * 6 + [0] * 2 + [1] + [0] * 3  # the longer one wins 3 of 4, on either side
    >>> rate = win_rate_at_equal_length(wins, [90] * 8 + [10] * 4, [10] * 8 + [90] * 4)
    >>> round(sum(wins) / 12, 2), round(rate.mean, 2)
    (0.58, 0.5)
    """
    if len(wins) < MIN_PAIRS:
        return NO_INTERVAL
    won = np.asarray(wins, dtype=np.float64)  # [N]
    difference = np.subtract(lengths_a, lengths_b).astype(np.float64)
    scale = difference.std()
    longer = np.tanh(difference / scale) if scale > 0 else np.zeros_like(difference)

    def at_equal_length(weights: Floats) -> Floats:  # [R, N] -> [R]
        theta = np.zeros(len(weights))
        phi = np.zeros(len(weights))
        for _ in range(STEPS):  # Newton's method on two coefficients per resample
            chance = _sigmoid(theta[:, None] + phi[:, None] * longer)
            error = weights * (won - chance)
            slope = error.sum(1) - RIDGE * theta, (error * longer).sum(1) - RIDGE * phi
            spread = weights * chance * (1 - chance)
            a = spread.sum(1) + RIDGE
            b = (spread * longer).sum(1)
            c = (spread * longer**2).sum(1) + RIDGE
            determinant = a * c - b * b
            # Steps are limited: far from the optimum the curvature is almost zero.
            theta += np.clip((c * slope[0] - b * slope[1]) / determinant, -2, 2)
            phi += np.clip((a * slope[1] - b * slope[0]) / determinant, -2, 2)
        return _sigmoid(theta)

    draws = min(1000, max(100, MAX_DRAWN // len(won)))
    if len(set(wins)) == 1:  # every resample would be the same, as if it were certain
        rate = float(at_equal_length(np.ones((1, len(won))))[0])
        return Interval(rate, math.nan, math.nan, len(won))
    return bootstrap([1] * len(won), at_equal_length, draws=draws, seed=seed)


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


Votes = dict[str, dict[str, str]]
"""The verdicts of each judge: judge -> pair -> verdict."""


@dataclass(frozen=True)
class PairOfJudges:
    """Two judges on the pairs that both judged."""

    one: str
    other: str
    pairs: int
    agreement: Interval
    kappa: Interval


@dataclass(frozen=True)
class JudgeAgreement:
    """Agreement of every two judges, and of all on the pairs that all judged."""

    judges: dict[str, int]
    """How many pairs each judged."""
    between: list[PairOfJudges]
    common: int
    fleiss: Interval | None
    """None with fewer than three judges, or if they share no pair."""


def agreement(paths: Sequence[Path | str], *, seed: int = 0) -> JudgeAgreement:
    """The agreement of the judges in some verdict files, or in `judged/` of run folders."""
    return compare(read_votes(paths), seed=seed)


def compare(votes: Votes, *, seed: int = 0) -> JudgeAgreement:
    """The agreement of judges, from their verdicts."""
    if len(votes) < 2:
        names = ", ".join(votes) or "nobody"
        raise JudgeError(f"Agreement needs two judges; there is {names}. Give more files.")
    between = []
    for one, other in combinations(votes, 2):
        shared = [pair for pair in votes[one] if pair in votes[other]]
        if shared:
            verdicts = [(votes[one][pair], votes[other][pair]) for pair in shared]
            same, total = sum(a == b for a, b in verdicts), len(verdicts)
            kappa = cohen_kappa(verdicts, seed=seed)
            between.append(PairOfJudges(one, other, total, wilson(same, total), kappa))
    if not between:
        raise JudgeError(
            "No two judges judged the same pair. Give verdicts on the same prompts and responses."
        )
    first = next(iter(votes.values()))
    common = [pair for pair in first if all(pair in own for own in votes.values())]
    rows = [[own[pair] for own in votes.values()] for pair in common]
    fleiss = fleiss_kappa(rows, seed=seed) if len(votes) > 2 and rows else None
    judges = {judge: len(own) for judge, own in votes.items()}
    return JudgeAgreement(judges, between, len(common), fleiss)


def cohen_kappa(verdicts: Sequence[tuple[str, str]], *, seed: int = 0) -> Interval:
    """Agreement of two judges beyond chance, with a bootstrap interval over pairs.

    (p - e) / (1 - e), where p is the share of equal verdicts and e the share expected by chance
    from how often each judge gives each verdict. NaN if both always give the same verdict.

    >>> verdicts = [("a", "a")] * 4 + [("b", "b")] * 3 + [("a", "b")] * 2 + [("b", "a")]
    >>> round(cohen_kappa(verdicts).mean, 3)
    0.4
    """
    counts = Counter(verdicts)
    cells = [counts[one, other] for one in VERDICTS for other in VERDICTS]

    def kappa(weights: Floats) -> Floats:  # [R, 9] -> [R]
        square = (weights / weights.sum(1, keepdims=True)).reshape(-1, 3, 3)
        observed = np.trace(square, axis1=1, axis2=2)
        chance = (square.sum(2) * square.sum(1)).sum(1)
        return _beyond_chance(observed, chance)

    return bootstrap(cells, kappa, seed=seed)


def fleiss_kappa(rows: Sequence[Sequence[str]], *, seed: int = 0) -> Interval:
    """Agreement of several judges beyond chance: one row per pair, one verdict per judge.

    >>> rows = [["a", "a", "a"], ["a", "a", "b"], ["b", "b", "b"], ["tie", "tie", "tie"]]
    >>> round(fleiss_kappa(rows).mean, 3)
    0.745
    """
    patterns = Counter(tuple(row.count(v) for v in VERDICTS) for row in map(list, rows))
    votes = np.array(list(patterns), dtype=np.float64)  # [K, 3]
    judges = votes[0].sum()
    within = ((votes**2).sum(1) - judges) / (judges * (judges - 1))  # [K]

    def kappa(weights: Floats) -> Floats:  # [R, K] -> [R]
        shares = weights / weights.sum(1, keepdims=True)
        chance = ((shares @ votes / judges) ** 2).sum(1)
        return _beyond_chance(shares @ within, chance)

    return bootstrap(list(patterns.values()), kappa, seed=seed)


def read_votes(paths: Sequence[Path | str]) -> Votes:
    """Verdicts by judge. If a judge has verdicts on a pair in two files, each file is a judge."""
    read = [(file, judge, p, v) for file in _files(paths) for judge, p, v in read_verdicts(file)]
    repeated = Counter((judge, pair) for _, judge, pair, _ in read)
    twice = {judge for (judge, _), count in repeated.items() if count > 1}
    votes: Votes = {}
    for file, judge, pair, verdict in read:
        name = f"{judge} ({file.stem})" if judge in twice else judge
        votes.setdefault(name, {})[pair] = verdict
    return votes


def describe_agreement(result: JudgeAgreement) -> list[str]:
    """The tables as lines of text."""
    rows = [
        [f"{b.one} | {b.other}", str(b.pairs), b.agreement.text(_percent), _shown(b.kappa)]
        for b in result.between
    ]
    header = ["judges", "pairs", "agreement in %", "Cohen's kappa"]
    lines = text_table(header, rows).split("\n")
    if result.fleiss is not None:
        shown = _shown(result.fleiss)
        lines.append(f"Fleiss' kappa of {len(result.judges)} on {result.common} pairs: {shown}")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _shown(kappa: Interval) -> str:
    if math.isnan(kappa.mean):
        return "undefined: all verdicts are the same"
    return kappa.text()


def _files(paths: Sequence[Path | str]) -> list[Path]:
    files: dict[Path, Path] = {}
    for path in map(Path, paths):
        folder = path / JUDGED if (path / JUDGED).is_dir() else path
        inside = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [path]
        if not inside:
            raise JudgeError(f"{path} has no verdicts. Run `marlhf judge` first.")
        files |= {file.resolve(): file for file in inside}
    return list(files.values())


def _beyond_chance(observed: Floats, chance: Floats) -> Floats:
    possible = 1 - chance
    defined = possible > 1e-12
    return np.where(defined, (observed - chance) / np.where(defined, possible, 1.0), np.nan)
