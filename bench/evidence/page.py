"""The tables of docs/results.md, written between its marks; the text around them is by hand.

<!-- evidence: reward-models -->
...
<!-- end of evidence -->

A block is made from the first archive unless it names another: "evidence: over-ppo of auto" is from
auto.tar.xz. Runs of different archives have other SFT and reward models and are not compared;
"all-days" averages differences that are each within one archive.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from evidence.figures import end_points, frontier, gold_over_steps, predicted_gains
from evidence.predicted import (
    STARTS,
    Prediction,
    predictions,
    rank_correlation,
    read_measured,
)
from evidence.results import (
    BETA,
    COARSE_LABELS,
    LABELS,
    OTHER_BETAS,
    QWEN_LABELS,
    QWEN_TASKS,
    SUMS_LABELS,
    UPDATES_LABELS,
    Results,
    gold,
    kl,
    length,
    objective,
    score,
    solved,
)
from marlhf.intervals import mean_over_groups
from marlhf.train.recipe import check_recipe

PAGE = "results.md"
BLOCK = re.compile(
    r"(<!-- evidence: ([\w-]+)(?: of ([\w-]+))? -->\n).*?(<!-- end of evidence -->)", re.S
)
FRONTIERS = {"auto": "frontier.svg", "betas": "betas.svg"}
"""The campaigns in which methods were trained with several betas, and the figure of each."""
PREDICTED = "predict-tldr"
"""The campaign in which credit was measured before training."""
TLDR = ("identify", "auto", "seeds", "three", "betas")
"""The campaigns of experiment 1's recipe, on different days."""
HALF_WAY = 50
"""Evaluations at this step are compared beside the last ones, in runs of twice as many."""
MINUS = "\u2212"
PAIRS = (
    ("n5-start", "n5-equal"),
    ("rloo", "n5-start"),
    ("lam1", "n5-start"),
    ("n5-start-lr2", "ppo-lr2"),
    ("n5-start-lr8", "ppo-lr8"),
)
"""Differences that matter beside those to PPO."""


def write_page(campaigns: Mapping[str, Results], docs: Path) -> Path:
    """Fill the marked blocks of the page, and draw its figures.

    Blocks of campaigns that are not given stay as they are.
    """
    page, [first, *_] = docs / PAGE, campaigns
    blocks: dict[str, Callable[[Results], str]] = {
        "reward-models": reward_models,
        "over-ppo": over_ppo,
        "pairs": pairs,
        "runs": runs,
        "all-days": lambda _: all_days([campaigns[name] for name in TLDR]),
        "not-run": lambda _: not_run(campaigns.values()),
        "right": right,
        "updates": updates,
        "coarse": coarse,
        "larger": larger,
        "larger-pairs": larger_pairs,
        "predicted": predicted,
    }

    def fill(found: re.Match[str]) -> str:
        mark, block, campaign, end = found.groups()
        needed = TLDR if block == "all-days" else (campaign or first,)
        if not campaigns.keys() >= set(needed):
            return found[0]
        return f"{mark}{blocks[block](campaigns[campaign or first])}{end}"

    page.write_text(BLOCK.sub(fill, page.read_text("utf-8")), encoding="utf-8")
    folder = docs / "results"
    folder.mkdir(exist_ok=True)
    (folder / "end-points.svg").write_text(end_points(campaigns[first]), encoding="utf-8")
    (folder / "gold.svg").write_text(gold_over_steps(campaigns[first]), encoding="utf-8")
    for name in FRONTIERS.keys() & campaigns.keys():
        (folder / FRONTIERS[name]).write_text(frontier(campaigns[name]), encoding="utf-8")
    if PREDICTED in campaigns:
        starts = predictions_of(campaigns[PREDICTED])
        drawn = predicted_gains({STARTS[start]: found for start, found in starts.items()})
        (folder / "predicted.svg").write_text(drawn, encoding="utf-8")
    return page


def reward_models(results: Results) -> str:
    """How often each reward model is right, and what PPO makes of it."""
    rows: list[list[str]] = []
    for name, run in results.reward_models.items():
        ppo = results.runs.get(("ppo", name))
        if ppo:
            step = results.last_step("ppo", name)
            means = [results.mean(measure, "ppo", name, step) for measure in (score, kl)]
            end = f"{number(means[0])} at KL {number(means[1], 1)} (step {step})"
        else:
            end = "trains no policy"
        rows.append([f"`{name}`", f"{run.summary['eval/accuracy']:.1%}", end])
    return table(["reward model", "right on held-out pairs", "PPO's score"], rows)


def over_ppo(results: Results) -> str:
    """Differences to PPO in what all are trained for, by reward model and over all."""
    tables: list[str] = []
    for step in compared_steps(results):
        rows: list[list[str]] = []
        for method in beside_ppo():
            cells = differences(results, method, "ppo", step)
            if any(cells):
                rows.append([LABELS[method], *cells])
        head = [f"over PPO at step {step}", *(f"`{t}`" for t in results.teachers), "over all"]
        tables.append(table(head, rows))
    return "\n".join(tables)


def predicted(results: Results) -> str:
    """What was measured at each start beside what each rule gained from there."""
    tables: list[str] = []
    teachers = results.teachers
    for start, found in predictions_of(results).items():
        cells: list[list[str]] = []
        for each in found:
            step = results.last_step(each.run, teachers[0])
            base = f"{start}-ppo"
            over = [
                results.difference(measure, each.run, base, teachers, step)[0]
                for measure in (objective, gold)
            ]
            compared = [x.text(signed) if each.run != base else "" for x in over]
            cosine = f"{number(each.cosine)} \u00b1 {number(each.error)}"
            cells.append([f"`{each.rule}`", cosine, each.gained.text(signed), *compared])
        correlation, p_value = rank_correlation(found)
        head = [f"from {STARTS[start]}", "cosine", "gained in 30 steps", "over lambda .95"]
        head += ["gold over lambda .95"]
        note = f"Rank correlation {number(correlation)} (p = {p_value:.2f}).\n"
        tables.append(f"{table(head, cells)}\n{note}")
    return "\n".join(tables)


def predictions_of(results: Results) -> dict[str, list[Prediction]]:
    """By start, for those that were measured."""
    measured = {start: read_measured(results.folder, start) for start in STARTS}
    return {
        start: predictions(results, start, rows)
        for start, rows in measured.items()
        if rows is not None
    }


def all_days(campaigns: Sequence[Results]) -> str:
    """Differences to PPO at the last step over the reward models of all campaigns."""
    days = [(results, teacher) for results in campaigns for teacher in results.teachers]
    rows: list[list[str]] = []
    for method in beside_ppo():
        found = [
            [
                results.differences(measure, method, "ppo", name, 2 * HALF_WAY)
                for results, name in days
            ]
            for measure in (objective, gold, score, kl)
        ]
        seeds = [len(group) for group in found[0] if group]
        if len(seeds) < 2:
            continue  # one reward model has no interval over reward models
        means = [
            mean_over_groups([[x.tolist() for x in group] for group in groups if group])
            for groups in found
        ]
        counts = [str(len(seeds)), str(sum(seeds))]
        rows.append([LABELS[method], *counts, *(each.text(signed) for each in means)])
    head = [f"over PPO at step {2 * HALF_WAY}, all days", "reward models", "pairs of runs"]
    return table([*head, f"score {MINUS} {BETA} KL", "gold", "score", "KL"], rows)


def beside_ppo() -> list[str]:
    """The methods that are trained for what PPO is: those at another beta are not."""
    return [name for name in LABELS if name != "ppo" and not name.endswith(tuple(OTHER_BETAS))]


def compared_steps(results: Results) -> list[int]:
    last = max(results.last_step(*key) for key in results.runs)
    return [HALF_WAY, last] if last == 2 * HALF_WAY else [last]


def pairs(results: Results) -> str:
    rows: list[list[str]] = []
    for ours, theirs in PAIRS:
        for step in compared_steps(results):
            name = f"{LABELS[ours]} over {LABELS[theirs]}, step {step}"
            cells = differences(results, ours, theirs, step)
            if any(cells):
                rows.append([name, *cells])
    return table(["", *(f"`{t}`" for t in results.teachers), "over all"], rows)


def differences(results: Results, method: str, base: str, step: int) -> list[str]:
    """A cell for each reward model; the last is the mean, where there are several."""
    cells: list[str] = []
    for teacher in results.teachers:
        found, count = results.difference(objective, method, base, [teacher], step)
        cells.append(found.text(signed) if count else "")
    found, count = results.difference(objective, method, base, results.teachers, step)
    cells.append(found.text(signed) if count > 1 else "")
    return cells


def runs(results: Results) -> str:
    """A table per reward model of every run at its last evaluation."""
    text = ""
    for teacher in results.teachers:
        rows: list[list[str]] = []
        for method in results.methods(teacher):
            step = results.last_step(method, teacher)
            means = [
                results.mean(measure, method, teacher, step)
                for measure in (score, gold, kl, length, objective)
            ]
            own = [number(m, 1 if i in (2, 3) else 2) for i, m in enumerate(means)]
            over = [
                results.difference(measure, method, "ppo", [teacher], step)
                for measure in (score, gold)
            ]
            cells = [d.text(signed) if n and method != "ppo" else "" for d, n in over]
            gain = results.gain(gold, method, teacher, step).text(signed)
            rows.append([LABELS[method], str(step), *own, *cells, gain])
        head = [f"`{teacher}`", "step", "score", "gold", "KL", "tokens", f"score {MINUS} {BETA} KL"]
        text += table([*head, "score over PPO", "gold over PPO", "gold over SFT"], rows) + "\n"
    return text.removesuffix("\n")


def right(results: Results) -> str:
    """How many sums are right, at four steps, and what it took."""
    return shares_right(results, SUMS_LABELS)


def updates(results: Results) -> str:
    """The same where each batch makes several updates."""
    return shares_right(results, UPDATES_LABELS)


def coarse(results: Results) -> str:
    """The same for values from continuations of longer and longer macro actions."""
    return shares_right(results, COARSE_LABELS, "lam1", "lambda 1")


def shares_right(
    results: Results, labels: Mapping[str, str], base: str = "ppo", name: str = "PPO"
) -> str:
    """The share of right answers at four steps; at the last also the worst seed and the KL.

    "as PPO's end" is the first evaluation at which a method has what PPO has at its last, unless
    it started with that. `base` is another method to compare with, called `name`.
    """
    [nobody] = results.teachers  # the reward is a function
    steps = sorted({e.step for [run, *_] in results.runs.values() for e in run.evaluations})
    shown = [steps[round(i * (len(steps) - 1) / 3)] for i in range(4)]
    last = shown[-1]
    goal = results.mean(score, base, nobody, last)
    rows: list[list[str]] = []
    for method, label in labels.items():
        if (method, nobody) not in results.runs:
            continue
        means = {step: results.mean(score, method, nobody, step) for step in steps}
        seeds = [score(each).mean() for each in results.at(method, nobody, last).values()]
        over, count = results.difference(score, method, base, [nobody], last)
        reached = next((str(step) for step, mean in means.items() if mean >= goal), "never")
        rows.append(
            [
                label,
                *(f"{means[step]:.1%}" for step in shown),
                f"{min(seeds):.1%}",
                number(results.mean(kl, method, nobody, last)),
                over.text(points) if count and method != base else "",
                "" if reached == "0" else reached,
                str(len(seeds)),
            ]
        )
    head = [f"right after {shown[0]} steps", *map(str, shown[1:]), "worst seed", "KL"]
    return table(["", *head, f"points over {name}", f"as {name}'s end", "seeds"], rows)


def larger(results: Results) -> str:
    """For each task how much a larger model solves before, half-way and after.

    RLOO has more steps, since they are shorter: it is shown at PPO's last step and at its own.
    "First ended": before and after on the prompts whose response ended before training began, so
    that learning to stop in time does not count.
    """
    [nobody] = results.teachers
    tables: list[str] = []
    for task, name in QWEN_TASKS.items():
        base, rows = f"{task}-ppo", []
        if (base, nobody) not in results.runs:
            continue
        end = results.last_step(base, nobody)
        for label, text in QWEN_LABELS.items():
            method = f"{task}-{label}"
            if (method, nobody) not in results.runs:
                continue
            own = results.last_step(method, nobody)
            rows += [
                solved_cells(results, method, base, f"{text}, {step} steps", step)
                for step in sorted({min(own, end), own})
            ]
        head = [f"{name}, held out", "before", f"step {end // 2}", "after", "points gained"]
        head += ["points over PPO", "first ended", "KL", "tokens", "seeds"]
        tables.append(table(head, rows))
    return "\n".join(tables)


def larger_pairs(results: Results) -> str:
    """What gained more than PPO, compared with each other, half-way and at PPO's end."""
    [nobody] = results.teachers
    rows: list[list[str]] = []
    for ours, theirs in itertools.combinations(("monte-carlo", "lines", "lam1", "rloo"), 2):
        end = results.last_step(f"gsm8k-{ours}", nobody)
        for step in (end // 2, end):
            cells: list[str] = []
            for task in QWEN_TASKS:
                both = [(f"{task}-{name}", nobody) in results.runs for name in (ours, theirs)]
                pair = f"{task}-{ours}", f"{task}-{theirs}"
                found = results.difference(solved, *pair, [nobody], step) if all(both) else None
                cells.append(found[0].text(points) if found else "")
            name = f"{QWEN_LABELS[ours]}, over {QWEN_LABELS[theirs]}, step {step}"
            rows.append([name, *cells])
    return table(["points", *QWEN_TASKS.values()], rows)


def solved_cells(results: Results, method: str, base: str, label: str, step: int) -> list[str]:
    [nobody] = results.teachers
    steps = sorted({e.step for run in results.runs[method, nobody] for e in run.evaluations})
    middle = max(s for s in steps if s <= results.last_step(base, nobody) // 2)
    shares = [results.mean(solved, method, nobody, each) for each in (0, middle, step)]
    shared = min(step, results.last_step(base, nobody))
    over, count = results.difference(solved, method, base, [nobody], shared)
    return [
        label,
        *(f"{share:.1%}" for share in shares),
        results.gain(solved, method, nobody, step).text(points),
        over.text(points) if count and method != base and step == shared else "",
        solved_where_first_ended(results, method, step),
        number(results.mean(kl, method, nobody, step)),
        number(results.mean(length, method, nobody, step), 0),
        str(len(results.runs[method, nobody])),
    ]


def solved_where_first_ended(results: Results, method: str, step: int) -> str:
    [nobody] = results.teachers
    first, last = (results.at(method, nobody, each) for each in (0, step))
    before: list[float] = []
    after: list[float] = []
    for run in results.runs[method, nobody]:
        if run.seed in first and run.seed in last:
            ended = length(first[run.seed]) < run.config["sampling"]["max_new_tokens"]
            before.append(float(solved(first[run.seed])[ended].mean()))
            after.append(float(solved(last[run.seed])[ended].mean()))
    return f"{mean(before):.0%}, then {mean(after):.0%}"


def not_run(campaigns: Iterable[Results]) -> str:
    """Stages of the recipe for TL;DR that no campaign has finished, in the recipe's order."""
    finished: set[str] = {"sft"}
    for results in campaigns:
        if "gold" in results.reward_models:
            finished |= set(results.reward_models)
            seeds = [run for runs in results.runs.values() for run in runs]
            finished |= {run.name for run in seeds if run.status == "finished"}
    left = [s.name for s in check_recipe("evidence/identify") if s.name not in finished]
    return f"Not finished ({len(left)}): " + ", ".join(f"`{name}`" for name in left) + ".\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float, decimals: int = 2) -> str:
    """With a real minus sign, and none before what rounds to zero."""
    shown = f"{value:.{decimals}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown.replace("-", MINUS)


def points(value: float) -> str:
    """A difference of shares in percentage points."""
    shown = number(100 * value, 0)
    return f"+{shown}" if value > 0 and float(shown) else shown


def signed(value: float) -> str:
    shown = number(value)
    return f"+{shown}" if value > 0 and float(shown) else shown
