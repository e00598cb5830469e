"""Agreement of judges, and how much of it is chance: Cohen's and Fleiss' kappa."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from marlhf.evaluate.results import text_table
from marlhf.intervals import Floats, Interval, bootstrap, wilson
from marlhf.judge.pairs import JudgeError
from marlhf.judge.verdicts import VERDICTS, read_verdicts
from marlhf.runs.layout import JUDGED

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


def describe(result: JudgeAgreement) -> list[str]:
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
