"""Constituents from the dependencies that a spaCy pipeline finds, where spaCy is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from marlhf.spans.phrases import ParserError, Phrase, nested

SUBJECTS = frozenset({"nsubj", "nsubjpass", "nsubj:pass", "csubj", "csubjpass", "expl"})
LABELS = {"NOUN": "NP", "PROPN": "NP", "PRON": "NP", "ADP": "PP", "VERB": "VP", "AUX": "VP"}


class Word(NamedTuple):
    """A word of a sentence as a dependency parser sees it."""

    begin: int  # characters
    end: int
    head: int  # its place among the words; its own for the root
    relation: str
    tag: str  # universal part of speech


def constituents(words: Sequence[Word]) -> list[Phrase]:
    """The phrases of one sentence.

    A word and all that depends on it is a phrase. Added to these are phrases that a constituency
    tree has and dependencies do not spell out: the noun phrase without what follows its
    noun, the verb phrase without its subject, the clause without its conjunction, and the first
    of several that are joined by `and`.
    """
    count = len(words)
    first, last = list(range(count)), list(range(count))
    children: list[list[int]] = [[] for _ in words]
    for i, word in enumerate(words):
        if word.head != i:
            children[word.head].append(i)
        at, steps = i, 0
        while words[at].head != at and steps < count:  # the reach of all above it
            at, steps = words[at].head, steps + 1
            first[at], last[at] = min(first[at], i), max(last[at], i)

    phrases: list[Phrase] = [Phrase(words[0].begin, words[-1].end, "S")] if words else []

    def add(begin: int, end: int, label: str) -> None:
        if end > begin:
            phrases.append(Phrase(words[begin].begin, words[end].end, label))

    for i, word in enumerate(words):
        label = LABELS.get(word.tag, "XP")
        verbal = label == "VP"
        end = last[i]
        while end > i and words[end].relation == "punct" and words[end].head == i:
            end -= 1
        joined = [c for c in children[i] if c > i and words[c].relation in ("cc", "conj")]
        alone = end  # the last word before anything joined to it
        if joined:
            alone = min(joined) - 1
            while alone > i and words[alone].relation == "punct" and words[alone].head == i:
                alone -= 1
        whole = "S" if verbal and first[i] < i else label
        add(first[i], last[i], whole)
        for stop in {end, alone}:
            add(first[i], stop, whole)
            if not verbal:
                continue
            lead = [c for c in children[i] if c < i]
            after = [last[c] + 1 for c in lead if words[c].relation in SUBJECTS]
            marks = [last[c] + 1 for c in lead if words[c].relation == "mark"]
            if marks:
                add(max(marks), stop, "S")
            if after:
                add(min(max(after), i), stop, "VP")
            add(i, stop, "VP")
        if label == "NP":
            add(first[i], i, "NP")
    phrases.extend(Phrase(word.begin, word.end) for word in words)
    return nested(phrases)


class SpacyParser:
    """Any spaCy pipeline with a dependency parser, such as `en_core_web_sm`, or its folder."""

    def __init__(self, name: str) -> None:
        try:
            import spacy  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ParserError(
                f"The parser spacy:{name} needs spaCy: pip install 'marlhf[spacy]'"
            ) from None
        try:
            self.pipeline: Any = spacy.load(name, exclude=["ner", "lemmatizer", "textcat"])
        except OSError:
            raise ParserError(
                f"spaCy has no pipeline {name!r} here. Get it: python -m spacy download {name}"
            ) from None
        if not {"parser", "dep_parser"} & set(self.pipeline.pipe_names):
            raise ParserError(
                f"The spaCy pipeline {name!r} has no dependency parser. Use one that has, such as "
                "en_core_web_sm."
            )

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]:
        return [
            [p for sentence in doc.sents for p in constituents(_words(sentence))]
            for doc in self.pipeline.pipe(texts)
        ]


def _words(sentence: Any) -> list[Word]:
    """The words of a sentence, without spaCy's tokens of white space."""
    tokens = [token for token in sentence if not token.is_space]
    place = {token.i: at for at, token in enumerate(tokens)}
    return [
        Word(
            token.idx,
            token.idx + len(token.text),
            place.get(token.head.i, at),
            token.dep_,
            token.pos_,
        )
        for at, token in enumerate(tokens)
    ]
