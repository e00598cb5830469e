"""The paper's claims, each with what these runs say to it: holds, fails, or cannot be told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from evidence.results import (
    Method,
    Results,
    ahead_at,
    common_kl,
    speed,
    win_rate,
)
from marlhf.intervals import Interval, mean, paired_difference

CONTROLLED = ("n5-sum", "n5-mean", "n5-split", "n5-start", "n5-short", "ppo-weak", "ppo-horizon")
"""Macro actions, and PPO with what else they change: the KL penalty, and how far ahead it looks."""
BREAK = "<br>"
"""A new line in a cell of a Markdown table."""
SURE = {True: "holds", False: "does not hold", None: "cannot be told"}


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, a verdict, and the numbers behind it."""

    says: str
    verdict: str
    because: str

    @property
    def row(self) -> list[str]:
        return [self.says, self.verdict, self.because]


def sign(value: Interval, at: float = 0.0) -> bool | None:
    """Above or below for sure; None where the interval includes `at`, or there is none."""
    return True if value.low > at else False if value.high < at else None


def claims(results: Results) -> list[Claim]:
    have = {method.name: method for method in results.methods() if method.finished}
    base = have.get("ppo")
    if base is None:
        return []
    made = (_higher, _faster, _frontier, _objective, _weaker, _farther, _gold, _rules, _baselines)
    return [claim for make in made for claim in make(results, base, have)]


POOLED = {"n5-sum": "sum", "n5-mean": "mean"}
"""The paper's equation and its authors' code differ in pooling: a verdict for each."""


def _pooled(found: dict[str, bool | None], have: dict[str, Method], base: Method) -> str:
    """Whether a claim holds with either pooling, in as few words as are true."""
    told = {
        words: _told(SURE[found[name]], base, have[name])
        for name, words in POOLED.items()
        if name in found
    }
    if len(set(told.values())) == 1 and len(told) > 1:
        return next(iter(told.values()))
    return BREAK.join(f"{words}: {verdict}" for words, verdict in told.items())


def _told(verdict: str, *methods: Method) -> str:
    """A verdict that rests on one seed says so: intervals over prompts know nothing of seeds."""
    alone = verdict != SURE[None] and min(len(m.runs) for m in methods) < 2
    return f"{verdict}, in one seed" if alone else verdict


def _higher(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    found: dict[str, bool | None] = {}
    words: list[str] = []
    for name in POOLED:
        if name in have:
            ours, theirs = (results.by_prompt(m.answers, "reward") for m in (have[name], base))
            change = paired_difference(theirs, ours)
            found[name] = sign(change)
            words.append(f"{have[name].label}: {_range(change)}{_seeds(results, base, have[name])}")
    if not found:
        return []
    verdict = _pooled(found, have, base)
    because = f"test score over PPO's at the same beta, prompt by prompt:{BREAK}{BREAK.join(words)}"
    return [Claim("Macro actions end at a higher score than PPO", verdict, because)]


def _seeds(results: Results, base: Method, method: Method) -> str:
    ends = [
        [sum(results.scores(lines, "reward")) / len(lines) for lines in m.answers]
        for m in (base, method)
    ]
    if min(map(len, ends)) < 2:
        return " (one seed)"
    apart = max(map(min, ends)) > min(map(max, ends))
    return f" (seeds {'do not overlap' if apart else 'overlap'})"


def _faster(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    def told(method: Method) -> tuple[bool | None, str]:
        times = speed(base, method)
        return sign(times, 1.0), _times(times)

    says = "Macro actions reach PPO's final score 1.7 to 2 times as fast"
    because = "to nine tenths of its gain, fewer steps than PPO by a factor of:"
    return _controlled(says, because, told, base, have)


def _frontier(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    def told(method: Method) -> tuple[bool | None, str]:
        level = common_kl(base, method)
        ahead = ahead_at(base, method, level)
        return sign(ahead), f"{_range(ahead)} at KL {level:.1f}"

    says = "The gain is more than a weaker KL penalty: a higher score at equal KL"
    because = "validation score over PPO's where both first pass the KL:"
    return _controlled(says, because, told, base, have)


def _objective(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    """Ours: runs end at different KLs, and this is what says which end is better."""

    def told(method: Method) -> tuple[bool | None, str]:
        ours, theirs = (results.objective(m.answers) for m in (method, base))
        change = paired_difference(theirs, ours)
        return sign(change), _range(change)

    says = "(Ours) Macro actions end higher in what all are trained for, score \u2212 beta KL"
    because = "test prompts, over PPO's, with one beta for all:"
    return _controlled(says, because, told, base, have)


def _controlled(
    says: str,
    because: str,
    told: Callable[[Method], tuple[bool | None, str]],
    base: Method,
    have: dict[str, Method],
) -> list[Claim]:
    """A claim about macro actions, with the same number for what they are controlled by."""
    found = {name: told(have[name]) for name in CONTROLLED if name in have}
    if not set(POOLED) & set(found):
        return []
    words = BREAK.join(f"{have[name].label}: {number}" for name, (_, number) in found.items())
    verdict = _pooled({name: sure for name, (sure, _) in found.items()}, have, base)
    return [Claim(says, verdict, f"{because}{BREAK}{words}")]


def _weaker(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    """Ours, not the paper's: the algebra of pooling, and its control."""
    if not {"n5-mean", "ppo-weak"} <= set(have):
        return []
    says = "(Ours) Mean pooling does more than PPO with a fifth of beta does"
    return [_over(says, have["n5-mean"], have["ppo-weak"])]


def _farther(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    """Ours: a macro action discounts by lambda once, so that credit also reaches further back."""
    made: list[Claim] = []
    if {"n5-sum", "ppo-horizon"} <= set(have):
        says = "(Ours) n = 5 does more than PPO does with a lambda that reaches as far"
        made.append(_over(says, have["n5-sum"], have["ppo-horizon"]))
    if "n5-short" in have:
        says = "(Ours) n = 5 is above PPO where its lambda reaches no further than PPO's"
        made.append(_over(says, have["n5-short"], base))
    return made


def _over(says: str, method: Method, other: Method) -> Claim:
    """One method beside another at equal KL."""
    level = common_kl(method, other)
    ahead = ahead_at(other, method, level)
    where = f"{method.label} over {other.label} where both first pass KL {level:.1f}"
    verdict = _told(SURE[sign(ahead)], method, other)
    return Claim(says, verdict, f"{where}: {_range(ahead)}")


def _gold(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    made: list[Claim] = []
    for name in POOLED:
        if name not in have:
            continue
        pairs = product(have[name].answers, base.answers)  # each seed beside each
        rates = [win_rate([ours], theirs, "gold") for ours, theirs in pairs]
        share = Interval(*(mean([rate[i] for rate in rates]) for i in range(3)), size=len(rates))
        says = f"{have[name].label} is preferred to PPO by a judge that did not train it"
        because = f"win rate by the second reward model {share.text('{:.1%}'.format)}"
        verdict = _told(SURE[sign(share, 0.5)], have[name], base)
        made.append(Claim(says, verdict, because))
    return made


def _rules(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    made: list[Claim] = []
    if "n5-sum" not in have:
        return made
    for name in ("parsing", "perplexity"):
        if name in have:
            fixed, ours = (
                results.by_prompt(m.answers, "reward") for m in (have["n5-sum"], have[name])
            )
            change = paired_difference(ours, fixed)
            says = f"On TL;DR the fixed n-gram is above the {have[name].label}"
            because = f"test score of n = 5 over it: {_range(change)}"
            verdict = _told(SURE[sign(change)], have[name], have["n5-sum"])
            made.append(Claim(says, verdict, because))
    return made


def _baselines(results: Results, base: Method, have: dict[str, Method]) -> list[Claim]:
    made: list[Claim] = []
    for name in ("rloo", "dpo"):
        if name in have:
            ours, theirs = (results.by_prompt(m.answers, "reward") for m in (have[name], base))
            change = paired_difference(ours, theirs)
            because = f"test score of PPO over it: {_range(change)}"
            verdict = _told(SURE[sign(change)], have[name], base)
            made.append(Claim(f"{have[name].label} ends below PPO", verdict, because))
    return made


def _range(value: Interval) -> str:
    if math.isnan(value.mean):
        return "not measured"
    return value.text("{:+.2f}".format).replace("-", "\u2212")


def _times(value: Interval) -> str:
    return "does not reach it" if value.mean == 0 else value.text("{:.2f}".format)
