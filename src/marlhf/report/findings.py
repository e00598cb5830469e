"""What the numbers show and what they do not, in sentences written from the data.

A table of scores invites more belief than one seed of one reward model deserves. Every
sentence here is one a careful reader would add beside the table, and only where it applies.
"""

from __future__ import annotations

import math

import numpy as np

from marlhf import intervals
from marlhf.intervals import Interval, mean_over_seeds, paired_difference, share_improved
from marlhf.report.groups import Group, differences, measured_alike, same_prompts, unlike
from marlhf.report.page import num, percent, signed, text
from marlhf.runs.read import Run


def final_score(group: Group, field: str = "score") -> Interval:
    """The last evaluation, with its interval over prompts and, where there are some, seeds."""
    rows = group.per_seed("scores" if field == "score" else field)
    return mean_over_seeds(rows or [[value] for value in group.finals(f"eval/{field}")])


def start_score(group: Group, field: str = "score") -> Interval:
    """The same for the model the group began with."""
    rows = group.per_seed("scores" if field == "score" else field, first=True)
    if rows:
        return mean_over_seeds(rows)
    points = [point for point in group.curve(f"eval/{field}") if point.step == 0]
    return Interval(points[0].mean if points else math.nan, math.nan, math.nan, 0)


def measure(group: Group, field: str) -> tuple[Interval, list[float]]:
    """A number after the last evaluation with its interval, and the seeds behind it."""
    finals = group.finals(f"eval/{field}")
    if field in ("score", "gold"):
        return final_score(group, field), finals
    rows = group.per_seed(field) if field in ("kl", "length") else []
    return mean_over_seeds(rows or [[value] for value in finals]), finals


def measure_start(group: Group, field: str) -> Interval:
    """The same before training, of the model that the group began with."""
    if field in ("score", "gold"):
        return start_score(group, field)
    rows = group.per_seed(field, first=True) if field in ("kl", "length") else []
    points = [point for point in group.curve(f"eval/{field}") if point.step == 0]
    return mean_over_seeds(rows or [[point.mean] for point in points])


def moved(group: Group, field: str = "score") -> Interval:
    """How far training moved a held-out number, prompt by prompt where possible."""
    if all(point.step == 0 for point in group.curve(f"eval/{field}")):
        return Interval(math.nan, math.nan, math.nan, 0)
    name = "scores" if field == "score" else field
    before, after = group.per_seed(name, first=True), group.per_seed(name)
    if before and [len(row) for row in before] == [len(row) for row in after]:
        return mean_over_seeds([[b - a for a, b in zip(*rows)] for rows in zip(before, after)])
    change = final_score(group, field).mean - start_score(group, field).mean
    return Interval(change, math.nan, math.nan, 0)


def over_what(group: Group) -> str:
    """What the intervals of a group are over."""
    prompts = [len(row) for row in group.per_seed("scores")]
    many = f"{min(prompts)} prompts" if prompts else ""
    seeds = f"{len(group.runs)} seeds" if len(group.runs) > 1 else ""
    return " and ".join(filter(None, (seeds, many)))


def score_at_kl(group: Group, kl: float) -> float:
    """The mean held-out score where the group's KL first passes `kl`; NaN where it never does."""
    scores = {point.step: point.mean for point in group.curve("eval/score")}
    points = [(scores[p.step], p.mean) for p in group.curve("eval/kl") if p.step in scores]
    columns = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return float(intervals.score_at_kl(*columns, level=kl))


def verdict(policies: list[Group], others: list[Group]) -> str:
    """The one sentence at the top. It never gives a score without its KL and length."""
    scored = [group for group in policies if math.isfinite(final_score(group).mean)]
    if not scored:
        return _verdict_without_policy(others) if not policies else ""
    shown = scored
    if len(scored) > 3:  # the baseline and whoever scored highest, for a headline is short
        rest = [group for group in scored[1:] if measured_alike(scored[0], group)] or scored[1:]
        shown = [scored[0], max(rest, key=lambda group: final_score(group).mean)]
    ends = [f"{text(g.label)} ends at {_score_words(g)}" for g in shown]
    start = start_score(scored[0]).mean
    from_where = f" The model they began with scores {num(start)}." if math.isfinite(start) else ""
    if len(scored) == 1:
        from_where = from_where.replace("they", "it")
    left = len(scored) - len(shown)
    more = f" {left} other settings are below." if left else ""
    scales = " They were not scored alike: see below." if unlike(scored) else ""
    return f"Held-out score: {'; '.join(ends)}.{from_where}{more}{scales}"


def _score_words(group: Group) -> str:
    measures = (("gold {}", "gold"), ("KL {}", "kl"), ("{} tokens", "length"))
    finals = [(words, group.final(f"eval/{key}")) for words, key in measures]
    beside = [words.format(num(value)) for words, value in finals if math.isfinite(value)]
    words = f"<b>{final_score(group).text(num)}</b>"
    return f"{words} ({', '.join(beside)})" if beside else words


def _verdict_without_policy(others: list[Group]) -> str:
    ends: list[str] = []
    for group in others:
        for key, word in (("eval/accuracy", "accuracy"), ("eval/loss", "loss")):
            if math.isfinite(value := group.final(key)):
                ends.append(f"{text(group.label)} ends at held-out {word} <b>{num(value)}</b>")
                break
    return "; ".join(ends) + "." if ends else ""


def shows(policies: list[Group]) -> list[str]:
    """What the recorded numbers say, a sentence each."""
    said: list[str] = []
    for group in policies:
        said += [s for s in (_score_moved(group), _gold_moved(group), _hacking(group)) if s]
    if len(policies) > 1:
        for group in policies[1:]:
            if measured_alike(policies[0], group):
                said += _compare(policies[0], group)
    return said


def shows_not(policies: list[Group], runs: list[Run]) -> list[str]:
    """What a reader might take from the page and should not."""
    said: list[str] = []
    if apart := unlike(policies):
        said.append(
            f'<span class="warn">Not on one scale:</span> the runs differ in what scored them or '
            f"in their data ({_codes(apart)}), so their scores cannot be compared. Only runs "
            "scored like the first are set against it."
        )
    if policies:
        said.append(
            f"The score is {_scorer(policies)}; no person judged these responses. Win rates count "
            "prompts where that score is above the SFT model's."
        )
        if all(not math.isfinite(final_score(group, "gold").mean) for group in policies):
            said.append(
                "No true score is known for this task, so over-optimisation of the reward cannot "
                "be ruled out."
            )
        said.append(_seeds(policies))
    changed = [key for key, _ in differences(policies)]
    rest = [key for key in changed if key.split(".")[0] != "segmenter"]
    if rest and len(changed) > 1:
        said.append(
            f"The runs differ in more than their macro actions ({_codes(rest)}): a difference "
            "between them cannot be put down to one of these alone."
        )
    starts = [start_score(group).mean for group in policies]
    starts = [start for start in starts if math.isfinite(start)]
    if starts and max(starts) - min(starts) > 0.05 * max(1.0, abs(starts[0])):
        said.append("The runs did not begin from the same score, so their ends compare poorly.")
    for run in runs:
        said += _unfinished(run)
    return said


def _scorer(policies: list[Group]) -> str:
    """Whose opinion the score is."""
    configs = [run.config for group in policies for run in group.runs]
    functions = list(dict.fromkeys(f for c in configs for f in c.get("reward_funcs") or ()))
    told = f"what functions give ({_codes(functions)})"
    if functions and not any(c.get("reward_model") for c in configs):
        return told
    return "a reward model's, learnt from preferences" + (f", and {told}" if functions else "")


def _codes(keys: list[str]) -> str:
    shown = ", ".join(f"<code>{text(key)}</code>" for key in keys[:6])
    return shown + (" and others" if len(keys) > 6 else "")


def _score_moved(group: Group) -> str:
    change = moved(group)
    if not math.isfinite(change.mean):
        return ""
    sure = ""
    if change.low > 0 or change.high < 0:
        bounds = f"{num(change.low)} to {num(change.high)}"
        sure = f", 95% interval over {over_what(group)} {bounds}"
    elif math.isfinite(change.low):
        sure = f", which its interval over {over_what(group)} does not tell from no change"
    before, after = group.per_prompt("scores", first=True), group.per_prompt("scores")
    share = ""
    if before and after and len(before) == len(after):
        share = f"; {percent(share_improved(before, after))} of prompts score higher than before"
    return f"<b>{text(group.label)}</b> moved the score by {signed(change.mean)}{sure}{share}."


def _gold_moved(group: Group) -> str:
    score, gold = moved(group), moved(group, "gold")
    if not (math.isfinite(gold.mean) and math.isfinite(score.mean)):
        return ""
    fell = gold.high < 0 if math.isfinite(gold.high) else gold.mean < 0
    rose = gold.low > 0 if math.isfinite(gold.low) else gold.mean > 0
    label = text(group.label)
    if score.mean > 0 and fell:
        return (
            f'<span class="warn">Over-optimisation:</span> {label} raised the learnt score while '
            f"the true (gold) score fell by {num(abs(gold.mean))}."
        )
    points = group.curve("eval/gold")
    peak = max(points, key=lambda point: point.mean)
    dropped = peak.mean - points[-1].mean
    gained = peak.mean - points[0].mean
    if score.mean > 0 and gained > 0 and dropped > 0.2 * gained:
        return (
            f'<span class="warn">Over-optimisation sets in:</span> the true (gold) score of '
            f"{label} peaked at {num(peak.mean)} in step {peak.step} and ended "
            f"{num(dropped)} lower."
        )
    if rose and score.mean > 0:
        return f"The true (gold) score of {label} moved with it, by {signed(gold.mean)}."
    return (
        f"The true (gold) score of {label} moved by {signed(gold.mean)}, not clearly with "
        "the learnt one."
    )


def _hacking(group: Group) -> str:
    """Longer, repetitive or cut-off responses: what a policy does when it games its score."""
    signs: list[str] = []
    lengths = group.curve("eval/length")
    if len(lengths) > 1 and lengths[-1].mean > 1.25 * lengths[0].mean > 0:
        signs.append(
            f"responses grew from {num(lengths[0].mean)} to {num(lengths[-1].mean)} tokens"
        )
    repeats = group.curve("eval/repetition")
    if len(repeats) > 1 and repeats[-1].mean - repeats[0].mean > 0.05:
        signs.append(f"repetition rose to {percent(repeats[-1].mean)}")
    ended = group.final("eval/ended")
    if ended < 0.8:
        signs.append(f"only {percent(ended)} of responses came to an end by themselves")
    if not signs:
        return ""
    return f'<span class="warn">Look twice</span> at {text(group.label)}: {", ".join(signs)}.'


def _compare(base: Group, group: Group) -> list[str]:
    said: list[str] = []
    names = f"{text(group.label)} over {text(base.label)}"
    before, after = base.per_prompt("scores"), group.per_prompt("scores")
    if before and after and len(before) == len(after) and same_prompts(base, group):
        change = paired_difference(before, after)
        said.append(
            f"<b>{names}</b>, prompt by prompt: {change.text(signed)}, higher on "
            f"{percent(share_improved(before, after))} of {change.size} prompts."
        )
    kl, base_kl = group.final("eval/kl"), base.final("eval/kl")
    if not (math.isfinite(kl) and math.isfinite(base_kl)):
        return said
    level = min(kl, base_kl)
    at, base_at = score_at_kl(group, level), score_at_kl(base, level)
    same = ""
    if math.isfinite(at) and math.isfinite(base_at):
        same = f" Where each first passes KL {num(level)} they score {num(at)} and {num(base_at)}."
    if base_kl > 0 and abs(kl - base_kl) > 0.15 * base_kl:
        more, bought = "less", ""
        if kl > base_kl:
            more, bought = "more", "; part of its score may be bought with it"
        said.append(
            f"{text(group.label)} spent {percent(abs(kl / base_kl - 1))} {more} KL than "
            f"{text(base.label)} ({num(kl)} against {num(base_kl)}){bought}.{same}"
        )
    else:
        said.append(
            f"{text(group.label)} and {text(base.label)} spent about the same KL ({num(kl)} and "
            f"{num(base_kl)}).{same}"
        )
    return said


def _seeds(policies: list[Group]) -> str:
    fewest = min(group.num_seeds for group in policies)
    if fewest == 1:
        which = (
            "There is one seed a setting"
            if all(g.num_seeds == 1 for g in policies)
            else ("Some settings have one seed")
        )
        return (
            f"{which}, and one seed is no evidence that a difference would come again: the "
            "intervals are over prompts, not over trainings. Run three or more."
        )
    ends = [group.finals("eval/score") for group in policies]
    apart = ""
    if len(policies) == 2 and all(ends):
        overlap = max(map(min, ends)) <= min(map(max, ends))
        apart = f" The final scores of the seeds {'overlap' if overlap else 'do not overlap'}."
    caution = " Few seeds still leave room for chance." if fewest < 5 else ""
    return (
        f"Each setting has at least {fewest} seeds; bands are the lowest and highest seed, "
        f"brackets are intervals over seeds and prompts.{apart}{caution}"
    )


def _unfinished(run: Run) -> list[str]:
    said: list[str] = []
    name = f"<b>{text(run.name)}</b>" + (f" (seed {run.seed})" if run.seed is not None else "")
    if run.is_empty:
        said.append(f"{name} has recorded nothing yet and is left out.")
    elif run.status not in ("finished", "unknown"):
        where = f" at step {run.last_step}" if run.last_step is not None else ""
        word = {"running": "is still running"}.get(run.status, f"{text(run.status)}")
        said.append(f"{name} {word}{where}; its last numbers are not final.")
    if run.note:
        said.append(f"{name} notes: {text(run.note)}")
    if run.problems:
        said.append(f"{name}: {text('; '.join(run.problems))}.")
    return said
