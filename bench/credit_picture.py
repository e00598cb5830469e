"""The picture of README: one response coloured by credit, PPO above, macro actions below.

    marlhf run toy
    python bench/credit_picture.py docs/images --run runs/toy/ppo --step 32 --response 2
    python bench/credit_picture.py docs/images    # draws the stored numbers again

Both rows have the same response, rewards and critic. Only the macro actions differ.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

RULES = {
    "PPO: one credit for each token": 1,
    "Macro actions of five tokens: one credit for each": 5,
}
LINE, CHAR, HEIGHT, LEFT = 104, 8.0, 24, 14
"""Characters per line; width of one; height of a line; left margin."""
COLOURS = {True: (0, 114, 178), False: (213, 94, 0)}
"""Blue for credit above zero, orange below."""


def measure(run: Path, step: int, response: int) -> dict[str, Any]:
    """The tokens of a response of a run, and their advantages by each rule."""
    import torch

    from marlhf.core import NGram, segment
    from marlhf.credit.measure import credit_of
    from marlhf.credit.state import open_state, sample_batch
    from marlhf.data.encode import decode
    from marlhf.train.ppo import assign_credit

    state = open_state(run, step=step, device="cpu")
    experience, examples = sample_batch(state, 0, 0, most=response + 1)
    own = credit_of(state, experience, torch.Generator().manual_seed(0))
    seen = experience.responses(state.models.vocabulary, torch.Generator().manual_seed(0))
    tokenizer, tokens = state.models.tokenizer, experience.response_tokens()[response]
    credit: dict[str, list[float]] = {}
    for n in RULES.values():
        given = assign_credit(own.rewards, own.values, segment(NGram(n), seen), state.config)
        row = given.advantages[response, : len(tokens)].tolist()
        credit[str(n)] = [round(value, 3) for value in row]
    return {
        "lam": state.config.lam,
        "step": step,
        "prompt": decode(tokenizer, examples[response].prompt).strip(),
        "score": round(float(experience.scores[response]), 2),
        "tokens": [decode(tokenizer, [token]).strip() or "(end)" for token in tokens],
        "credit": credit,
    }


def picture(data: dict[str, Any]) -> str:
    top = max(abs(value) for row in data["credit"].values() for value in row)
    drawn: list[str] = []
    y = 26.0
    for title, n in RULES.items():
        drawn.append(f'<text class="title" x="{LEFT}" y="{y:g}">{escape(title)}</text>')
        cells, y = paragraph(data["tokens"], data["credit"][str(n)], n, y + 8, top)
        drawn += [*cells, ""]
        y += 36
    legend = (
        f"Orange: worse than the critic expected. Blue: better. Deepest: {top:.1f}. "
        f"The offline task, step {data['step']}, lambda {data['lam']:g}."
    )
    drawn.append(f'<text class="note" x="{LEFT}" y="{y - 6:g}">{legend}</text>')
    width, height = 2 * LEFT + LINE * CHAR, y + 6
    size = f"0 0 {width:g} {height:g}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">
<title>One response coloured by credit: each token by PPO, groups of five by macro actions</title>
<style>
text {{ font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1d2127 }}
.title {{ font: 600 15px system-ui, "Segoe UI", Arial, sans-serif }}
.note {{ font: 12px system-ui, "Segoe UI", Arial, sans-serif; fill: #5d6673 }}
.value {{ font: 10.5px system-ui, "Segoe UI", Arial, sans-serif; fill: #5d6673 }}
</style>
<rect width="100%" height="100%" fill="#fdfdfc"/>
{chr(10).join(filter(None, drawn))}
</svg>
"""


def paragraph(
    tokens: list[str], credit: list[float], n: int, y: float, top: float
) -> tuple[list[str], float]:
    """Tokens from left to right; a line breaks between macro actions, whose credit is above."""
    drawn: list[str] = []
    column, gap = 0, 5 if n == 1 else 17
    y += gap
    for start in range(0, len(tokens), n):
        words = tokens[start : start + n]
        size = sum(len(word) + 1 for word in words)
        if column + size > LINE:
            column, y = 0, y + HEIGHT + gap
        if n > 1:
            left = LEFT + column * CHAR
            number = f"{credit[start]:+.1f}".replace("-", "\u2212")
            drawn.append(f'<text class="value" x="{left:g}" y="{y - 4:g}">{number}</text>')
            box = f'x="{left:g}" y="{y:g}" width="{size * CHAR - 3:g}" height="{HEIGHT}" rx="3"'
            drawn.append(f'<rect {box} fill="{colour(credit[start], top)}"/>')
        for word, value in zip(words, credit[start : start + n], strict=True):
            left, wide = LEFT + column * CHAR, (len(word) + 1) * CHAR
            if n == 1:
                box = f'x="{left:g}" y="{y:g}" width="{wide - 1:g}" height="{HEIGHT}" rx="3"'
                drawn.append(f'<rect {box} fill="{colour(value, top)}"/>')
            place = f'x="{left + 3:g}" y="{y + 16:g}" textLength="{len(word) * 7.8:g}"'
            drawn.append(f"<text {place}>{escape(word)}</text>")
            column += len(word) + 1
    return drawn, y + HEIGHT


def colour(value: float, top: float) -> str:
    """White at zero; three quarters of the full colour at the largest credit."""
    share = 0.75 * abs(value) / top
    mixed = [round(255 + (full - 255) * share) for full in COLOURS[value > 0]]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", type=Path, help="measure a PPO run anew")
    parser.add_argument("--step", type=int, default=32)
    parser.add_argument("--response", type=int, default=2)
    args = parser.parse_args()
    numbers = args.folder / "credit.json"
    if args.run:
        data = measure(args.run, args.step, args.response)
        numbers.write_text(json.dumps(data) + "\n", encoding="utf-8")
    file = args.folder / "credit.svg"
    file.write_text(picture(json.loads(numbers.read_text("utf-8"))), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
