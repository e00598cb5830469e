"""The answer of the page, what the numbers show and what they do not, written from the data.

The first lines say which setting is better, by what, and how sure that is. A score that was trained
on flatters whoever optimised it hardest. So the true score or an independent judge comes first
where there is one, then the score at equal KL, then the score itself.

A table of scores invites more belief than one seed of one reward model deserves. Every
sentence here is one a careful reader would add beside the table, and only where it applies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from marlhf.evaluate.results import read_scored, scores_of
from marlhf.intervals import Curve, Floats, Interval, difference_over_seeds, few_seeds, mean, wilson
from marlhf.report import measures
from marlhf.report.groups import (
    Group,
    differences,
    groups_by_name,
    measured_alike,
    scored_by_functions,
    unlike,
)
from marlhf.report.numbers import num, percent, signed
from marlhf.report.page import part
from marlhf.report.sections.judged import read_summaries
from marlhf.runs.read import Run, number

MAX_COMPARED = 3
"""Up to this many groups each is compared with the baseline; of more, only the best."""
INDEPENDENT = ("openai", "model", "person")
"""Kinds of judges that know nothing of the reward."""
GOLD = "the true (gold) score"
LAST_STEPS = 20
"""Steps at the end of a run over which what its critic explains is taken."""


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


def answer(policies: Sequence[Group]) -> Markup:
    """Every other group against its baseline; a single group against the model before RL."""
    groups = measures.scored(policies)
    families = [[family[0], *_in_answer(family[1:])] for family in _families(groups)]
    pairs = [(base, each) for base, *others in families for each in others]
    compared = [(criteria_between(base, each), each.label, base.label) for base, each in pairs]
    if len(groups) == 1:
        compared = [(_since_start(groups[0]), groups[0].label, "the model before RL")]
    else:
        groups = [group for family in families if len(family) > 1 for group in family]
    fewest = min((group.num_seeds for group in groups), default=0)
    # One seed does not tell how another training would end.
    where = ("In this run" if len(groups) == 1 else "In these runs") if fewest == 1 else ""
    blocks = [each for each in compared if each[0]]
    if not blocks:
        return Markup()
    changes = _changes(groups) if len(groups) > 1 else []
    return part("answers", changes, blocks, where, measures.over_what(groups[0]), few_seeds(fewest))


def _families(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups whose scores are on one scale, each family with its baseline first."""
    families: dict[int, list[Group]] = {}
    for group in groups:
        first = next(i for i, other in enumerate(groups) if measured_alike(other, group))
        families.setdefault(first, []).append(group)
    return [*families.values()]


def _in_answer(others: list[Group]) -> list[Group]:
    """Those that the first lines compare with the baseline: all of a few, the best of many."""
    if len(others) < MAX_COMPARED:
        return others
    return [max(others, key=lambda group: measures.final_score(group).mean)]


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


def criteria_between(base: Group, group: Group) -> list[Criterion]:
    """All there is to compare two groups by, the most trustworthy first."""
    gold = measures.difference(base, group, "gold")
    criteria = _known([(GOLD, gold)]) + _by_judges(base, group)
    criteria += _by_other_reward_models(base, group, skip_gold=bool(criteria))
    criteria += _at_equal_kl(base, group)
    score = measures.difference(base, group)
    rate = measures.wins_over(base, group)
    wins = f", win rate {percent(rate)}" if math.isfinite(rate) else ""
    shown = score.text(signed) + wins + _costs(base, group)
    return [*criteria, Criterion(_score_name(group), score, shown)]


def _since_start(group: Group) -> list[Criterion]:
    return _known(
        [(GOLD, measures.change(group, "gold")), (_score_name(group), measures.change(group))]
    )


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
    compared = measures.CurveComparison([base, group])
    level = measures.common_kl(compared.measured)
    if level <= 1e-3:
        return []

    def ahead(curves: list[Curve]) -> list[Floats]:
        theirs, own = (measures.at_kl(curve, level) for curve in curves)
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
    """Paths of the reward models and functions that a setting was trained on, and environments."""
    rewards: set[str] = set()
    for run in group.runs:
        path = str(run.config.get("reward_model") or "").rstrip("/").removesuffix("/model")
        played = "environment" if run.config.get("environment") else ""
        rewards |= {path, played, *map(str, run.config.get("reward_funcs") or ())} - {""}
    return rewards


def verdict(policies: list[Group], others: list[Group]) -> Markup:
    """The one sentence at the top. It never gives a score without its KL and length."""
    groups = measures.scored(policies)
    if not groups:
        return _verdict_without_policy(others) if not policies else Markup()
    shown = groups
    if len(groups) > 3:  # a headline is short: the baseline and the best of the others
        rest = [group for group in groups[1:] if measured_alike(groups[0], group)] or groups[1:]
        shown = [groups[0], max(rest, key=lambda group: measures.final_score(group).mean)]
    start = measures.start_score(groups[0]).mean
    ends = [(group, measures.final_score(group)) for group in shown]
    return part("ends", ends, start, len(groups) - len(shown), apart=bool(unlike(groups)))


def _verdict_without_policy(others: list[Group]) -> Markup:
    ends = {
        group.label: (word, value)
        for group in others
        for word in ("loss", "accuracy")  # the latter where both are known
        if math.isfinite(value := group.final(f"eval/{word}"))
    }
    return part("ends_without_policy", ends)


def shows(policies: list[Group]) -> list[str]:
    """What the recorded numbers say, one sentence each."""
    sentences: list[str] = [*critics(policies)]
    for group in policies:
        moved, over = measures.change(group), measures.over_what(group)
        alike = [point.mean for point in group.curve("rl/zero_std_groups")]
        score, effect = measures.final_score(group).mean, measures.length_effect(group)
        sentences += [
            part("score_change", group.label, moved, over, measures.wins_since_start(group)),
            part("length_gain", group.label, moved.mean, effect, score),
            _gold_change(group),
            _hacking(group),
            part("little_to_learn", group.label, mean(alike)),
        ]
    for family in _families(measures.scored(policies)):
        in_answer = _in_answer(family[1:])
        for group in family[1:]:
            # The first lines of the page have the difference in score of these.
            sentences += _compare(family[0], group, with_score=group not in in_answer)
    return [sentence for sentence in sentences if sentence]


def critics(policies: list[Group]) -> list[str]:
    """What the critics explained at the end of the runs, by thirds of a response."""
    sentences: list[str] = []
    for group in policies:
        curves = [group.curve(f"rl/explained_variance_{third}") for third in (1, 2, 3)]
        if all(curves):
            ends = [statistics.median(p.mean for p in curve[-LAST_STEPS:]) for curve in curves]
            sentences.append(part("critic", group.label, ends))
    return sentences


def shows_not(policies: list[Group], runs: list[Run]) -> list[str]:
    """What a reader might take from the page and should not."""
    sentences: list[str] = []
    if apart := unlike(policies):
        sentences.append(part("not_on_one_scale", apart))
    if policies:
        configs = [run.config for group in policies for run in group.runs]
        functions = list(dict.fromkeys(f for c in configs for f in c.get("reward_funcs") or ()))
        environments = list(dict.fromkeys(filter(None, (c.get("environment") for c in configs))))
        is_learnt = not scored_by_functions(policies)
        sentences.append(part("scorer", functions, environments, is_learnt))
        if all(not math.isfinite(measures.final_score(group, "gold").mean) for group in policies):
            sentences.append(part("no_gold"))
        sentences.append(_seeds(policies))
    changed = [key for key, _ in differences(policies)]
    rest = [key for key in changed if key.split(".")[0] != "segmenter"]
    if rest and len(changed) > 1:
        sentences.append(part("more_differs", rest))
    starts = [measures.start_score(group).mean for group in policies]
    starts = [start for start in starts if math.isfinite(start)]
    if starts and max(starts) - min(starts) > 0.05 * max(1.0, abs(starts[0])):
        sentences.append(part("other_starts"))
    for run in runs:
        is_over = run.status in ("finished", "unknown") and not run.is_empty
        if run.note or run.problems or not is_over:
            sentences.append(part("incomplete", run, is_over))
    return sentences


def _gold_change(group: Group) -> str:
    """Whether the true score followed the learnt one. A warning needs an interval."""
    score, gold = measures.change(group), measures.change(group, "gold")
    if not (math.isfinite(gold.mean) and math.isfinite(score.mean)):
        return ""
    fall = Interval(-gold.mean, -gold.high, -gold.low, gold.size)
    peak, drop = measures.fall_from_peak(group, "gold")
    return part(
        "gold_change", group.label, score, gold, fall, peak, drop, measures.over_what(group)
    )


def _hacking(group: Group) -> str:
    """Longer, much shorter, repetitive or cut-off responses: what gaming a score looks like.

    Length is known of each prompt: where the interval of its change includes zero, it is no sign.
    """
    ends = [_ends(group, f"eval/{key}") for key in ("length", "repetition", "ended")]
    return part(
        "hacking", group.label, *ends, measures.change(group, "length"), group.final("eval/ended")
    )


def _ends(group: Group, key: str) -> tuple[float, float]:
    """The first and the last value; NaN where there are not two."""
    values = [point.mean for point in group.curve(key)]
    return (values[0], values[-1]) if len(values) > 1 else (math.nan, math.nan)


def reward_health(others: list[Group]) -> list[Markup]:
    """How well reward models tell held-out pairs apart: nothing below is better than they are."""
    lines: list[Markup] = []
    for group in others:
        accuracy = group.final("eval/accuracy")
        if group.stage == "reward" and math.isfinite(accuracy):
            rows = [number((run.about.get("rows") or {}).get("held-out")) for run in group.runs]
            pairs = min(filter(math.isfinite, rows), default=math.nan)
            more = [group.final(f"eval/{key}") for key in ("accuracy_short", "length_correlation")]
            lines.append(part("reward_health", group.label, accuracy, pairs, *more))
    return lines


def _compare(base: Group, group: Group, *, with_score: bool) -> list[str]:
    names = group.label, base.label
    sentences: list[str] = []
    if with_score:
        sentences.append(part("ahead", *names, measures.difference(base, group)))
    kl, base_kl = group.final("eval/kl"), base.final("eval/kl")
    if math.isfinite(kl) and math.isfinite(base_kl):
        level = min(kl, base_kl)
        at = [measures.score_at_kl(each, level) for each in (group, base)]
        sentences.append(part("kl_spent", *names, kl, base_kl, level, *at))
    return sentences


def _seeds(policies: list[Group]) -> Markup:
    seeds = [group.num_seeds for group in policies]
    ends = [group.finals("eval/score") for group in policies]
    overlap = None
    if len(policies) == 2 and all(ends):
        overlap = max(map(min, ends)) <= min(map(max, ends))
    return part("seeds", min(seeds), max(seeds), overlap)
