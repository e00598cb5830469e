"""What the numbers show and what they do not, in sentences written from the data.

A table of scores invites more belief than one seed of one reward model deserves. Every
sentence here is one a careful reader would add beside the table, and only where it applies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from markupsafe import Markup, escape

from marlhf.intervals import Interval, mean
from marlhf.report.answer import compared_with_baseline
from marlhf.report.groups import Group, differences, measured_alike, scored_by_functions, unlike
from marlhf.report.measures import (
    change,
    difference,
    fall_from_peak,
    final_score,
    length_effect,
    over_what,
    score_at_kl,
    scored,
    start_score,
    wins_since_start,
)
from marlhf.report.page import bold, num, part, percent, signed, warn
from marlhf.runs.read import Run, number

MIN_ACCURACY, MIN_PAIRS = 0.55, 30
"""Below these a reward model's verdicts say little."""
MAX_LENGTH_CORRELATION = 0.3
"""Above this a reward model's scores go by length."""

LAST_STEPS = 20
"""Steps at the end of a run over which what its critic explains is taken."""
NOTHING = 0.05
"""Explained variance up to which a critic knows nothing, as while training."""


def verdict(policies: list[Group], others: list[Group]) -> Markup:
    """The one sentence at the top. It never gives a score without its KL and length."""
    groups = scored(policies)
    if not groups:
        return _verdict_without_policy(others) if not policies else Markup()
    shown = groups
    if len(groups) > 3:  # a headline is short: the baseline and the best of the others
        rest = [group for group in groups[1:] if measured_alike(groups[0], group)] or groups[1:]
        shown = [groups[0], max(rest, key=lambda group: final_score(group).mean)]
    ends = Markup("; ").join(f"{g.label} ends at " + _score_words(g) for g in shown)
    start = start_score(groups[0]).mean
    from_where = f" The model before RL scores {num(start)}." if math.isfinite(start) else ""
    left = len(groups) - len(shown)
    more = f" {left} other settings are below." if left else ""
    scales = " They were not scored alike: see below." if unlike(groups) else ""
    return Markup("Held-out score: ") + ends + f".{from_where}{more}{scales}"


def _score_words(group: Group) -> Markup:
    measures = (("gold {}", "gold"), ("KL {}", "kl"), ("{} tokens", "length"))
    finals = [(words, group.final(f"eval/{key}")) for words, key in measures]
    beside = [words.format(num(value)) for words, value in finals if math.isfinite(value)]
    return bold(final_score(group).text(num)) + (f" ({', '.join(beside)})" if beside else "")


def _verdict_without_policy(others: list[Group]) -> Markup:
    ends: list[Markup] = []
    for group in others:
        for word in ("accuracy", "loss"):
            if math.isfinite(value := group.final(f"eval/{word}")):
                words = Markup("{} ends at held-out {} ").format(group.label, word)
                ends.append(words + bold(num(value)))
                break
    return Markup("; ").join(ends) + "." if ends else Markup()


def shows(policies: list[Group]) -> list[str]:
    """What the recorded numbers say, one sentence each."""
    sentences: list[str] = [*critics(policies)]
    for group in policies:
        said = _score_change(group), _length_gain(group), _gold_change(group), _hacking(group)
        sentences += filter(None, (*said, _little_to_learn(group)))
    in_answer = compared_with_baseline(policies)
    for group in policies[1:]:
        if measured_alike(policies[0], group):
            # The first lines of the page have the difference in score of these.
            sentences += _compare(policies[0], group, with_score=group not in in_answer)
    return sentences


def critics(policies: list[Group]) -> list[str]:
    """What the critics explained at the end of the runs, by thirds of a response."""
    sentences: list[str] = []
    for group in policies:
        curves = [group.curve(f"rl/explained_variance_{third}") for third in (1, 2, 3)]
        if not all(curves):
            continue
        ends = [statistics.median(p.mean for p in curve[-LAST_STEPS:]) for curve in curves]
        shown = " / ".join(map(num, ends))
        said = f"The critic of {group.label} explained {shown} of the returns in the first / "
        said += "second / last third of a response (1 is all, 0 nothing)"
        if max(ends) < NOTHING:
            sentences.append(
                warn("A critic that explains nothing:") + f" {said}. Conclusions about lambda and "
                "macro actions rest on it: pretrain it (critic_pretraining), or compare RLOO."
            )
        else:
            sentences.append(f"{said}.")
    return sentences


def shows_not(policies: list[Group], runs: list[Run]) -> list[str]:
    """What a reader might take from the page and should not."""
    sentences: list[str] = []
    if apart := unlike(policies):
        sentences.append(part("not_on_one_scale", apart))
    if policies:
        configs = [run.config for group in policies for run in group.runs]
        functions = list(dict.fromkeys(f for c in configs for f in c.get("reward_funcs") or ()))
        environments = list(
            dict.fromkeys(c["environment"] for c in configs if c.get("environment"))
        )
        sentences.append(
            part("scorer", functions, environments, is_learnt=not scored_by_functions(policies))
        )
        if all(not math.isfinite(final_score(group, "gold").mean) for group in policies):
            sentences.append(part("no_gold"))
        sentences.append(_seeds(policies))
    changed = [key for key, _ in differences(policies)]
    rest = [key for key in changed if key.split(".")[0] != "segmenter"]
    if rest and len(changed) > 1:
        sentences.append(part("more_differs", rest))
    starts = [start_score(group).mean for group in policies]
    starts = [start for start in starts if math.isfinite(start)]
    if starts and max(starts) - min(starts) > 0.05 * max(1.0, abs(starts[0])):
        sentences.append(part("other_starts"))
    for run in runs:
        is_over = run.status in ("finished", "unknown") and not run.is_empty
        if run.note or run.problems or not is_over:
            sentences.append(part("incomplete", run, is_over))
    return sentences


def _score_change(group: Group) -> str:
    moved = change(group)
    if not math.isfinite(moved.mean):
        return ""
    rate = wins_since_start(group)
    wins = f"; win rate {percent(rate)} against its start" if math.isfinite(rate) else ""
    return bold(group.label) + f" changed the score by {_sure(moved, group)}{wins}."


def _length_gain(group: Group) -> str:
    """The share of the gain in score that length explains, and the score without it."""
    gain, effect = change(group).mean, length_effect(group)
    if not (math.isfinite(effect) and gain > 0):
        return ""
    share, controlled = effect / gain, num(final_score(group).mean - effect)
    said = f"{percent(share)} of the gain in score of {group.label}"
    said += f"; at the length that it began with it would score {controlled}."
    if share > 0.5:
        return warn("Longer rather than better:") + f" length explains {said}"
    return f"Length explains {said}"


def _sure(value: Interval, group: Group, form: Callable[[float], str] = signed) -> str:
    """A change, what its interval is over, and whether that includes zero."""
    if not math.isfinite(value.low):
        return form(value.mean)
    includes = "; it includes zero" if value.low <= 0 <= value.high else ""
    return f"{value.text(form)} (95% interval over {over_what(group)}{includes})"


def _gold_change(group: Group) -> str:
    """Whether the true score followed the learnt one. A warning needs an interval."""
    score, gold = change(group), change(group, "gold")
    if not (math.isfinite(gold.mean) and math.isfinite(score.mean)):
        return ""
    if score.mean > 0 and gold.high < 0:
        fall = Interval(-gold.mean, -gold.high, -gold.low, gold.size)
        return warn("Over-optimisation:") + (
            f" {group.label} raised the learnt score while the true (gold) score fell by "
            f"{_sure(fall, group, num)}."
        )
    changed = f"the true (gold) score of {group.label} changed by {_sure(gold, group)}."
    peak, drop = fall_from_peak(group, "gold")
    if drop.mean > 0:
        changed += f" It peaked at {num(peak.mean)} in step {peak.step} and ended "
        changed += f"{drop.text(num)} lower"
        if score.mean > 0 and drop.low > 0:
            return warn("Over-optimisation sets in:") + f" {changed}."
        without = "there is no interval" if math.isnan(drop.low) else "the interval includes zero"
        changed += f"; {without}."
    return "T" + changed[1:]


def _hacking(group: Group) -> str:
    """Longer, much shorter, repetitive or cut-off responses: what gaming a score looks like.

    Length is known of each prompt: where the interval of its change includes zero, it is no sign.
    """
    signs: list[str] = []
    before, now = _ends(group, "eval/length")
    grew, moved = now > 1.25 * before > 0, change(group, "length")
    if (grew or 0 < now < before / 2) and not moved.low <= 0 <= moved.high:
        verb = "grew" if grew else "shrank"
        signs.append(f"responses {verb} from {num(before)} to {num(now)} tokens")
    before, now = _ends(group, "eval/repetition")
    if now - before > 0.05:
        signs.append(f"repetition rose from {percent(before)} to {percent(now)}")
    before, now = _ends(group, "eval/ended")
    if before - now > 0.05:
        signs.append(f"the share of responses that end with EOS fell to {percent(now)}")
    if signs:
        return warn("Look twice") + f" at {group.label}: {', '.join(signs)}. Read its samples."
    ended = group.final("eval/ended")
    return f"In {group.label} only {percent(ended)} of responses end." if ended < 0.8 else ""


def _ends(group: Group, key: str) -> tuple[float, float]:
    """The first and the last value; NaN where there are not two."""
    values = [point.mean for point in group.curve(key)]
    return (values[0], values[-1]) if len(values) > 1 else (math.nan, math.nan)


def _little_to_learn(group: Group) -> str:
    """Whether most groups of responses scored alike, on average over the run."""
    shares = [point.mean for point in group.curve("rl/zero_std_groups")]
    share = mean(shares)
    if not share > 0.5:
        return ""
    return warn("Little to learn from:") + (
        f" in {group.label} all responses to {percent(share)} of the prompts had the same score."
    )


def reward_health(others: list[Group]) -> list[Markup]:
    """How well reward models tell held-out pairs apart: nothing below is better than they are."""
    lines: list[Markup] = []
    for group in others:
        accuracy = group.final("eval/accuracy")
        if group.stage != "reward" or not math.isfinite(accuracy):
            continue
        rows = [number((run.about.get("rows") or {}).get("held-out")) for run in group.runs]
        pairs = min(filter(math.isfinite, rows), default=math.nan)
        of = f"{pairs:.0f} held-out pairs" if math.isfinite(pairs) else "held-out pairs"
        faults: list[tuple[str, str]] = []
        if accuracy < MIN_ACCURACY:
            advice = "Scores by it mean little: give it more, or better, preferences."
            faults.append(("hardly better than chance", advice))
        if pairs < MIN_PAIRS:
            faults.append(("too few pairs to tell", "Hold out more (data.eval_size)."))
        length = group.final("eval/length_correlation")
        if abs(length) > MAX_LENGTH_CORRELATION:
            advice = "A policy gains by length alone: train the reward model with length_head."
            faults.append((f"scores follow length (correlation {num(length, 2)})", advice))
        words = f" {group.label} ranks {percent(accuracy)} of {of} correctly"
        short = group.final("eval/accuracy_short")
        words += f", {percent(short)} where the shorter one won" if math.isfinite(short) else ""
        words += f": {' and '.join(fault for fault, _ in faults)}" if faults else ""
        words += "".join([".", *(f" {advice}" for _, advice in faults)])
        lines.append((warn if faults else escape)("Reward model:") + words)
    return lines


def _compare(base: Group, group: Group, *, with_score: bool) -> list[str]:
    sentences: list[str] = []
    if with_score:
        ahead = difference(base, group).text(signed)
        sentences.append(bold(group.label) + f" over {base.label}: {ahead} in score.")
    kl, base_kl = group.final("eval/kl"), base.final("eval/kl")
    if not (math.isfinite(kl) and math.isfinite(base_kl)):
        return sentences
    level = min(kl, base_kl)
    at = [score_at_kl(each, level) for each in (group, base)]
    return [*sentences, part("kl_spent", group.label, base.label, kl, base_kl, level, *at)]


def _seeds(policies: list[Group]) -> Markup:
    seeds = [group.num_seeds for group in policies]
    ends = [group.finals("eval/score") for group in policies]
    overlap = None
    if len(policies) == 2 and all(ends):
        overlap = max(map(min, ends)) <= min(map(max, ends))
    return part("seeds", min(seeds), max(seeds), overlap)
