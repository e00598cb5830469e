"""A text with its macro actions marked, to see what a rule does."""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import torch

from marlhf.core import Segmenter, needs
from marlhf.core.segmenters import Need
from marlhf.data.rows import DataError
from marlhf.models.forward import token_stats
from marlhf.models.load import load_policy, load_tokenizer
from marlhf.models.sequences import Sequences
from marlhf.spans.apply import segment_response
from marlhf.spans.parser import build_parser
from marlhf.spans.phrases import Phrase

COLOURS = (44, 42, 45, 46, 43)  # ANSI backgrounds, in turn


def cut_text(
    text: str, rule: Segmenter, *, tokenizer: str, model: str | None, seed: int
) -> list[list[str]]:
    """The text of each token of each macro action."""
    if not text:
        raise DataError("The text is empty.")
    if needs(rule, "values"):
        raise DataError("The values of a critic are known while it trains: no text shows them.")
    of_model: tuple[Need, ...] = ("ref_logprobs", "logprobs", "entropy")
    if model is None and any(needs(rule, what) for what in of_model):
        raise DataError("Perplexity, surprise and entropy are those of a model: give --model.")
    tok = load_tokenizer(model or tokenizer)
    encoded = tok(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if not ids:
        raise DataError("The tokenizer makes no tokens of this text: it is all white space.")
    logprobs = entropy = None
    if model is not None:
        before = tok.eos_token_id if tok.bos_token_id is None else tok.bos_token_id
        whole = Sequences.from_lists([[cast(int, before)]], [ids], 0)
        with torch.no_grad():
            logprobs, entropy = token_stats(load_policy(model), whole, entropy=True)
    starts = segment_response(
        rule, ids, tok, seed=seed, ref_logprobs=logprobs, logprobs=logprobs, entropy=entropy
    )
    # Each character is shown with one token: where several tokens make up a character it would
    # otherwise repeat, and white space that no token has would be lost.
    ends = [*accumulate((end for _, end in offsets[:-1]), max), len(text)]
    pieces = [text[a:b] for a, b in zip([0, *ends], ends)]
    actions: list[list[str]] = []
    for piece, start in zip(pieces, starts):
        if start:
            actions.append([])
        actions[-1].append(piece)
    return actions


def draw_trees(text: str, parser: str) -> list[str]:
    """The tree of each sentence or statement, in brackets.

    >>> draw_trees("The fox met a hungry owl.", "english")
    ['(S (S (NP The fox) (VP met (NP a hungry owl))) .)']
    """
    [phrases] = build_parser(parser)([text])
    trees: list[str] = []
    open_: list[Phrase] = []
    for phrase, after in zip(phrases, [*phrases[1:], None]):
        while open_ and open_[-1].end <= phrase.begin:
            open_.pop()
            trees[-1] += ")"
        if not open_:
            trees.append("")
        gap = " " if trees[-1] else ""
        if after is not None and after.begin < phrase.end:  # it has parts
            trees[-1] += f"{gap}({phrase.label or '-'}"
            open_.append(phrase)
        else:
            trees[-1] += gap + text[phrase.begin : phrase.end].replace("\n", "\\n")
        if after is None or (open_ and after.begin >= open_[0].end):
            trees[-1] += ")" * len(open_)
            open_.clear()
    return trees


def paint(actions: list[list[str]], *, colour: bool) -> str:
    """Macro actions on alternating backgrounds, or between bars where there is no colour."""
    texts = ["".join(action) for action in actions]
    if not colour:
        return "|".join(texts)
    painted = []
    for i, text in enumerate(texts):
        code = f"\x1b[30;{COLOURS[i % len(COLOURS)]}m"
        painted.append(code + text.replace("\n", f"\x1b[0m\n{code}") + "\x1b[0m")
    return "".join(painted)
