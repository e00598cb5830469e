"""Responses of each run to the same prompts, with their macro actions; and where an environment
answers, how episodes went, and some of them turn by turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from markupsafe import Markup

from marlhf.intervals import mean, quantiles, thin
from marlhf.report.groups import START_COLOUR, Group
from marlhf.report.numbers import percent, signed
from marlhf.report.page import grid, heading, part, section
from marlhf.report.sections.curves import curve_figure, name_cell
from marlhf.report.tables import Column, table
from marlhf.runs.evaluations import opening_length, read_episode
from marlhf.runs.read import Row, number

MAX_PROMPTS = 12
MAX_ANSWERS = 8
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
    is_world: bool = False
    """Whether it is no action, but what the environment said between two turns."""


class ShownResponse(NamedTuple):
    """The response of one run to a prompt."""

    label: str
    colour: str
    sample: Row


Prompts = list[tuple[str, list[ShownResponse]]]
Span = tuple[str, str, str]
"""CSS classes, tooltip, text."""


def samples(policies: list[Group]) -> Markup:
    """Responses side by side: at the last step of each run, and before training."""
    prompts = _answers(policies)
    if not prompts:
        return Markup()
    shown = _within_budget(prompts)
    scales = _advantage_scales(shown)
    orders = _score_gaps(shown)
    articles = [
        (
            shortened(prompt),
            [_answer(each, scales.get(each.label, 1.0)) for each in thin(answers, MAX_ANSWERS)],
            [(i, ranks[at]) for i, (_, ranks) in enumerate(orders) if at in ranks],
        )
        for at, (prompt, answers) in enumerate(shown)
    ]
    buttons = [("as-recorded", "as recorded")]
    for i, (pair, _) in enumerate(orders):
        buttons += [(f"{name}-{i}", f"{name} {pair}") for name in ("largest", "smallest")]
    return section(
        "samples",
        part("shades", scales=scales),
        _example(shown, scales),
        part("orders", buttons=buttons) if orders else "",
        part("samples", shown=articles),
        several=any(len(group.runs) > 1 for group in policies),
    )


def _example(prompts: Prompts, scales: dict[str, float]) -> Markup:
    """One macro action in words: the one with the largest advantage in the first prompt."""
    candidates = [
        (macro.length > 1, abs(macro.advantage), answer.label, macro)
        for answer in prompts[0][1]
        for macro in macro_actions(answer.sample)
        if math.isfinite(macro.advantage) and macro.text.strip()
    ]
    if not candidates:
        return Markup()
    *_, label, macro = max(candidates, key=lambda each: each[:2])
    return part(
        "example",
        words=next(_spans([macro], scales[label])),
        label=label,
        size=macro.length,
        advantage=macro.advantage,
    )


def _answers(policies: list[Group]) -> Prompts:
    """Prompts with their answers, those that most runs answered first."""
    by_prompt: dict[tuple[float, str], list[ShownResponse]] = {}
    before: dict[tuple[float, str], ShownResponse] = {}
    for group in policies:
        rows = [row for row in group.runs[0].samples if isinstance(row.get("prompt"), str)]
        steps = [number(row.get("step")) for row in rows]
        last = max(filter(math.isfinite, steps), default=math.nan)
        for row, step in zip(rows, steps):
            key = (number(row.get("index", 0)), row["prompt"])
            if step == 0:  # without advantages: the critic had learnt nothing yet
                row = {name: value for name, value in row.items() if name != "advantages"}
                before.setdefault(key, ShownResponse("before RL", START_COLOUR, row))
            elif step == last:
                by_prompt.setdefault(key, []).append(ShownResponse(group.label, group.colour, row))
    for key, answer in before.items():
        by_prompt.setdefault(key, []).insert(0, answer)
    ordered = sorted(by_prompt.items(), key=lambda item: (-len(item[1]), item[0][0]))
    return [(prompt, answers) for (_, prompt), answers in ordered]


def _within_budget(prompts: Prompts) -> Prompts:
    kept: Prompts = []
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
    sampled = _sampled(sample, len(pieces))
    macros: list[Macro] = []
    for i, piece in enumerate(pieces[:MAX_PIECES]):
        speaker_changes = not macros or macros[-1].is_world == sampled[i]
        if speaker_changes or (sampled[i] and starts and starts[i]):
            advantage = number(advantages[i]) if advantages and sampled[i] else math.nan
            macros.append(Macro(str(piece), 1, advantage, not sampled[i]))
        else:
            last = macros[-1]
            macros[-1] = last._replace(text=last.text + str(piece), length=last.length + 1)
    return macros


def _sampled(sample: Row, length: int) -> list[bool]:
    """Which tokens of a response are the policy's: all, but for what an environment said."""
    episode = read_episode(sample)
    if episode is None:
        return [True] * length
    own = [False] * length
    for turn in episode["turns"]:
        start, stop = max(0, turn["start"]), min(turn["stop"], length)
        own[start:stop] = [True] * max(0, stop - start)
    return own


def _same_length(values: object, length: int) -> list[Any]:
    return values if isinstance(values, list) and len(values) == length else []


def _advantage_scales(prompts: Prompts) -> dict[str, float]:
    """The size of a large advantage of each run, so that one outlier does not pale the rest.

    Macro actions sum more rewards than tokens do: on a shared scale one run would look flat.
    """
    sizes: dict[str, list[float]] = {}
    for _, answers in prompts:
        for answer in answers:
            advantages = [abs(macro.advantage) for macro in macro_actions(answer.sample)]
            sizes.setdefault(answer.label, []).extend(filter(math.isfinite, advantages))
    return {label: max(quantiles(each, [0.95])[0], 1e-9) for label, each in sizes.items() if each}


def _score_gaps(prompts: Prompts) -> list[tuple[str, dict[int, int]]]:
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


def _answer(answer: ShownResponse, scale: float) -> dict[str, object]:
    """What the page shows of a response: its macro actions and its numbers."""
    sample = answer.sample
    macros, pieces = macro_actions(sample), sample.get("pieces")
    return answer._asdict() | {
        "spans": list(_spans(macros, scale)),
        "hidden": len(pieces) - MAX_PIECES if isinstance(pieces, list) else 0,
        "numbers": {key: number(sample.get(key)) for key in ("score", "gold", "kl", "length")},
        "actions": sum(not macro.is_world for macro in macros),
    }


def _spans(macros: list[Macro], scale: float) -> Iterator[Span]:
    """Macro actions in the shade of their advantage, or in turn where none was recorded."""
    has_bars = any(macro.length > 1 for macro in macros if not macro.is_world)
    for i, macro in enumerate(macros):
        start = " m" if has_bars else ""
        words = macro.text[:MAX_RESPONSE_CHARS]
        if macro.length == 0:
            yield "", "", words
        elif macro.is_world:
            yield "world", "said by the environment", words
        elif math.isfinite(macro.advantage):
            shade = shade_of(macro.advantage, scale)
            size = f", {macro.length} tokens" if macro.length > 1 else ""
            yield f"{shade}{start}", f"advantage {signed(macro.advantage)}{size}", words
        else:
            yield f"{'ab'[i % 2]}{start}", "", words


def shade_of(advantage: float, scale: float) -> str:
    """The CSS class of an advantage: four shades of each sign."""
    level = min(4, math.ceil(4 * abs(advantage) / scale - 1e-9))
    return f"{'p' if advantage > 0 else 'n'}{level}" if level else "z"


def shortened(prompt: str) -> str:
    """A long prompt without its middle: the task is at its ends."""
    if len(prompt) <= MAX_PROMPT_CHARS:
        return prompt
    half = MAX_PROMPT_CHARS // 2
    return f"{prompt[:half]} [\u2026 {len(prompt) - 2 * half} characters \u2026] {prompt[-half:]}"


MAX_PLAYED = 4
"""Prompts whose conversations are shown, and runs at each."""
MAX_MESSAGES = 40
MEASURES = (
    Column("Success", "success", percent),
    Column("Turns", "turns"),
    Column("Tool calls", "tool_calls"),
    Column("Tool errors", "tool_errors"),
    Column("Tokens of the model", "length"),
    Column("Tokens of the world", "world_tokens"),
    Column("Cut at a limit", "cut_episodes", percent),
    Column("Failed", "failed_episodes", percent),
)
"""Means over episodes: on held-out prompts where they are recorded, else in training."""


def conversations(policies: Sequence[Group]) -> Markup:
    """Turns, success, tools and endings over training, and held-out conversations."""
    played = [group for group in policies if group.curve("rl/turns") or group.curve("eval/turns")]
    if not played:
        return Markup()
    keys = [(each.title, (f"eval/{each.name}", f"rl/{each.name}")) for each in MEASURES]
    shown = list(_shown(played))
    return section(
        "conversations",
        _table(played),
        grid([curve_figure(title, played, each) for title, each in keys]),
        heading("Turn by turn", "Held-out conversations at the last step.") if shown else "",
        part("conversations", shown=shown) if shown else "",
        several=any(len(group.runs) > 1 for group in played),
    )


def _table(played: Sequence[Group]) -> Markup:
    """The last numbers of each run."""
    known = [m for m in MEASURES if any(math.isfinite(_last(group, m.name)) for group in played)]
    rows = [[name_cell(group), *(_last(group, m.name) for m in known)] for group in played]
    return table([Column("Run", "run"), *known], rows, file="conversations")


def _last(group: Group, key: str) -> float:
    held_out = group.final(f"eval/{key}")
    return held_out if math.isfinite(held_out) else group.final(f"rl/{key}")


def _shown(played: Sequence[Group]) -> Iterator[list[dict[str, Any]]]:
    """For each prompt the conversations of the runs, at the last step of each."""
    by_prompt: dict[float, list[tuple[Group, Row]]] = {}
    for group in played:
        rows = [row for row in group.runs[0].samples if read_episode(row)]
        last = max((number(row.get("step")) for row in rows), default=math.nan)
        for row in rows:
            if number(row.get("step")) == last:
                by_prompt.setdefault(number(row.get("index", 0)), []).append((group, row))
    for index in sorted(by_prompt)[:MAX_PLAYED]:
        yield [_conversation(group, row) for group, row in by_prompt[index][:MAX_PLAYED]]


def _conversation(group: Group, row: Row) -> dict[str, Any]:
    """What the page shows of a conversation: its messages, and what each turn is credited with."""
    episode = read_episode(row)
    assert episode is not None
    messages, turns = episode["messages"], iter(episode["turns"])
    scale, first = _scale(group), opening_length(messages, len(episode["turns"]))
    shown: list[tuple[str, str, dict[str, Any] | None]] = []
    for i, message in enumerate(messages[:MAX_MESSAGES]):
        is_own = i >= first and message["role"] == "assistant"
        credit = _credit(row, next(turns), scale) if is_own else None
        shown.append((message["role"], shortened(message["content"]), credit))
    hidden = len(messages) - len(shown)
    score = number(row.get("score"))
    return {"group": group, "episode": episode, "score": score, "messages": shown, "hidden": hidden}


def _credit(row: Row, turn: dict[str, Any], scale: float) -> dict[str, Any]:
    """The shade of a turn, its advantage, its reward and its size."""
    advantage = _advantage(row, turn)
    shade = shade_of(advantage, scale) if math.isfinite(advantage) else "z"
    size, reward = turn["stop"] - turn["start"], number(turn.get("reward"))
    return {"shade": shade, "advantage": advantage, "reward": reward, "size": size}


def _advantage(row: Row, turn: dict[str, Any]) -> float:
    """The mean over a turn's tokens; they are all alike where turns are macro actions."""
    advantages = row.get("advantages")
    if not isinstance(advantages, list):
        return math.nan
    return mean([number(value) for value in advantages[max(0, turn["start"]) : turn["stop"]]])


def _scale(group: Group) -> float:
    """The size of a large advantage of the run."""
    sizes = [
        abs(advantage)
        for row in group.runs[0].samples
        if (episode := read_episode(row))
        for turn in episode["turns"]
        if math.isfinite(advantage := _advantage(row, turn))
    ]
    return max(quantiles(sizes, [0.95])[0], 1e-9) if sizes else 1.0
