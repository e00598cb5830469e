"""Runs with an environment: how episodes went, and some of them turn by turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from marlhf.intervals import mean, quantiles
from marlhf.report.groups import Group
from marlhf.report.page import Column, grid, heading, num, part, percent, section, signed, table
from marlhf.report.sections.curves import curve_figure, name_cell
from marlhf.report.sections.samples import shade_of, shortened
from marlhf.runs.evaluations import opening_length, read_episode
from marlhf.runs.read import Row, number

MAX_PROMPTS = 4
MAX_ANSWERS = 4
MAX_MESSAGES = 40
MEASURES = (
    ("Success", "success", percent),
    ("Turns", "turns", num),
    ("Tool calls", "tool_calls", num),
    ("Tool errors", "tool_errors", num),
    ("Tokens of the model", "length", num),
    ("Tokens of the world", "world_tokens", num),
    ("Cut at a limit", "cut_episodes", percent),
    ("Failed", "failed_episodes", percent),
)
"""Means over episodes: on held-out prompts where they are recorded, else in training."""


def conversations(policies: Sequence[Group]) -> Markup:
    """Turns, success, tools and endings over training, and held-out conversations."""
    played = [group for group in policies if group.curve("rl/turns") or group.curve("eval/turns")]
    if not played:
        return Markup()
    keys = [(title, (f"eval/{key}", f"rl/{key}")) for title, key, _ in MEASURES]
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
    values = [[_last(group, key) for _, key, _ in MEASURES] for group in played]
    known = [i for i in range(len(MEASURES)) if any(math.isfinite(row[i]) for row in values)]
    columns = [Column("Run", "run")]
    columns += [Column(MEASURES[i][0], MEASURES[i][1], MEASURES[i][2]) for i in known]
    rows = [[name_cell(group), *(row[i] for i in known)] for group, row in zip(played, values)]
    return table(columns, rows, file="conversations")


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
    for index in sorted(by_prompt)[:MAX_PROMPTS]:
        yield [_conversation(group, row) for group, row in by_prompt[index][:MAX_ANSWERS]]


def _conversation(group: Group, row: Row) -> dict[str, Any]:
    """What the page shows of a conversation: its messages, and what each turn is credited with."""
    episode = read_episode(row)
    assert episode is not None
    messages, turns = episode["messages"], iter(episode["turns"])
    scale, first = _scale(group), opening_length(messages, len(episode["turns"]))
    shown: list[tuple[str, str, str, list[str] | None]] = []
    for i, message in enumerate(messages[:MAX_MESSAGES]):
        shade, facts = "", None
        if i >= first and message["role"] == "assistant":
            shade, facts = _credit(row, next(turns), scale)
        shown.append((message["role"], shortened(message["content"]), shade, facts))
    facts = [f"score {num(score)}"] if math.isfinite(score := number(row.get("score"))) else []
    if isinstance(episode.get("success"), bool):
        facts.append("solved" if episode["success"] else "not solved")
    facts.append(f"{len(episode['turns'])} turns")
    facts.append(f"ended by {str(episode.get('reason', '')).replace('_', ' ')}")
    name = {"label": group.label, "colour": group.colour}
    return {**name, "facts": facts, "messages": shown, "hidden": len(messages) - len(shown)}


def _credit(row: Row, turn: dict[str, Any], scale: float) -> tuple[str, list[str]]:
    """The shade of a turn, and its advantage, reward and size in words."""
    facts: list[str] = []
    advantage, shade = _advantage(row, turn), "z"
    if math.isfinite(advantage):
        shade = shade_of(advantage, scale)
        facts.append(f"advantage {signed(advantage)}")
    if math.isfinite(reward := number(turn.get("reward"))):
        facts.append(f"reward {num(reward)}")
    size = turn["stop"] - turn["start"]
    return shade, [*facts, "one token" if size == 1 else f"{size} tokens"]


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
