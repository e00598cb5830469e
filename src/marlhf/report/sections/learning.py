"""Held-out numbers over steps and over seconds."""

from __future__ import annotations

from marlhf.report.curves import curve_figure
from marlhf.report.groups import Group
from marlhf.report.page import grid, section


def learning(policies: list[Group]) -> str:
    """Score beside gold, KL, length and repetition, over steps and over seconds."""
    measures = [
        ("Score", ("eval/score", "rl/score")),
        ("KL (nats per response)", ("eval/kl", "rl/kl")),
        ("Length (tokens)", ("eval/length", "rl/length")),
        ("Gold score", ("eval/gold",)),
        ("Repetition", ("eval/repetition",)),
        ("Win rate against SFT", ("eval/win_rate",)),
    ]
    by_step, by_time = (
        [curve_figure(title, policies, keys, x=x) for title, keys in measures[:count]]
        for x, count in (("step", len(measures)), ("seconds", 3))
    )
    held_out = any(group.curve("eval/score") for group in policies)
    source = "held-out prompts" if held_out else "training batches, as no evaluation was recorded"
    bands = "; bands span the seeds" if any(len(g.runs) > 1 for g in policies) else ""
    return section(
        "learning",
        "Learning",
        f"Higher score at the same KL and length is better; a score that rises only with KL, "
        f"length or repetition comes from them. On {source}{bands}.",
        "<h3>Over steps</h3>" if any(by_step) else "",
        grid(by_step),
        "<h3>Over seconds</h3>" if any(by_time) else "",
        grid(by_time),
    )
