"""The picture of docs/algorithm.md: what a macro action is, and how far a reward's credit reaches.

    python bench/docs_pictures.py docs/images

The weights are those of `macro_gae` itself: the advantage of each token where the only reward is 1
at the end and the critic says 0 everywhere.
"""

from __future__ import annotations

import argparse
from html import escape
from itertools import pairwise
from pathlib import Path

import torch

from marlhf.core import NGram, Responses, macro_gae, segment

TEXT = "My friend serves used tea bags even to visitors . How do I say so ?"
WORDS = TEXT.split()
LAM = 0.8
"""Smaller than the usual 0.95, so that sixteen tokens show what hundreds would."""
CELL, LEFT, BAR = 52, 20, 64
COLOURS = ("#cfe3f1", "#f6dccb")


def credit(n: int) -> list[float]:
    """The advantage of each token with macro actions of `n` tokens."""
    size = len(WORDS)
    mask = torch.ones(1, size, dtype=torch.bool)
    rewards = torch.zeros(1, size)
    rewards[0, -1] = 1.0
    segments = segment(NGram(n), Responses(torch.zeros(1, size, dtype=torch.long), mask))
    advantages, _ = macro_gae(rewards, torch.zeros(1, size), segments, lam=LAM)
    return advantages[0].tolist()


def row(title: str, n: int, top: int) -> list[str]:
    """One way to credit: the tokens with their macro actions, and a bar of credit on each."""
    drawn = [f'<text class="title" x="{LEFT}" y="{top}">{escape(title)}</text>']
    base = top + 26 + BAR
    for i, (word, weight) in enumerate(zip(WORDS, credit(n), strict=True)):
        x, action = LEFT + i * CELL, i // n
        height = BAR * weight
        drawn += [
            f'<rect x="{x + 14}" y="{base - height:.1f}" width="{CELL - 30}" '
            f'height="{height:.1f}" fill="#0072b2"/>',
            f'<text class="value" x="{x + CELL / 2 - 1}" y="{base - height - 4:.1f}">'
            f"{weight:.2f}</text>",
            f'<rect x="{x}" y="{base + 4}" width="{CELL}" height="26" '
            f'fill="{COLOURS[action % 2]}"/>',
            f'<text class="word" x="{x + CELL / 2}" y="{base + 21}">{escape(word)}</text>',
        ]
        if i % n == 0:
            drawn.append(f'<path class="bar" d="M{x} {base + 2}v30"/>')
    # One arrow for each step that the reward travels back.
    starts = [LEFT + i * CELL for i in range(0, len(WORDS), n)]
    ends = [*starts[1:], LEFT + len(WORDS) * CELL]
    middles = [(a + b) / 2 for a, b in zip(starts, ends, strict=True)]
    for left, right in pairwise(middles):
        middle = (left + right) / 2
        drawn.append(
            f'<path class="arrow" marker-end="url(#head)" '
            f'd="M{right:g} {base + 34}Q{middle:g} {base + 52} {left + 3:g} {base + 36}"/>'
        )
    return drawn


def picture() -> str:
    width = 2 * LEFT + len(WORDS) * CELL
    drawn = row("PPO: each token is an action, 15 steps back to the first", 1, 28)
    drawn += row("Macro PPO, n = 5: three steps back, one credit for all of its tokens", 5, 212)
    note = f"Credit for a reward of 1 after the last token; lambda = {LAM}, critic 0."
    drawn.append(f'<text class="note" x="{LEFT}" y="384">{note}</text>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 398" role="img">
<title>A reward goes back token by token in PPO, by macro actions in macro PPO</title>
<style>
text {{ font: 12px system-ui, "Segoe UI", Arial, sans-serif; fill: #1d2127 }}
.title {{ font-size: 15px; font-weight: 600 }}
.word, .value {{ text-anchor: middle }}
.value {{ font-size: 10.5px; fill: #5d6673 }}
.note {{ fill: #5d6673 }}
.bar {{ stroke: #1d2127; stroke-width: 2.5 }}
.arrow {{ stroke: #5d6673; fill: none }}
</style>
<defs><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6"
 orient="auto"><path d="M0 0L6 3L0 6Z" fill="#5d6673"/></marker></defs>
<rect width="100%" height="100%" fill="#fdfdfc"/>
{chr(10).join(drawn)}
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    file = parser.parse_args().folder / "macro-actions.svg"
    file.write_text(picture(), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
