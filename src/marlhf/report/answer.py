"""The first lines of the page: which setting is better, by what, and how sure that is.

A score that was trained on flatters whoever optimised it hardest. So the true score or an
independent judge comes first where there is one, then the score at equal KL, then the score itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from marlhf.evaluate.results import read_scored, scores_of
from marlhf.intervals import Curve, Floats, Interval, difference_over_seeds, few_seeds, wilson
from marlhf.report.groups import Group, groups_by_name, measured_alike, scored_by_functions
from marlhf.report.measures import (
    CurveComparison,
    at_kl,
    change,
    common_kl,
    difference,
    final_score,
    over_what,
    scored,
    wins_over,
)
from marlhf.report.page import bold, num, part, percent, signed
from marlhf.report.sections.judged import read_summaries

MAX_COMPARED = 3
"""Up to this many groups each is compared with the baseline; of more, only the best."""
INDEPENDENT = ("openai", "model", "person")
"""Kinds of judges that know nothing of the reward."""
GOLD = "the true (gold) score"


@dataclass(frozen=True)
class Criterion:
    """One number by which a setting is compared with another, or with the model before RL."""

    name: str
    value: Interval
    shown: str
    even: float = 0.0
    """The value that favours neither."""

    @property
    def outcome(self) -> str:
        if self.value.low > self.even:
            return "better"
        if self.value.high < self.even:
            return "worse"
        return "unclear" if math.isfinite(self.value.low) else ""

    @property
    def is_higher(self) -> bool:
        """Whether the interval is above `even`; the mean, where there is no interval."""
        return self.outcome == "better" or (not self.outcome and self.value.mean > self.even)

    def sentence(self, name: str, other: str, where: str) -> Markup:
        """The whole answer by this criterion; with `where`, as no more than what happened there."""
        is_, is_not = ("ended", "did not end") if where else ("is", "is not")
        words = {"unclear": f"{is_not} clearly better or worse"}
        words[""] = f"{is_} {'higher' if self.is_higher else 'lower'}"
        claim = f"{name} {words.get(self.outcome, f'{is_} {self.outcome}')} than {other}"
        claim = f"{where}, {claim}" if where else claim
        return bold(claim) + f" by {self.name}: {self.shown}{self._caution}."

    def item(self) -> str:
        """The same in short, for the lines below."""
        words = {"better": "better, ", "worse": "worse, ", "unclear": "no clear difference, "}
        name = self.name[0].upper() + self.name[1:]
        return f"{name}: {words.get(self.outcome, '')}{self.shown}{self._caution}."

    @property
    def _caution(self) -> str:
        if self.outcome == "unclear":
            even = "zero" if self.even == 0 else percent(self.even)
            return f"; the 95% interval includes {even}"
        return "" if self.outcome else "; only means were recorded, so there is no interval"


def answer(policies: Sequence[Group]) -> Markup:
    """Every other group against the baseline; a single group against the model before RL."""
    groups = scored(policies)
    if len(groups) == 1:
        compared = [(_since_start(groups[0]), groups[0].label, "the model before RL")]
    else:
        groups = [*groups[:1], *compared_with_baseline(policies)]
        compared = [
            (criteria_between(groups[0], each), each.label, groups[0].label) for each in groups[1:]
        ]
    where, fewest = "", min((group.num_seeds for group in groups), default=0)
    if fewest == 1:  # one seed does not tell how another training would end
        where = "In this run" if len(groups) == 1 else "In these runs"
    blocks = [
        (first.sentence(name, other, where), [criterion.item() for criterion in rest])
        for (first, *rest), name, other in (each for each in compared if each[0])
    ]
    if not blocks:
        return Markup()
    changes = _changes(groups) if len(groups) > 1 else []
    return part("answers", changes, blocks, over_what(groups[0]), few_seeds(fewest))


def _changes(groups: Sequence[Group]) -> list[tuple[Sequence[str], ...]]:
    """Who raised the true score over the start and who did not; then the same by the learnt score.

    Who is ahead says little where nobody improved.
    """
    sides: dict[str, tuple[list[str], list[str]]] = {}
    for group in groups:
        for each in _since_start(group):
            raised, others = sides.setdefault(each.name, ([], []))
            (raised if each.is_higher else others).append(group.label)
    together: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, both in sorted(sides.items(), key=lambda side: side[0] != GOLD):
        together.setdefault(tuple(map(tuple, both)), []).append(name)
    return [(names, raised, others) for (raised, others), names in together.items()]


def compared_with_baseline(policies: Sequence[Group]) -> list[Group]:
    """The groups that the first lines compare with the baseline: all of a few, the best of many."""
    groups = scored(policies)
    alike = [group for group in groups[1:] if measured_alike(groups[0], group)]
    if len(alike) < MAX_COMPARED:
        return alike
    return [max(alike, key=lambda group: final_score(group).mean)]


def criteria_between(base: Group, group: Group) -> list[Criterion]:
    """All there is to compare two groups by, the most trustworthy first."""
    gold = difference(base, group, "gold")
    criteria = _known([(GOLD, gold)]) + _by_judges(base, group)
    criteria += _by_other_reward_models(base, group, skip_gold=bool(criteria))
    criteria += _at_equal_kl(base, group)
    score = difference(base, group)
    rate = wins_over(base, group)
    wins = f", win rate {percent(rate)}" if math.isfinite(rate) else ""
    shown = score.text(signed) + wins + _costs(base, group)
    return [*criteria, Criterion(_score_name(group), score, shown)]


def _since_start(group: Group) -> list[Criterion]:
    return _known([(GOLD, change(group, "gold")), (_score_name(group), change(group))])


def _known(values: Sequence[tuple[str, Interval]]) -> list[Criterion]:
    """Criteria for the numbers that were recorded."""
    return [
        Criterion(name, value, value.text(signed))
        for name, value in values
        if math.isfinite(value.mean)
    ]


def _costs(base: Group, group: Group) -> str:
    """KL and length beside a score: both can buy it."""
    pairs = [(group.final(f"eval/{key}"), base.final(f"eval/{key}")) for key in ("kl", "length")]
    words = ("at KL {} against {}", "{} against {} tokens")
    shown = [w.format(num(a), num(b)) for w, (a, b) in zip(words, pairs) if math.isfinite(a + b)]
    return f" ({', '.join(shown)})" if shown else ""


def _at_equal_kl(base: Group, group: Group) -> list[Criterion]:
    compared = CurveComparison([base, group])
    level = common_kl(compared.measured)
    if level <= 1e-3:
        return []

    def ahead(curves: list[Curve]) -> list[Floats]:
        theirs, own = (at_kl(curve, level) for curve in curves)
        return [own - theirs]

    return _known(
        [(f"{_score_name(group)} at equal KL ({num(level)})", compared.intervals(ahead)[0])]
    )


def _score_name(group: Group) -> str:
    return "the score" if scored_by_functions([group]) else "the learnt score"


def _by_judges(base: Group, group: Group) -> list[Criterion]:
    """Win rates by people and language models that compared the two."""
    names = groups_by_name([base, group])
    criteria: list[Criterion] = []
    for summary in read_summaries([*base.runs, *group.runs]):
        sides = names.get(str(summary["a"])), names.get(str(summary["b"]))
        if sides in ((group, base), (base, group)) and _is_independent(str(summary["judge"])):
            won = summary["win" if sides[0] is group else "loss"]["share"]
            wins = (won + summary["tie"]["share"] / 2) * summary["pairs"]
            rate = wilson(wins, summary["pairs"])
            shown = f"win rate {rate.text(percent)} of {summary['pairs']} pairs, ties count half"
            criteria.append(Criterion(f"the judge {summary['judge']}", rate, shown, even=0.5))
    return criteria


def _is_independent(judge: str) -> bool:
    return judge.partition(":")[0] in INDEPENDENT or judge.startswith("most of")


def _by_other_reward_models(base: Group, group: Group, *, skip_gold: bool) -> list[Criterion]:
    """Scores of `marlhf evaluate` by reward models that neither setting was trained on."""
    files = [
        [{file.label: file.lines for file in read_scored(run.path)} for run in each.runs]
        for each in (base, group)
    ]
    shared = set.intersection(*(set(by_sampling) for by_sampling in files[0] + files[1]))
    if not shared:
        return []
    lines = [[by_sampling[min(shared)] for by_sampling in seeds] for seeds in files]
    keys = set.intersection(*({line["key"] for line in each} for each in lines[0] + lines[1]))
    rewards = _rewards(base) | _rewards(group)
    differences: list[tuple[str, Interval]] = []
    for judge in dict.fromkeys(judge for line in lines[0][0] for judge in line["scores"]):
        is_trained_on = any(reward.endswith(judge) for reward in rewards)
        if not is_trained_on and not (skip_gold and judge.startswith("gold")):
            rows = [[_paired_scores(each, judge, keys) for each in seeds] for seeds in lines]
            differences.append((f"{judge}, which was not trained on", difference_over_seeds(*rows)))
    return _known(differences)


def _paired_scores(lines: Sequence[dict[str, Any]], judge: str, keys: set[str]) -> list[float]:
    by_key = {line["key"]: line for line in lines}
    return scores_of([by_key[key] for key in sorted(keys)], judge)


def _rewards(group: Group) -> set[str]:
    """Paths of the reward models and functions that a setting was trained on."""
    rewards: set[str] = set()
    for run in group.runs:
        path = str(run.config.get("reward_model") or "").rstrip("/").removesuffix("/model")
        rewards |= {path, *map(str, run.config.get("reward_funcs") or ())} - {""}
    return rewards
