"""The tables of docs/results.md and docs/results/, written between marks; the text is by hand.

<!-- evidence: right of sums -->
...
<!-- end of evidence -->

"of sums" names the archive, sums.tar.xz. Runs of different archives have other SFT and reward
models and are not compared; "all-days" and "summary" read several archives, and every difference is
within one of them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from evidence.distilled import distilled
from evidence.figures import end_points, frontier, predicted_gains
from evidence.predicted import (
    STARTS,
    Prediction,
    predictions,
    rank_correlation,
    reach_correlation,
    read_measured,
)
from evidence.results import (
    BETA,
    COARSE_LABELS,
    FAST_LABELS,
    LABELS,
    OTHER_BETAS,
    QWEN_LABELS,
    QWEN_TASKS,
    SUMS_LABELS,
    UPDATES_LABELS,
    Measure,
    Results,
    gold,
    kl,
    length,
    less_kl,
    objective,
    over_reward_models,
    score,
    solved,
)
from evidence.tables import number, points, signed, table
from marlhf.intervals import Floats, mean

BLOCK = re.compile(
    r"(<!-- evidence: ([\w-]+)(?: of ([\w-]+))? -->\n).*?(<!-- end of evidence -->)", re.S
)
FIRST = "identify"
"""The campaign of the figure of end points."""
FRONTIERS = {"auto": "frontier.svg", "betas": "betas.svg"}
"""The campaigns in which methods were trained with several betas, and the figure of each."""
PREDICTED = "predict-tldr"
"""The campaign in which credit was measured before training."""
TLDR = ("identify", "auto", "seeds", "three", "betas")
"""The campaigns of TL;DR's recipe, on different days."""
SUMMARY = ("sums", "qwen", FIRST)
LAST = 100
"""The last step of the runs on TL;DR."""
DISTILLED = "distil"
MINUS_BETA_KL = "\u2212 \u03b2 KL"


def write_page(campaigns: Mapping[str, Results], docs: Path, rounds: Path | None = None) -> Path:
    """Fill the marked blocks of the pages, and draw their figures.

    Blocks of campaigns that are not given stay as they are. `rounds`: the file of distillation.
    """
    blocks: dict[str, Callable[[Results], str]] = {
        "right-pairs": right_pairs,
        "right": lambda results: shares_right(results, SUMS_LABELS),
        "updates": lambda results: shares_right(results, UPDATES_LABELS),
        "updates-fast": lambda results: shares_right(results, FAST_LABELS, "ppo-fast"),
        "coarse": lambda results: shares_right(results, COARSE_LABELS, "lam1"),
        "larger": larger,
        "larger-pairs": larger_pairs,
        "reward-models": reward_models,
        "runs": runs,
        "predicted": predicted,
    }
    several: dict[str, tuple[tuple[str, ...], Callable[[], str]]] = {
        "all-days": (TLDR, lambda: all_days([campaigns[name] for name in TLDR])),
        "summary": (SUMMARY, lambda: summary(*(campaigns[name] for name in SUMMARY))),
    }

    def fill(found: re.Match[str]) -> str:
        mark, block, campaign, end = found.groups()
        if block in several:
            needed, make = several[block]
            return f"{mark}{make()}{end}" if campaigns.keys() >= set(needed) else found[0]
        if campaign == DISTILLED:
            return f"{mark}{distilled(rounds)}{end}" if rounds else found[0]
        if campaign not in campaigns:
            return found[0]
        return f"{mark}{blocks[block](campaigns[campaign])}{end}"

    folder = docs / "results"
    for page in [docs / "results.md", *sorted(folder.glob("*.md"))]:
        page.write_text(BLOCK.sub(fill, page.read_text("utf-8")), encoding="utf-8")
    if FIRST in campaigns:
        (folder / "end-points.svg").write_text(end_points(campaigns[FIRST]), encoding="utf-8")
    for name in FRONTIERS.keys() & campaigns.keys():
        (folder / FRONTIERS[name]).write_text(frontier(campaigns[name]), encoding="utf-8")
    if PREDICTED in campaigns:
        starts = predictions_of(campaigns[PREDICTED])
        drawn = predicted_gains({STARTS[start]: found for start, found in starts.items()})
        (folder / "predicted.svg").write_text(drawn, encoding="utf-8")
    return docs / "results.md"


def summary(sums: Results, qwen: Results, tldr: Results) -> str:
    """Every task at its last step by token PPO, longer lambdas, macro actions and RLOO.

    On TL;DR: the mean of the two reward models with which all four methods came to the end.
    """
    rows: list[list[str]] = []
    task = "Chained sums, right"
    for method in ("ppo", "lam99", "lam1", "rloo", "n5", "lines"):
        rows.append(summary_row(sums, task, SUMS_LABELS[method], method, SUMS_LABELS, 150, score))
    for key, name in QWEN_TASKS.items():
        pool = [f"{key}-{method}" for method in QWEN_LABELS]
        for method in ("ppo", "lam1", "rloo", "lines"):
            label, full = QWEN_LABELS[method], f"{key}-{method}"
            rows.append(summary_row(qwen, f"{name}, solved", label, full, pool, 60, solved))
    for method in ("ppo", "lam1", "rloo", "n5-start"):
        teachers = ("reward", "reward-r1")
        ends = [
            mean([tldr.mean(measure, method, each, LAST) for each in teachers])
            for measure in (score, objective, kl, length)
        ]
        groups = [tldr.differences(score, method, "ppo", each, LAST) for each in teachers]
        over = signed(over_reward_models(groups).mean) if method != "ppo" else ""
        seconds = mean([tldr.seconds_per_step(method, each) for each in teachers])
        cells = ["0.00", number(ends[0]), over, f"0.00 to {number(ends[1])}"]
        cells += [number(ends[2], 1), number(ends[3], 0), number(seconds, 1)]
        rows.append(["TL;DR, score", LABELS[method], *cells])
    rows.append(["Turns", "any", "not measured", *[""] * 6])  # on language models, so far
    head = ["before", "after", "over PPO .95", f"reward {MINUS_BETA_KL}", "KL", "tokens"]
    return table(["task", "method", *head, "seconds per step"], rows)


def summary_row(
    results: Results,
    task: str,
    label: str,
    method: str,
    pool: Collection[str],
    step: int,
    measure: Measure,
) -> list[str]:
    [nobody] = results.teachers
    base = re.sub(r"[\w]+$", "ppo", method)
    over = results.difference(measure, method, base, nobody, step, pool)
    ends = end_cells(results, method, nobody, step)
    return [
        task,
        label,
        f"{results.mean(measure, method, nobody, 0):.1%}",
        f"{results.mean(measure, method, nobody, step):.1%}",
        over.text(points) if over and method != base else "",
        f"{end_cells(results, method, nobody, 0)[0]} to {ends[0]}",
        *ends[1:],
    ]


def end_cells(
    results: Results, method: str, teacher: str, step: int, decimals: int = 1
) -> list[str]:
    """Reward less the KL penalty of the run itself, KL, tokens and seconds per step."""
    beta = float(results.runs[method, teacher][0].config["kl_coef"])
    seconds = results.seconds_per_step(method, teacher)
    return [
        number(results.mean(less_kl(beta), method, teacher, step)),
        number(results.mean(kl, method, teacher, step), decimals),
        number(results.mean(length, method, teacher, step), 0),
        "" if math.isnan(seconds) else number(seconds, 1),
    ]


def shares_right(results: Results, labels: Mapping[str, str], base: str = "ppo") -> str:
    """The share of right answers at three steps and over the whole curve, against a base.

    "Has its end at" is the first evaluation with what the base has at its last one, unless the
    method began with that.
    """
    [nobody] = results.teachers  # the reward is a function
    known = {method: text for method, text in labels.items() if (method, nobody) in results.runs}
    steps = sorted(
        {e.step for method in known for e in results.runs[method, nobody][0].evaluations}
    )
    shown = [steps[0], steps[(len(steps) - 1) // 3], steps[-1]]
    goal = results.mean(score, base, nobody, shown[-1])
    rows: list[list[str]] = []
    for method, label in known.items():
        reached = (s for s in steps if results.mean(score, method, nobody, s) >= goal)
        end = next(map(str, reached), "never")
        means = [f"{results.mean(score, method, nobody, each):.1%}" for each in (*shown, None)]
        over = [
            results.difference(score, method, base, nobody, each, known)
            for each in (shown[-1], None)
        ]
        compared = [x.text(points) if x and method != base else "" for x in over]
        seeds = str(len(results.by_seed(score, method, nobody, shown[-1])))
        ends = end_cells(results, method, nobody, shown[-1], 2)
        rows.append([label, seeds, *means, *compared, "" if end == "0" else end, *ends])
    head = ["", "seeds", f"right after {shown[0]}", *map(str, shown[1:]), "whole curve"]
    head += [f"end over {labels[base]}", "whole curve over it", "has its end at"]
    return table([*head, f"reward {MINUS_BETA_KL}", "KL", "tokens", "seconds per step"], rows)


def right_pairs(results: Results) -> str:
    """Macro actions against the controls whose credit reaches as far."""
    [nobody] = results.teachers
    rows: list[list[str]] = []
    for ours, theirs in itertools.product(("n5", "lines"), ("lam99", "lam1", "rloo")):
        over = [
            results.difference(score, ours, theirs, nobody, step, SUMS_LABELS)
            for step in (results.last_step(theirs, nobody), None)
        ]
        name = f"{SUMS_LABELS[ours]}, over {SUMS_LABELS[theirs]}"
        rows.append([name, *(found.text(points) if found else "" for found in over)])
    return table(["points", "at the end", "whole curve"], rows)


def larger(results: Results) -> str:
    """For each task how much a larger model solves before, half-way and after.

    "First ended": before and after on the prompts whose response ended before training began, so
    that learning to stop in time does not count. One seed of other weights has no differences.
    """
    [nobody] = results.teachers
    tables: list[str] = []
    for task, name in QWEN_TASKS.items():
        base, rows = f"{task}-ppo", []
        end = results.last_step(base, nobody)
        pool = [f"{task}-{each}" for each in QWEN_LABELS]
        for label, text in QWEN_LABELS.items():
            method = f"{task}-{label}"
            if (method, nobody) not in results.runs:
                continue
            shares = [results.mean(solved, method, nobody, each) for each in (0, end // 2, end)]
            seeds = results.by_seed(solved, method, nobody, end)
            cells = [f"{share:.1%}" for share in shares]
            if len(seeds) > 1:
                gained = results.gain(solved, method, nobody, end, pool).text(points)
                over = results.difference(solved, method, base, nobody, end, pool)
                cells += [gained, over.text(points) if over and method != base else ""]
            else:
                cells += ["", "other weights"]
            cells.append(solved_where_first_ended(results, method, end))
            rows.append([text, str(len(seeds)), *cells, *end_cells(results, method, nobody, end)])
        head = [f"{name}, held out", "seeds", "before", f"step {end // 2}", f"step {end}", "gained"]
        head += ["over PPO .95", "first ended", f"reward {MINUS_BETA_KL}", "KL", "tokens"]
        tables.append(table([*head, "seconds per step"], rows))
    return "\n".join(tables)


def larger_pairs(results: Results) -> str:
    """What gained more than PPO, compared with each other at PPO's end; and PPO by seed."""
    [nobody] = results.teachers
    rows: list[list[str]] = []
    for ours, theirs in itertools.combinations(("lines", "lam1", "rloo"), 2):
        cells: list[str] = []
        for task in QWEN_TASKS:
            pool = [f"{task}-{each}" for each in QWEN_LABELS]
            pair = f"{task}-{ours}", f"{task}-{theirs}"
            end = results.last_step(f"{task}-ppo", nobody)
            found = results.difference(solved, *pair, nobody, end, pool)
            cells.append(found.text(points) if found else "")
        rows.append([f"{QWEN_LABELS[ours]}, over {QWEN_LABELS[theirs]}", *cells])
    for ours in ("lines", "lam1", "rloo"):
        cells = []
        for task in QWEN_TASKS:
            end = results.last_step(f"{task}-ppo", nobody)
            by_seed = results.differences(solved, f"{task}-{ours}", f"{task}-ppo", nobody, end)
            cells.append(", ".join(points(float(each.mean())) for each in by_seed))
        rows.append([f"{QWEN_LABELS[ours]}, over PPO .95, seed by seed", *cells])
    return table(["points at the end", *QWEN_TASKS.values()], rows)


def solved_where_first_ended(results: Results, method: str, step: int) -> str:
    [nobody] = results.teachers
    first, last = (results.by_seed(solved, method, nobody, each) for each in (0, step))
    lengths = results.by_seed(length, method, nobody, 0)
    before: list[float] = []
    after: list[float] = []
    for run in results.runs[method, nobody]:
        if run.seed in first and run.seed in last:
            ended = lengths[run.seed] < run.config["sampling"]["max_new_tokens"]
            before.append(float(first[run.seed][ended].mean()))
            after.append(float(last[run.seed][ended].mean()))
    return f"{mean(before):.0%}, then {mean(after):.0%}"


def reward_models(results: Results) -> str:
    """How often each reward model is right."""
    rows = [
        [f"`{name}`", f"{run.summary['eval/accuracy']:.1%}"]
        for name, run in results.reward_models.items()
    ]
    return table(["reward model", "right on held-out pairs"], rows)


def runs(results: Results) -> str:
    """Every method at its last evaluation, reward model by reward model."""
    rows: list[list[str]] = []
    for teacher in results.teachers:
        methods = results.methods(teacher)
        for method in methods:
            step = results.last_step(method, teacher)
            if not step:
                continue
            measures: list[tuple[Measure, int]] = [(score, 2), (objective, 2)]
            own = [number(results.mean(m, method, teacher, step), n) for m, n in measures]
            over = results.difference(objective, method, "ppo", teacher, step, methods)
            seconds = results.seconds_per_step(method, teacher)
            rows.append(
                [
                    LABELS[method],
                    f"`{teacher}`",
                    str(len(results.by_seed(score, method, teacher, step))),
                    str(step),
                    *own,
                    over.text(signed) if over and method != "ppo" else "",
                    signed(results.gain(gold, method, teacher, step).mean),
                    number(results.mean(kl, method, teacher, step), 1),
                    number(results.mean(length, method, teacher, step), 0),
                    "" if math.isnan(seconds) else number(seconds, 1),
                ]
            )
    head = ["", "reward model", "seeds", "step", "score", f"score \u2212 {BETA} KL", "over PPO"]
    return table([*head, "gold gained", "KL", "tokens", "seconds per step"], rows)


def all_days(campaigns: Sequence[Results]) -> str:
    """Differences to PPO at the last step, one number for each seed of the reward model.

    Reward models of one seed saw the same pairs on every day, so their days are averaged first.
    """
    names = sorted({teacher for results in campaigns for teacher in results.teachers})
    rows: list[list[str]] = []
    for method in LABELS:
        if method == "ppo" or method.endswith(tuple(OTHER_BETAS)):
            continue  # at another beta it is trained for something else

        def of(measure: Measure, method: str = method) -> list[list[Floats]]:
            groups = [
                [
                    row
                    for results in campaigns
                    for row in results.differences(measure, method, "ppo", name, LAST)
                ]
                for name in names
            ]
            return [group for group in groups if group]

        found = of(objective)
        if len(found) < 2:
            continue
        cells = [over_reward_models(found).text(signed)]
        cells += [signed(over_reward_models(of(m)).mean) for m in (gold, score)]
        cells.append(number(over_reward_models(of(kl)).mean, 1))
        counts = [str(len(found)), str(sum(map(len, found)))]
        rows.append([LABELS[method], *counts, *cells])
    head = [f"over PPO at step {LAST}", "reward seeds", "pairs of runs", f"score \u2212 {BETA} KL"]
    return table([*head, "gold", "score", "KL"], rows)


def predicted(results: Results) -> str:
    """What was measured at each start beside what each rule gained from there."""
    tables: list[str] = []
    [teacher] = results.teachers
    for start, found in predictions_of(results).items():
        rows: list[list[str]] = []
        for each in found:
            step = results.last_step(each.run, teacher)
            over = results.difference(objective, each.run, f"{start}-ppo", teacher, step)
            cosine = f"{number(each.cosine)} \u00b1 {number(each.error)}"
            cells = [f"`{each.rule}`", cosine, each.gained.text(signed)]
            cells.append(over.text(signed) if over and each.method != "ppo" else "")
            rows.append([*cells, *end_cells(results, each.run, teacher, step)])
        head = [f"from {STARTS[start]}", "cosine", "gained in 30 steps", "over lambda .95"]
        head += [f"score {MINUS_BETA_KL}", "KL", "tokens", "seconds per step"]
        correlation, p_value = rank_correlation(found)
        by_cosine, by_reach, count = reach_correlation(found)
        note = f"Rank correlation {number(correlation)} (p = {p_value:.2f}). "
        note += f"Of the {count} token and n-gram rules: {number(by_cosine)}; "
        note += f"longest reach first: {number(by_reach)}.\n"
        tables.append(f"{table(head, rows)}\n{note}")
    return "\n".join(tables)


def predictions_of(results: Results) -> dict[str, list[Prediction]]:
    """By start, for those that were measured."""
    measured = {start: read_measured(results.folder, start) for start in STARTS}
    return {
        start: predictions(results, start, rows)
        for start, rows in measured.items()
        if rows is not None
    }
