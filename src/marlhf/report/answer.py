"""The first lines of the page: which setting is better, by what, and how sure that is.

A score that was trained on flatters whoever optimised it hardest. So the true score or an
independent judge comes first where there is one, then the score at equal KL, then the score itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marlhf.evaluate.held_out import read_scored, scores_of
from marlhf.intervals import Curve, Floats, Interval, difference_over_seeds, few_seeds, wilson
from marlhf.report.comparison import Comparison, at_kl, common_kl
from marlhf.report.groups import Group, groups_by_name, measured_alike, scored_by_functions
from marlhf.report.measures import change, difference, final_score, over_what, wins_over
from marlhf.report.page import num, percent, signed, text
from marlhf.report.sections.judged import read_summaries

MAX_COMPARED = 3
"""Up to this many settings each is compared with the first; of more, only the best."""
INDEPENDENT = ("openai", "model", "person")
"""Kinds of judges that know nothing of the reward."""


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

    def sentence(self, name: str, other: str) -> str:
        """The whole answer by this criterion, for the first line."""
        words = {
            "better": f"{name} is better than {other}",
            "worse": f"{name} is worse than {other}",
            "unclear": f"{name} is not clearly better or worse than {other}",
        }
        verb = "higher" if self.value.mean > self.even else "lower"
        claim = words.get(self.outcome, f"{name} is {verb} than {other}")
        return f"<b>{claim}</b> by {self.name}: {self.shown}{self._caution}."

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


def answer(policies: Sequence[Group]) -> str:
    """Every other setting against the first one; a single setting against the model before RL."""
    scored = [group for group in policies if math.isfinite(final_score(group).mean)]
    if len(scored) == 1:
        name = text(scored[0].label)
        blocks = [_block(_since_start(scored[0]), name, "the model before RL")]
    else:
        scored = [*scored[:1], *comparable(policies)]
        blocks = [
            _block(criteria_between(scored[0], group), text(group.label), text(scored[0].label))
            for group in scored[1:]
        ]
    if not any(blocks):
        return ""
    note = f"Differences are paired by prompt, {_intervals_over(scored)}"
    return f'{"".join(blocks)}<p class="note">{note}</p>'


def comparable(policies: Sequence[Group]) -> list[Group]:
    """The settings that the first lines set against the first: all of a few, the best of many."""
    scored = [group for group in policies if math.isfinite(final_score(group).mean)]
    alike = [group for group in scored[1:] if measured_alike(scored[0], group)]
    if len(alike) < MAX_COMPARED:
        return alike
    return [max(alike, key=lambda group: final_score(group).mean)]


def _block(criteria: Sequence[Criterion], name: str, other: str) -> str:
    if not criteria:
        return ""
    first, *rest = criteria
    items = "".join(f"<li>{each.item()}</li>" for each in rest)
    return f"<p>{first.sentence(name, other)}</p>" + (f"<ul>{items}</ul>" if items else "")


def _intervals_over(groups: Sequence[Group]) -> str:
    over = over_what(groups[0])
    if not over:
        return "where prompts were recorded."
    warning = few_seeds(min(group.num_seeds for group in groups))
    return f"with 95% intervals over {over}. {warning}".rstrip()


def criteria_between(base: Group, group: Group) -> list[Criterion]:
    """All there is to compare two settings by, the most trustworthy first."""
    criteria: list[Criterion] = []
    gold = difference(base, group, "gold")
    if math.isfinite(gold.mean):
        criteria.append(Criterion("the true (gold) score", gold, gold.text(signed)))
    criteria += _by_judges(base, group)
    criteria += _by_other_reward_models(base, group, skip_gold=bool(criteria))
    criteria += _at_equal_kl(base, group)
    score = difference(base, group)
    shown = score.text(signed) + _wins(base, group) + _costs(base, group)
    return [*criteria, Criterion(_score_name(group), score, shown)]


def _since_start(group: Group) -> list[Criterion]:
    criteria: list[Criterion] = []
    for name, field in (("the true (gold) score", "gold"), (_score_name(group), "score")):
        value = change(group, field)
        if math.isfinite(value.mean):
            criteria.append(Criterion(name, value, value.text(signed)))
    return criteria


def _wins(base: Group, group: Group) -> str:
    rate = wins_over(base, group)
    return f", win rate {percent(rate)}" if math.isfinite(rate) else ""


def _costs(base: Group, group: Group) -> str:
    """KL and length beside a score: both can buy it."""
    pairs = [(group.final(f"eval/{key}"), base.final(f"eval/{key}")) for key in ("kl", "length")]
    words = ("at KL {} against {}", "{} against {} tokens")
    shown = [w.format(num(a), num(b)) for w, (a, b) in zip(words, pairs) if math.isfinite(a + b)]
    return f" ({', '.join(shown)})" if shown else ""


def _at_equal_kl(base: Group, group: Group) -> list[Criterion]:
    compared = Comparison([base, group])
    level = common_kl(compared.measured)
    if level <= 1e-3:
        return []

    def ahead(curves: list[Curve]) -> list[Floats]:
        theirs, own = (at_kl(curve, level) for curve in curves)
        return [own - theirs]

    (value,) = compared.intervals(ahead)
    if not math.isfinite(value.mean):
        return []
    name = f"{_score_name(group)} at equal KL ({num(level)})"
    return [Criterion(name, value, value.text(signed))]


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
            criteria.append(Criterion(f"the judge {text(summary['judge'])}", rate, shown, even=0.5))
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
    sampling = min(shared)
    lines = [[by_sampling[sampling] for by_sampling in seeds] for seeds in files]
    prompts = [{line["key"] for line in each} for each in lines[0] + lines[1]]
    keys = set.intersection(*prompts)
    rewards = _rewards(base) | _rewards(group)
    criteria: list[Criterion] = []
    for judge in dict.fromkeys(judge for line in lines[0][0] for judge in line["scores"]):
        is_trained_on = any(reward.endswith(judge) for reward in rewards)
        if is_trained_on or (skip_gold and judge.startswith("gold")):
            continue
        rows = [[_paired_scores(each, judge, keys) for each in seeds] for seeds in lines]
        value = difference_over_seeds(*rows)
        if math.isfinite(value.mean):
            name = f"{text(judge)}, which was not trained on"
            criteria.append(Criterion(name, value, value.text(signed)))
    return criteria


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
