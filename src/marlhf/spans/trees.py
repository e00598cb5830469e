"""Trees over words, as constituency parsers give them, turned into phrases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from marlhf.spans.phrases import ParserError, Phrase, nested


def tree_phrases(tree: Any, places: Sequence[tuple[int, int]]) -> list[Phrase]:
    """A tree over words as phrases over characters; both kinds of tree are read."""
    phrases: list[Phrase] = []
    number = count()

    def visit(node: Any) -> tuple[int, int]:
        # stanza's have children and a label; nltk's are lists with a method for it, leaves strings
        children: Any = () if isinstance(node, str) else getattr(node, "children", node)
        if isinstance(node, str) or not children:
            at = next(number)
            begin, end = places[at]
            phrases.append(Phrase(begin, end))
            return begin, end
        label: Any = node.label() if callable(node.label) else node.label
        at = len(phrases)
        ends = [visit(child) for child in children]
        begin, end = ends[0][0], ends[-1][1]
        if len(ends) > 1:  # ROOT over S, NP over NN: the same characters once
            phrases.insert(at, Phrase(begin, end, label))
        return begin, end

    whole = visit(tree)
    if next(number) != len(places):
        raise ParserError(f"The tree of a sentence of {len(places)} words has other words.")
    return nested([Phrase(*whole, "S"), *phrases])
