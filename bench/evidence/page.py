"""The results page as Markdown: tables and sentences from the numbers, nothing by hand."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evidence import figures
from evidence.claims import claims
from evidence.data import data_config
from evidence.jobs import all_jobs, chosen_rate, objectives, validation_lines
from evidence.judges import accuracies, read_accuracy
from evidence.methods import DPO_SLOWER, FAMILIES, REWARDS, RLOO_SAMPLES, tries
from evidence.results import (
    LABELS,
    Line,
    Method,
    Results,
    ahead_at,
    common_kl,
    groups,
    measure,
    steps_to,
    win_rate,
)
from marlhf.evaluate.best_of_n_grid import kl_bound
from marlhf.evaluate.pass_rates import read_summary
from marlhf.intervals import Interval, interval
from marlhf.runs.read import Run, read_run

LEVELS = (2, 4, 8, 16, 32)
SAMPLES = 3
INTIMATE = re.compile(r"sex|nsfw|gonewild|naked|porn|rape|abus|suicid|drug", re.I)
SHOWN = ("ppo", "n5-sum", "n5-mean")
"""Methods whose samples are shown."""
EXPLAINED = "rl/explained_variance"


def write_page(results: Results, docs: Path, note: str = "") -> Path:
    """`results.md` in the folder, and its figures in `results/` beside it."""
    methods = results.methods()
    parts = [INTRODUCTION, _missing(results), _setting(results), note]
    if methods:
        parts += [_claims(results), _figures(results, methods, docs / "results")]
        parts += [_scores(results, methods), _equal_kl(methods), _pace(results, methods)]
        parts += [_critics(results, methods), _tried(results)]
        parts += [_samples(results, methods), _gpu(results)]
    parts += [_small(results, task) for task in ("hh", "mbpp") if task in results.tasks]
    page = "\n\n".join(part.strip() for part in parts if part) + "\n"
    docs.mkdir(parents=True, exist_ok=True)
    file = docs / "results.md"
    file.write_text(page, encoding="utf-8")
    return file


INTRODUCTION = r"""
# Results

Every number, table and figure of this page is made by two scripts, by the second from what the
first leaves:

<!-- not run: takes a GPU, or half an hour of one -->
```sh
python bench/evidence_tldr.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out runs/evidence \
    --task tldr hh mbpp --jobs 8
python bench/evidence_report.py runs/evidence/evidence.tar.xz --docs docs
```

Scores are those of a reward model, less the SFT model's mean score and over its deviation, both on
held-out prompts. KL is to the SFT model, in nats a response. Brackets are 95% intervals.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A table whose first columns are words; the rest are numbers, on the right."""
    lines = [header, ["---" if i < words else "---:" for i in range(len(header))], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _missing(results: Results) -> str:
    """What the scripts would run and did not, so that nobody takes a part for the whole."""
    settings = results.settings
    names = [job.name.removeprefix("tldr/") for job in all_jobs(settings)]
    wanted = {m: sum(n.startswith(f"{m}-s") for n in names) for m in FAMILIES}
    found = {m: len(results.method(m).answers) for m in FAMILIES}
    short = [
        f"{LABELS[m]} ({found[m]} of {wanted[m]} seeds)" if found[m] else LABELS[m]
        for m in FAMILIES
        if found[m] < wanted[m]
    ]
    short += [] if results.best else [LABELS["best-of-8"]]
    short += [] if results.timing else ["the times of steps"]
    if "tldr" not in results.tasks or not short:
        return ""
    return f"**Not all has been run yet.** Missing: {'; '.join(short)}."


def _setting(results: Results) -> str:
    s = results.settings
    about = json.loads((results.folder / "data/tldr/split.json").read_text(encoding="utf-8"))
    models = {name: results.folder / "tldr" / name for name in ("sft", "reward", "gold")}
    runs = {name: read_run(path) for name, path in models.items() if path.is_dir()}
    counts = ", ".join(
        f"{about[part]['rows']:,} {what} ({about[part]['prompts']:,} posts)"
        for part, what in (("train", "for training"), ("gold", "for the second reward model"))
    )
    words = [
        "## The setting",
        f"SmolLM2-135M-Instruct on the TL;DR comparisons, parted by post: pairs {counts}, and "
        f"{about['test']['prompts']:,} posts for the test. Prompts are cut to {s.prompt_tokens} "
        f"tokens ({s.reward_prompt_tokens} for the reward models), responses to "
        f"{s.response_tokens}. Every run of reinforcement learning takes {s.steps} steps of "
        f"{s.batch} prompts; beta is {s.beta:g}, and a fifth of it where so named. "
        f"{s.eval_prompts} held-out prompts are asked every {s.eval_every} steps, "
        f"{s.test_prompts} test prompts once, after the last. RLOO samples each prompt "
        f"{RLOO_SAMPLES} times, so that it sees {RLOO_SAMPLES} times the responses; all others "
        "sample it once.",
    ]
    return "\n\n".join([*words, *_judges(results, runs)])


def _judges(results: Results, runs: dict[str, Run]) -> list[str]:
    """What it took to get reward models, and how good they are."""
    right = read_accuracy(results.settings)
    if "reward" not in runs or not right:
        return []
    held_out = {name: runs[name].final("eval/accuracy") for name in ("reward", "gold")}
    words = [
        f"The reward model ranks {held_out['reward']:.1%} of held-out pairs as people did and "
        f"{right['reward']:.1%} of the {right['pairs']:,} test pairs. The second one, from other "
        f"pairs with another seed, which only judges: {held_out['gold']:.1%} of its own held-out "
        f"pairs, {right['gold']:.1%} of the same test pairs. Both begin as the SFT model."
    ]
    tried = accuracies(results.settings)
    rows = [
        [f"{rate:g}", str(epochs), f"{tried[name]:.1%}", "taken" if name == "reward" else ""]
        for name, (rate, epochs) in REWARDS.items()
        if name in tried
    ]
    if len(rows) > 1:
        words.append(table(["learning rate", "epochs", "held-out pairs", "reward model"], rows))
        pairs = data_config(
            results.settings, "tldr", results.settings.reward_prompt_tokens
        ).eval_size
        chance = 196 * math.sqrt(0.25 / pairs)
        words.append(
            "Which one teaches is settled in the script and not by this table: a share of "
            f"{pairs:,} pairs is known to {chance:.0f} points."
        )
    return words


def _claims(results: Results) -> str:
    made = claims(results)
    if not made:
        return ""
    rows = [claim.row for claim in made]
    words = [
        "Sum pooling is the paper's equation, mean pooling its authors' code. What we make of it "
        "is in [The algorithm](algorithm.md#what-the-evidence-says)."
    ]
    if not results.method("n5-split").finished:
        words.append(
            "Mean pooling here divides the score as well, which lies on the last token; the "
            "authors' code makes that token an action of its own "
            "([why it matters](algorithm.md#what-mean-pooling-does)), which has not been run here: "
            "`--extras` does."
        )
    verdicts = table(["", "here it", "because"], rows, 3)
    return "\n\n".join(["## What holds of the paper's claims", " ".join(words), verdicts])


def _figures(results: Results, methods: Sequence[Method], folder: Path) -> str:
    drawn = groups(methods)
    drawn = [group for group in drawn if group.curve("eval/score")]
    named = {method.label: method.name for method in methods}
    paces = [results.step_seconds(named[group.label]) for group in drawn]
    made = {
        "score-steps": ("Score over steps", figures.curve(drawn, "eval/score", "score")),
        "frontier": ("Score against KL", figures.frontier(drawn)),
        "kl-steps": ("KL over steps", figures.curve(drawn, "eval/kl", "KL (nats a response)")),
        "length": ("Length over steps", figures.curve(drawn, "eval/length", "length (tokens)")),
        "repetition": ("Repetition", figures.curve(drawn, "eval/repetition", "repetition")),
    }
    if all(map(math.isfinite, paces)):
        timed = figures.curve(drawn, "eval/score", "score", pace=paces)
        made["score-seconds"] = ("Score over seconds of a GPU of its own", timed)
    lines = ["## Curves", "On held-out prompts; bands span the seeds."]
    for name, (title, svg) in made.items():
        figures.write(folder, name, svg)
        lines.append(f"![{title}](results/{name}.svg)")
    return "\n\n".join(lines)


def _scores(results: Results, methods: Sequence[Method]) -> str:
    rows: list[list[str]] = []
    entries: list[tuple[str, list[list[Line]]]] = [("SFT", [results.sft])]
    entries += [(m.label, m.answers) for m in methods if m.answers]
    if results.best:
        entries.append((LABELS["best-of-8"], [results.best]))
    for label, answers in entries:
        score, gold = (results.score(answers, judge) for judge in ("reward", "gold"))
        kl = measure(answers, "kl")
        if label == LABELS["best-of-8"]:
            kl = kl_bound(8)
        aim = "" if label == LABELS["best-of-8"] else _mean(interval(results.objective(answers)))
        wins = [win_rate(answers, results.sft, judge) for judge in ("reward", "gold")]
        shown = ["", ""] if label == "SFT" else [_share(*win[:3]) for win in wins]
        rest = [f"{measure(answers, 'length'):.1f}", f"{measure(answers, 'repetition'):.1%}"]
        ended = f"{measure(answers, 'ended'):.0%}"
        seeds = str(len(answers))
        ours = [_mean(score), f"{kl:.1f}", aim, _mean(gold)]
        rows.append([label, seeds, *ours, *shown, *rest, ended])
    beta = f"{results.settings.beta:g}"
    header = ["", "seeds", "score", "KL", f"score \u2212 {beta} KL", "second reward model"]
    header += ["wins over SFT", "by the second", "tokens", "repetition", "ended"]
    note = (
        "The second reward model, from other pairs with another seed, is the check against "
        "over-optimisation: no method learnt from it. Intervals are over prompts, Wilson's for win "
        "rates; seeds are averaged prompt by prompt. The KL of best of 8 is its upper bound."
    )
    return f"## Test prompts\n\n{table(header, rows)}\n\n{note}"


def _equal_kl(methods: Sequence[Method]) -> str:
    from marlhf.report.measures import score_at_kl

    drawn = [(m, g) for m, g in zip(methods, groups(methods)) if m.kls]
    rows: list[list[str]] = []
    base = next((m for m, _ in drawn if m.name == "ppo"), None)
    for method, group in drawn:
        cells = [score_at_kl(group, level) for level in LEVELS]
        shown = ["" if math.isnan(x) else f"{x:.2f}" for x in cells]
        beside = ""
        if base is not None and method is not base:
            level = common_kl(base, method)
            ahead = ahead_at(base, method, level)
            if not math.isnan(ahead.mean):
                beside = f"{ahead.text('{:+.2f}'.format)} at {level:.1f}"
        rows.append([method.label, *shown, beside.replace("-", "\u2212")])
    header = ["score where the KL first passes", *map(str, LEVELS), "over PPO at a common KL"]
    note = (
        "Read from the curves of held-out prompts. A run that moves fast passes a KL long before "
        "it has settled, so this favours slow ones; the test table's score less beta times KL "
        "compares where they end. Intervals are bootstrapped over prompts and seeds; one seed has "
        "no spread of its own."
    )
    return f"## Score at equal KL\n\n{table(header, rows)}\n\n{note}"


def _pace(results: Results, methods: Sequence[Method]) -> str:
    base = next((m for m in methods if m.name == "ppo" and m.curves), None)
    if base is None:
        return ""
    rows: list[list[str]] = []
    for method in methods:
        if not method.curves:
            continue
        most, all_of_it = steps_to(base, method), steps_to(base, method, 1.0)
        second = results.step_seconds(method.name)
        row = [method.label]
        for steps in (most, all_of_it):
            row.append(_reached(steps, "{:.0f}"))
            if results.timing:
                row.append(_reached(steps, "{:.0f} s", times=second))
        rows.append(row)
    seconds = ["seconds"] if results.timing else []
    header = ["", "steps to nine tenths", *seconds, "steps to PPO's final score", *seconds]
    note = (
        "PPO's final score is the mean of its last three evaluations; nine tenths are of its gain "
        "over SFT, since on a flat curve noise decides who is first at all of it. PPO's own row "
        "says when it was first there. Bootstrapped over prompts and seeds."
    )
    if results.timing:
        note += (
            " Runs shared the GPU, so seconds are steps times the seconds of a step that ran "
            "alone (below)."
        )
    return f"## How soon\n\n{table(header, rows)}\n\n{note}"


def _critics(results: Results, methods: Sequence[Method]) -> str:
    """How much of the returns critics foresee: what credit by action rests on."""
    quarter = max(1, results.settings.steps // 4)
    ranges = [(i * quarter + 1, (i + 1) * quarter) for i in range(4)]
    rows: list[list[str]] = []
    for method in methods:
        found = [(r["step"], r[EXPLAINED]) for m in method.runs for r in m.train if EXPLAINED in r]
        if found:
            parts = [[x for step, x in found if low <= step <= high] for low, high in ranges]
            cells = [f"{statistics.median(x):.2f}" if x else "" for x in parts]
            rows.append([method.label, *(cell.replace("-", "\u2212") for cell in cells)])
    if not rows:
        return ""
    header = ["explained variance in steps", *(f"{low} to {high}" for low, high in ranges)]
    note = (
        "Medians. 1 would be a critic that foresees all of what follows, 0 one that knows nothing "
        "but the mean; below 0 it misleads, and advantages are mostly its mistakes. What follows "
        "is partly the critic's own guess, the more so the shorter lambda reaches, so only rows of "
        "the same reach compare."
    )
    return f"## Critics\n\n{table(header, rows)}\n\n{note}"


def _reached(steps: Interval, form: str, times: float = 1.0) -> str:
    if math.isinf(steps.mean):
        return "not reached"
    return steps.text(lambda x: "never" if math.isinf(x) else form.format(times * x))


def _tried(results: Results) -> str:
    settings = results.settings
    found = objectives(settings)
    if not found:
        return ""
    rows: list[list[str]] = []
    for name, (method, rate) in tries(settings).items():
        family = FAMILIES[method]
        if (family, rate) not in found:
            continue
        lines = validation_lines(settings, f"tldr/{name}")
        score = interval(results.scores(lines, "reward"))
        taken = "taken" if chosen_rate(settings, family) == rate else ""
        own = rate / DPO_SLOWER if method == "dpo" else rate
        shown = [f"{own:g}", _mean(score), f"{measure([lines], 'kl'):.1f}"]
        rows.append([LABELS[method], *shown, f"{found[family, rate]:.2f}", taken])
    ran = {m: family for m, family in FAMILIES.items() if results.method(m).finished}
    uses = "; ".join(
        " \u00b7 ".join(LABELS[m] for m, each in ran.items() if each == family)
        for family in dict.fromkeys(ran.values())
    )
    header = ["tried", "learning rate", "score", "KL", "score \u2212 beta KL", ""]
    note = (
        f"{settings.try_steps} steps each (DPO: one pass over its pairs), seed 0, validation "
        f"prompts. Methods that share a choice: {uses}. Nothing else was tried: all other settings "
        "are those of the recipe. A short try favours high rates."
    )
    return f"## What was tried\n\n{table(header, rows)}\n\n{note}"


def _samples(results: Results, methods: Sequence[Method]) -> str:
    shown = [m for m in methods if m.name in SHOWN and m.answers]
    if not shown or not results.sft:
        return ""
    lines = [
        "## Samples",
        "The first test prompts in the order of their keys, first seed; posts that name intimate "
        "matters are passed over. The beginnings of posts are from the TL;DR data (CC BY 4.0).",
    ]
    fit = [i for i, x in enumerate(results.sft) if not INTIMATE.search(str(x["prompt"]))]
    for i in fit[:SAMPLES]:
        sft = results.sft[i]
        lines.append(f"> {_quote(_head(str(sft['prompt'])))}")
        for label, line in [("SFT", sft), *((m.label, m.answers[0][i]) for m in shown)]:
            score, gold = (results.scores([line], judge)[0] for judge in ("reward", "gold"))
            said = _quote(str(line["response"]).strip())
            lines.append(f"- **{label}** (score {score:.2f}, second {gold:.2f}): {said}")
    return "\n\n".join(lines).replace("\n\n- ", "\n- ")


def _quote(words: str) -> str:
    """Text of posts and models as text: no Markdown, HTML or code of its own."""
    flat = " ".join(words.split())
    for mark in "\\`*_[]<>|#":
        flat = flat.replace(mark, f"\\{mark}" if mark not in "<>`" else "'")
    return flat


def _head(prompt: str, size: int = 160) -> str:
    post = prompt.removesuffix("TL;DR:").strip()
    return post if len(post) <= size else f"{post[:size].rstrip()} ..."


def _gpu(results: Results) -> str:
    timing = results.timing
    if not timing:
        return ""
    phases = ("rollout", "score", "credit", "update", "step")
    limit: dict[str, Any] = timing["limit"]
    batch = results.settings.batch
    rows: list[list[str]] = []
    for name, times in timing.items():
        if name == "limit":
            continue
        cells = [f"{times.get(f'time/{phase}', math.nan):.3f}" for phase in phases]
        samples = batch * (RLOO_SAMPLES if name == "rloo" else 1)
        rate = samples / times["time/step"]
        tokens = samples * times["response_tokens"] / times["time/rollout"]
        memory = times.get("peak_memory_gib")
        peak = f"{memory:.1f}" if memory else ""
        rows.append([LABELS[name], *cells, f"{rate:.0f}", f"{tokens:,.0f}", peak])
    header = ["seconds", *phases, "samples a second", "tokens sampled a second", "peak GiB"]
    share = limit["seconds"] / timing["ppo"]["time/step"]
    note = (
        f"Medians of {results.settings.time_steps} steps, each run alone on one "
        f"{limit['device']}, torch {limit['torch']}: {batch} prompts of "
        f"{limit['prompt_tokens']:.0f} tokens in the mean. If nothing but matrix products "
        f"({limit['flops'] / 1e12:.3g} TFLOP/s measured) and reading weights and cache "
        f"({limit['bytes_per_second'] / 1e12:.3g} TB/s measured) took time, a step of PPO would "
        f"take {limit['seconds']:.3f} s: {share:.0%} of that limit is reached."
    )
    return f"## Where the GPU's time goes\n\n{table(header, rows)}\n\n{note}"


def _small(results: Results, task: str) -> str:
    """HH and MBPP: one seed of PPO and of macro actions."""
    title = {"hh": "HH dialogues", "mbpp": "MBPP, unit tests as the reward"}[task]
    folder, rows = results.folder / task, list[list[str]]()
    named = [("SFT", folder / "sft")]
    named += [(m.label, m.runs[0].path) for m in results.methods(task)]
    if task == "mbpp":
        for label, path in named:
            found = read_summary(path)
            if found:
                whole = found.rows[-1]
                cells = [_share(*whole.pass_at[k][:3]) for k in found.ks]
                rows.append([label, str(whole.problems), *cells, *_ends(path)])
        header = ["", "problems", "pass@1", "pass@5", "held-out reward", "KL"]
    else:
        sft = results.answers(folder / "sft")
        scores = [line["scores"]["reward"] for line in sft]
        if len(scores) < 2:
            return ""
        middle, spread = interval(scores).mean, max(_deviation(scores), 1e-9)
        for label, path in named:
            lines = results.answers(path)
            if not lines:
                continue
            score = interval([(x["scores"]["reward"] - middle) / spread for x in lines])
            wins = "" if label == "SFT" else _share(*win_rate([lines], sft, "reward")[:3])
            rest = [f"{measure([lines], key):.1f}" for key in ("kl", "length")]
            rows.append([label, _mean(score), *rest, wins])
        header = ["", "score", "KL", "tokens", "wins over SFT"]
    if not rows:
        return ""
    steps = results.settings.small_steps
    note = f"One seed, {steps} steps; intervals are over prompts and say nothing of other seeds."
    return f"## {title}\n\n{table(header, rows)}\n\n{note}"


def _ends(path: Path) -> list[str]:
    run = read_run(path)
    numbers = [run.final(f"eval/{key}") for key in ("score", "kl")]
    return ["" if math.isnan(x) else f"{x:.2f}" for x in numbers]


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def _mean(value: Interval) -> str:
    return value.text("{:.2f}".format).replace("-", "\u2212")


def _share(share: float, low: float, high: float) -> str:
    return f"{100 * share:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
