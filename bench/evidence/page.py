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
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median

from evidence.distilled import distilled
from evidence.figures import end_points, frontier, predicted_gains
from evidence.gain import against_headroom, gains, headrooms
from evidence.predicted import (
    MEASURED,
    STARTS,
    Prediction,
    predictions,
    rank_correlation,
    reach_correlation,
    read_measured,
)
from evidence.qwen_turns import runs as qwen_turns
from evidence.results import (
    BETA,
    COARSE_LABELS,
    FAST_LABELS,
    LABELS,
    OTHER_BETAS,
    PROCESS_LABELS,
    QWEN_LABELS,
    QWEN_TASKS,
    REACH_LABELS,
    SHOWN,
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
from evidence.turn_length import cosines as turn_cosines
from evidence.turn_length import starts as turn_starts
from marlhf.intervals import Floats, mean

BLOCK = re.compile(r"(<!-- evidence: (.+?) -->\n).*?(<!-- end of evidence -->)", re.S)
TLDR = ("identify", "auto", "seeds", "three", "betas")
"""The campaigns of TL;DR's recipe, on different days."""
LAST = 100
"""The last step of the runs on TL;DR."""
MINUS_BETA_KL = "\u2212 \u03b2 KL"


def write_page(campaigns: Mapping[str, Results], rounds: Path, docs: Path) -> None:
    """Fill the marked blocks of the pages, and draw their figures.

    `campaigns`: all archives by name, without that of distillation, which is `rounds`.
    """
    sums, sparse, coarse, updates, qwen, process, reach = (
        campaigns[name]
        for name in ("sums", "sparse", "coarse", "updates", "qwen", "process", "critic-reach")
    )
    gain = campaigns["gain"]
    identify, rules, predict = (campaigns[name] for name in ("identify", "rules", "predict-tldr"))
    starts = predictions_of(predict)
    controls = "ppo lam99 lam1 rloo n5 lines auto monte-carlo"
    tables = {
        "summary": summary(sums, qwen, identify),
        "right of sums": shares_right(sums, SUMS_LABELS, controls),
        "sooner of sums": sooner(sums, controls),
        "right-pairs of sums": right_pairs(sums),
        "right of sparse": shares_right(sparse, SUMS_LABELS, "ppo lam1 rloo n5 lines monte-carlo"),
        "coarse of coarse": shares_right(
            coarse, COARSE_LABELS, "lam1 rloo lam1-320 rloo-320 n28 n56"
        ),
        "updates of updates": shares_right(updates, UPDATES_LABELS, " ".join(UPDATES_LABELS)),
        "updates-fast of updates": shares_right(
            updates, FAST_LABELS, "ppo-fast n5-fast n5-mean-fast"
        ),
        "process-model of process": process_model(process),
        "process of process": process_rewards(process),
        "reach of critic-reach": reach_and_critic(reach),
        "explained of critic-reach": explained(reach),
        "heads of critic-head": heads(campaigns["critic-head"]),
        "gains of gain": gains(gain),
        "headrooms of gain": headrooms(gain),
        "starts of turn-length": turn_starts(campaigns["turn-length"]),
        "cosines of turn-length": turn_cosines(campaigns["turn-length"]),
        "exact of turn-length": turn_cosines(campaigns["turn-length"], exact=True),
        "runs of qwen-turns": qwen_turns(campaigns["qwen-turns"]),
        "larger of qwen": larger(qwen),
        "larger-pairs of qwen": larger_pairs(qwen),
        "all-days": all_days([campaigns[name] for name in TLDR]),
        "reward-models of identify": reward_models(identify),
        "reward-models of rules": reward_models(rules),
        "predicted of predict-tldr": predicted(predict, starts),
        "distilled of distil": distilled(rounds),
    }
    tables |= {f"runs of {name}": runs(campaigns[name], shown) for name, shown in SHOWN.items()}
    folder = docs / "results"
    for page in [docs / "results.md", *sorted(folder.glob("*.md"))]:
        filled = BLOCK.sub(lambda m: m[1] + tables[m[2]] + m[3], page.read_text("utf-8"))
        page.write_text(filled, encoding="utf-8")
    figures = {
        "end-points": end_points(identify),
        "frontier": frontier(campaigns["auto"]),
        "betas": frontier(campaigns["betas"]),
        "gain": against_headroom(gain),
        "predicted": predicted_gains({STARTS[start]: found for start, found in starts.items()}),
    }
    for name, drawn in figures.items():
        (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")


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
    for row, above in reversed([*zip(rows[1:], rows, strict=False)]):
        if row[0] == above[0]:  # the same task, from the same start
            row[0] = row[2] = ""
    head = ["before", "after", "over PPO .95", f"reward {MINUS_BETA_KL}", "KL", "tokens"]
    return table(["task", "method", *head, "s/step"], rows)


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


def shares_right(results: Results, labels: Mapping[str, str], shown: str) -> str:
    """The share of right answers at the end and over the whole curve, against the first method."""
    [nobody] = results.teachers  # the reward is a function
    pool = [method for method in labels if (method, nobody) in results.runs]
    base, *_ = methods = shown.split()
    last = results.last_step(base, nobody)
    rows: list[list[str]] = []
    for method in methods:
        over = [results.difference(score, method, base, nobody, x, pool) for x in (last, None)]
        seeds = len(results.runs[method, nobody])
        rows.append(
            [
                labels[method] + (", one seed" if seeds == 1 else ""),
                f"{results.mean(score, method, nobody, last):.1%}",
                *(x.text(points) if x and method != base else "" for x in over),
                *end_cells(results, method, nobody, last, 2),
            ]
        )
    head = ["", f"right after {last}", f"end over {labels[base]}", "whole curve over it"]
    head += [f"reward {MINUS_BETA_KL}", "KL", "tokens", "s/step"]
    return table(head, rows)


def process_model(results: Results) -> str:
    """What share of first wrong lines each process model finds, as `marlhf prm` measures it."""
    file = results.folder / MEASURED / "found.json"
    rows = [
        [
            name,
            str(x["responses"]),
            str(x["with an error"]),
            *(f"{x[share]:.1%}" for share in ("first_error", "error_free")),
        ]
        for name, x in json.loads(file.read_text("utf-8")).items()
    ]
    head = ["process model, lines", "responses", "with an error", "first one found"]
    return table([*head, "right and passed"], rows)


def process_rewards(results: Results) -> str:
    """What is solved at the end, by the true score, over the outcome alone: paired by seed."""
    [nobody] = results.teachers
    last = results.last_step("outcome", nobody)
    rows: list[list[str]] = []
    for method, label in PROCESS_LABELS.items():
        cells: list[str] = []
        for base in ("outcome", "outcome-scaled"):
            by_seed = results.differences(gold, method, base, nobody, last)
            each = ", ".join(points(float(x.mean())) for x in by_seed)
            over = over_reward_models([[x] for x in by_seed]).text(points)
            cells += ["", ""] if method in ("outcome", base) else [each, over]
        shares = [f"{results.mean(gold, method, nobody, x):.1%}" for x in (last, None)]
        ends = end_cells(results, method, nobody, last, 2)[1::2]
        rows.append([label, *shares, *cells, *ends])
    head = ["reward", f"solved after {last}", "whole curve", "over the outcome, by seed", "mean"]
    return table([*head, "over it times 3, by seed", "mean", "KL", "s/step"], rows)


NOT_LEARNT = {1}
"""Seeds of `critic-reach` whose SFT model did not learn to add."""


def reach_and_critic(results: Results) -> str:
    """What is solved with either critic, against RLOO: by seed, and all methods share a spread."""
    kept = results.without_seeds(NOT_LEARNT)
    [nobody] = kept.teachers
    pool = [method for method, _ in kept.runs]
    last = kept.last_step("rloo", nobody)
    rows: list[list[str]] = []
    for method, label in (REACH_LABELS | {"rloo": "RLOO, no critic"}).items():
        cells = [label]
        for name in (method, f"{method}-pre"):
            if (name, nobody) not in kept.runs:
                cells += [""] * 3
                continue
            shares = [f"{kept.mean(score, name, nobody, step):.1%}" for step in (10, last)]
            over = kept.difference(score, name, "rloo", nobody, None, pool)
            cells += [*shares, "" if name == "rloo" or over is None else over.text(points)]
        rows.append(cells)
    head = [f"solved after {step}" for step in (10, last)] + ["curve over RLOO"]
    return table(["credit", *head, *(f"pretrained: {name}" for name in head)], rows)


def heads(results: Results) -> str:
    """What is solved where the critic's head starts at random or at zero, paired by seed."""
    [nobody] = results.teachers
    rows: list[list[str]] = []
    for method in ("tokens-95", "lines-95", "tokens-100"):
        last = results.last_step(f"zero-{method}", nobody)
        shares = [
            f"{results.mean(score, f'{head}-{method}', nobody, step):.1%}"
            for head in ("random", "zero")
            for step in (10, last)
        ]
        by_seed = results.differences(score, f"zero-{method}", f"random-{method}", nobody, last)
        each = ", ".join(points(float(x.mean())) for x in by_seed)
        over = over_reward_models([[x] for x in by_seed]).text(points)
        rows.append([REACH_LABELS[method], *shares, each, over])
    head = [f"{head}: {step} steps" for head in ("random", "zero") for step in (10, last)]
    return table(["credit", *head, "zero over random, by seed", "mean"], rows)


def explained(results: Results) -> str:
    """Explained variance by thirds of a response, early and late: medians over runs and steps."""
    kept = results.without_seeds(NOT_LEARNT)
    [nobody] = kept.teachers
    rows: list[list[str]] = []
    for end, label in (("", "from the SFT model"), ("-pre", "pretrained")):
        runs = [run for m in REACH_LABELS for run in kept.runs[m + end, nobody]]
        cells = [label]
        for steps in (range(1, 11), range(21, 31)):
            for third in (1, 2, 3):
                curves = [run.curve(f"rl/explained_variance_{third}") for run in runs]
                values = [value for curve in curves for step, _, value in curve if step in steps]
                cells.append(number(median(values)))
        rows.append(cells)
    thirds = ("first third", "second", "last")
    head = [f"steps {when}: {third}" for when in ("1-10", "21-30") for third in thirds]
    return table(["critic", *head], rows)


def sooner(results: Results, shown: str) -> str:
    """The first evaluation of each method with the last share of the first one, as a sentence."""
    [nobody] = results.teachers
    base, *_ = methods = shown.split()
    steps = [e.step for e in results.runs[base, nobody][0].evaluations]
    goal = results.mean(score, base, nobody, steps[-1])
    first = [
        next(s for s in steps if results.mean(score, method, nobody, s) >= goal)
        for method in methods
    ]
    reached = "; ".join(f"{SUMS_LABELS[m]} ({s})" for m, s in zip(methods, first, strict=True))
    return f"Steps to {goal:.1%} right: {reached}.\n"


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
    """For each task how much a larger model solves at the end.

    "First ended": before and after on the prompts whose response ended before training began, so
    that learning to stop in time does not count.
    """
    [nobody] = results.teachers
    tables: list[str] = []
    for task, name in QWEN_TASKS.items():
        base, rows = f"{task}-ppo", []
        end = results.last_step(base, nobody)
        pool = [f"{task}-{each}" for each in QWEN_LABELS]
        for label in ("ppo", "lam1", "rloo", "lines"):
            method = f"{task}-{label}"
            over = results.difference(solved, method, base, nobody, end, pool)
            by_seed = results.differences(solved, method, base, nobody, end)
            each = ", ".join(points(float(rises.mean())) for rises in by_seed)
            rows.append(
                [
                    QWEN_LABELS[label],
                    f"{results.mean(solved, method, nobody, end):.1%}",
                    *((over.text(points), each) if over and method != base else ("", "")),
                    solved_where_first_ended(results, method, end),
                    *end_cells(results, method, nobody, end),
                ]
            )
        head = [name, f"step {end}", "over PPO .95", "by seed", "first ended"]
        head += [f"reward {MINUS_BETA_KL}", "KL", "tokens", "s/step"]
        tables.append(table(head, rows))
    return "\n".join(tables)


def larger_pairs(results: Results) -> str:
    """Macro actions against what gained as much, at the end."""
    [nobody] = results.teachers
    rows: list[list[str]] = []
    for theirs in ("lam1", "rloo"):
        cells: list[str] = []
        for task in QWEN_TASKS:
            pool = [f"{task}-{each}" for each in QWEN_LABELS]
            pair = f"{task}-lines", f"{task}-{theirs}"
            end = results.last_step(f"{task}-ppo", nobody)
            found = results.difference(solved, *pair, nobody, end, pool)
            cells.append(found.text(points) if found else "")
        rows.append([f"lines over {QWEN_LABELS[theirs]}", *cells])
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
    """How often each reward model is right, as a sentence."""
    right = [
        f"`{name}` {run.summary['eval/accuracy']:.1%}"
        for name, run in results.reward_models.items()
    ]
    return f"Right on held-out pairs: {', '.join(right)}.\n"


def runs(results: Results, shown: Mapping[str, str]) -> str:
    """Methods at their last evaluation, reward model by reward model."""
    rows: list[list[str]] = []
    for teacher, names in shown.items():
        methods = results.methods(teacher)
        final = max(results.last_step(method, teacher) for method in methods)
        for method in names.split():
            step = results.last_step(method, teacher)
            over = results.difference(objective, method, "ppo", teacher, step, methods)
            seconds = results.seconds_per_step(method, teacher)
            rows.append(
                [
                    LABELS[method] + (f", step {step}" if step < final else ""),
                    *([f"`{teacher}`"] if len(shown) > 1 else []),
                    number(results.mean(score, method, teacher, step)),
                    number(results.mean(objective, method, teacher, step)),
                    over.text(signed) if over and method != "ppo" else "",
                    signed(results.gain(gold, method, teacher, step).mean),
                    number(results.mean(kl, method, teacher, step), 1),
                    number(results.mean(length, method, teacher, step), 0),
                    "" if math.isnan(seconds) else number(seconds, 1),
                ]
            )
    head = ["", *(["reward model"] if len(shown) > 1 else []), "score"]
    head += [f"score \u2212 {BETA} KL", "over PPO", "gold gained", "KL", "tokens", "s/step"]
    return table(head, rows)


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


def predicted(results: Results, starts: Mapping[str, list[Prediction]]) -> str:
    """What was measured at each start beside what each rule gained from there."""
    [teacher] = results.teachers
    cells: dict[str, list[str]] = {}
    notes: list[str] = []
    for start, found in starts.items():
        for each in found:
            cosine = f"{number(each.cosine)} \u00b1 {number(each.error)}"
            cells.setdefault(each.rule, [f"`{each.rule}`"]).extend(
                [cosine, each.gained.text(signed)]
            )
        ends = [end_cells(results, each.run, teacher, 30)[1:] for each in found]
        kls, tokens, seconds = (sorted(column, key=float) for column in zip(*ends))
        correlation, p_value = rank_correlation(found)
        by_cosine, by_reach, count = reach_correlation(found)
        notes.append(
            f"- **From {STARTS[start]}:** rank correlation {number(correlation)} "
            f"(p = {p_value:.2f}). Of the {count} token and n-gram rules: {number(by_cosine)}; "
            f"longest reach first: {number(by_reach)}. KL {kls[0]} to {kls[-1]}, "
            f"{tokens[0]} to {tokens[-1]} tokens, {seconds[0]} to {seconds[-1]} s/step.\n"
        )
    head = ["", *(text for start in starts for text in (f"from {STARTS[start]}: cosine", "gained"))]
    return f"{table(head, list(cells.values()))}\n{''.join(notes)}"


def predictions_of(results: Results) -> dict[str, list[Prediction]]:
    """By start, for those that were measured."""
    measured = {start: read_measured(results.folder, start) for start in STARTS}
    return {
        start: predictions(results, start, rows)
        for start, rows in measured.items()
        if rows is not None
    }
