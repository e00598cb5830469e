"""Responses of each run to the same prompts, with their macro actions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from marlhf.intervals import quantiles, thin
from marlhf.report.groups import START_COLOUR, Group
from marlhf.report.page import chip, num, section, signed, text
from marlhf.runs.read import Row, number

MAX_PROMPTS = 12
MAX_PIECES = 600
MAX_SPANS = 20_000
"""On the whole page: with one span per token, long responses of many runs add up."""
MAX_ORDERS = 3
"""Pairs of runs that prompts can be sorted by; report.css has rules for as many."""
MAX_PROMPT_CHARS = 1200
MAX_RESPONSE_CHARS = 4000


class Macro(NamedTuple):
    """The text of one macro action, its number of tokens and its advantage (or NaN)."""

    text: str
    length: int
    advantage: float


class ShownResponse(NamedTuple):
    """The response of one run to a prompt."""

    label: str
    colour: str
    sample: Row


def samples(policies: list[Group]) -> str:
    """Responses side by side: at the last step of each run, and before training."""
    prompts = _answers(policies)
    if not prompts:
        return ""
    shown = _within_budget(prompts)
    scales = _advantage_scales(shown)
    orders = _score_gaps(shown)
    articles = "".join(
        _sample(prompt, answers, scales, [ranks.get(i) for _, ranks in orders])
        for i, (prompt, answers) in enumerate(shown)
    )
    note = (
        " Of several seeds, the first is shown." if any(len(g.runs) > 1 for g in policies) else ""
    )
    return section(
        "samples",
        "Samples",
        f"One prompt, each run's response at its last step. A bar begins a macro action; without "
        f"bars every token is one.{note}",
        _key(scales),
        _example(shown, scales),
        _orders(orders),
        f'<div class="samples">{articles}</div>',
    )


def _key(scales: dict[str, float]) -> str:
    """What the shades mean: by colour and, for the colour-blind, by underline."""
    if not scales:
        return '<p class="lead">Colours only separate neighbours: no advantages were recorded.</p>'
    better, worse = (
        "".join(f'<i class="{sign}{level}">{25 * level}%</i>' for level in (1, 2, 3, 4))
        for sign in ("p", "n")
    )
    large = ", ".join(f"{num(scale)} for {text(label)}" for label, scale in scales.items())
    return (
        f'<p class="said shades"><span>{better} better than expected</span> '
        f"<span>{worse} worse, dotted underline</span></p>"
        f'<p class="said shades">Shades are shares of a large advantage of the run: {large}. '
        "Hover to see the advantage.</p>"
    )


def _example(prompts: list[tuple[str, list[ShownResponse]]], scales: dict[str, float]) -> str:
    """One macro action in words: the one with the largest advantage in the first prompt."""
    candidates = [
        (macro.length > 1, abs(macro.advantage), answer.label, macro)
        for answer in prompts[0][1]
        for macro in macro_actions(answer.sample)
        if math.isfinite(macro.advantage) and macro.text.strip()
    ]
    if not candidates:
        return ""
    *_, label, macro = max(candidates, key=lambda each: each[:2])
    (span,) = _spans([macro], scales[label])
    better = macro.advantage > 0
    size = "one token" if macro.length == 1 else f"{macro.length} tokens"
    return (
        f'<p class="said shades">For example {span} is one macro action of {text(label)}, {size}, '
        f"with advantage {signed(macro.advantage)}: what followed was "
        f"{'better' if better else 'worse'} than the critic expected, so the update makes these "
        f"tokens {'more' if better else 'less'} likely.</p>"
    )


def _answers(policies: list[Group]) -> list[tuple[str, list[ShownResponse]]]:
    """Prompts with their answers, those that most runs answered first."""
    by_prompt: dict[tuple[float, str], list[ShownResponse]] = {}
    before: dict[tuple[float, str], ShownResponse] = {}
    for group in policies:
        rows = [row for row in group.runs[0].samples if isinstance(row.get("prompt"), str)]
        steps = [number(row.get("step")) for row in rows]
        last = max(filter(math.isfinite, steps), default=math.nan)
        for row, step in zip(rows, steps):
            key = (number(row.get("index", 0)), row["prompt"])
            if step == 0:
                before.setdefault(key, ShownResponse("before RL", START_COLOUR, row))
            elif step == last:
                by_prompt.setdefault(key, []).append(ShownResponse(group.label, group.colour, row))
    for key, answer in before.items():
        by_prompt.setdefault(key, []).insert(0, answer)
    ordered = sorted(by_prompt.items(), key=lambda item: (-len(item[1]), item[0][0]))
    return [(prompt, answers) for (_, prompt), answers in ordered]


def _within_budget(
    prompts: list[tuple[str, list[ShownResponse]]],
) -> list[tuple[str, list[ShownResponse]]]:
    kept: list[tuple[str, list[ShownResponse]]] = []
    spans = 0
    for prompt, answers in prompts[:MAX_PROMPTS]:
        spans += sum(len(macro_actions(answer.sample)) for answer in answers)
        if kept and spans > MAX_SPANS:
            break
        kept.append((prompt, answers))
    return kept


def macro_actions(sample: Row) -> list[Macro]:
    """The response split into its macro actions; one piece where none were recorded."""
    pieces = sample.get("pieces")
    if not isinstance(pieces, list) or not pieces:
        response = sample.get("response")
        return [Macro(response if isinstance(response, str) else "", 0, math.nan)]
    starts = _same_length(sample.get("starts"), len(pieces))
    advantages = _same_length(sample.get("advantages"), len(pieces))
    macros: list[Macro] = []
    for i, piece in enumerate(pieces[:MAX_PIECES]):
        if not macros or (starts and starts[i]):
            macros.append(Macro(str(piece), 1, number(advantages[i]) if advantages else math.nan))
        else:
            last = macros[-1]
            macros[-1] = last._replace(text=last.text + str(piece), length=last.length + 1)
    return macros


def _same_length(values: object, length: int) -> list[Any]:
    return values if isinstance(values, list) and len(values) == length else []


def _advantage_scales(prompts: list[tuple[str, list[ShownResponse]]]) -> dict[str, float]:
    """The size of a large advantage of each run, so that one outlier does not pale the rest.

    Macro actions sum more rewards than tokens do: on a shared scale one run would look flat.
    """
    sizes: dict[str, list[float]] = {}
    for _, answers in prompts:
        for answer in answers:
            advantages = [abs(macro.advantage) for macro in macro_actions(answer.sample)]
            sizes.setdefault(answer.label, []).extend(filter(math.isfinite, advantages))
    return {label: max(quantiles(each, [0.95])[0], 1e-9) for label, each in sizes.items() if each}


def _score_gaps(prompts: list[tuple[str, list[ShownResponse]]]) -> list[tuple[str, dict[int, int]]]:
    """For pairs of runs, the place of each prompt by their gap in score, largest first.

    Prompts without both scores have no place.
    """
    scores = [
        {answer.label: number(answer.sample.get("score")) for answer in answers}
        for _, answers in prompts
    ]
    labels = list(dict.fromkeys(label for each in scores for label in each))
    pairs = list(combinations(labels, 2))
    pairs.sort(key=lambda pair: "before RL" in pair)  # runs against each other first
    orders: list[tuple[str, dict[int, int]]] = []
    for base, other in pairs[:MAX_ORDERS]:
        gaps = [each.get(other, math.nan) - each.get(base, math.nan) for each in scores]
        known = [i for i, gap in enumerate(gaps) if math.isfinite(gap)]
        known.sort(key=lambda i: -gaps[i])
        if len(known) > 1:
            orders.append((f"{other} \u2212 {base}", {i: rank for rank, i in enumerate(known)}))
    return orders


def _orders(orders: list[tuple[str, dict[int, int]]]) -> str:
    """Radio buttons for the order of prompts; report.css does the sorting."""
    if not orders:
        return ""
    buttons = [("as-recorded", "as recorded", " checked")]
    for i, (pair, _) in enumerate(orders):
        buttons += [(f"{name}-{i}", f"{name} {pair}", "") for name in ("largest", "smallest")]
    labels = "".join(
        f'<label><input type="radio" name="order" value="{value}"{checked}>{text(words)}</label>'
        for value, words, checked in buttons
    )
    return f'<fieldset class="orders"><legend>Sort by gap in score</legend>{labels}</fieldset>'


def _sample(
    prompt: str, answers: list[ShownResponse], scales: dict[str, float], ranks: list[int | None]
) -> str:
    shown = "".join(
        _answer(answer, scales.get(answer.label, math.nan)) for answer in thin(answers, 8)
    )
    places = ";".join(f"--gap{i}:{rank}" for i, rank in enumerate(ranks) if rank is not None)
    return (
        f'<article class="sample" style="{places}"><p class="prompt" dir="auto"><b>Prompt</b>'
        f'{text(_shortened(prompt))}</p><div class="answers">{shown}</div></article>'
    )


def _answer(answer: ShownResponse, scale: float) -> str:
    sample = answer.sample
    macros = macro_actions(sample)
    body = "".join(_spans(macros, scale))
    pieces = sample.get("pieces")
    hidden = len(pieces) - MAX_PIECES if isinstance(pieces, list) else 0
    if hidden > 0:
        body += f' <span class="none">and {hidden} more tokens</span>'
    facts = [
        f"{name} {num(number(sample.get(key)))}"
        for name, key in (("score", "score"), ("gold", "gold"), ("KL", "kl"))
        if math.isfinite(number(sample.get(key)))
    ]
    length = number(sample.get("length"))
    if math.isfinite(length):
        facts.append(f"{length:.0f} tokens")
    if len(macros) > 1 and hidden <= 0:
        facts.append(f"{len(macros)} macro actions")
    name = chip(answer.label, answer.colour)
    return (
        f'<div class="answer">{name}<p class="said" dir="auto">{body}</p>'
        f'<p class="facts">{" &middot; ".join(facts)}</p></div>'
    )


def _spans(macros: list[Macro], scale: float) -> Iterator[str]:
    """Tokens of a response are often single letters: attributes are kept short."""
    has_bars = any(macro.length > 1 for macro in macros)
    for i, macro in enumerate(macros):
        start = " m" if has_bars else ""
        words = text(macro.text[:MAX_RESPONSE_CHARS])
        if macro.length == 0:
            yield words
        elif math.isfinite(macro.advantage):
            level = min(4, math.ceil(4 * abs(macro.advantage) / scale - 1e-9))
            sign = "p" if macro.advantage > 0 else "n"
            shade = f"{sign}{level}" if level else "z"
            size = f", {macro.length} tokens" if macro.length > 1 else ""
            title = f"advantage {signed(macro.advantage)}{size}"
            yield f'<i class="{shade}{start}" title="{title}">{words}</i>'
        else:
            yield f'<i class="{"ab"[i % 2]}{start}">{words}</i>'


def _shortened(prompt: str) -> str:
    """A long prompt without its middle: the task is at its ends."""
    if len(prompt) <= MAX_PROMPT_CHARS:
        return prompt
    half = MAX_PROMPT_CHARS // 2
    return f"{prompt[:half]} [\u2026 {len(prompt) - 2 * half} characters \u2026] {prompt[-half:]}"
