"""English text as nested phrases, without a model: tag, chunk, attach.

Words get a kind from lists, endings and their neighbours (`words`); noun, verb and
prepositional groups are then read from left to right, and each takes what follows as far as it
belongs to it. It never fails: a word that fits nowhere stays alone. Macro actions are made of
phrases of two to four words, so those matter most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from marlhf.spans.phrases import Phrase, nested
from marlhf.spans.words import Word, split_sentences, tag, verb_follows

BE = frozenset(["am", "is", "are", "was", "were", "'m", "'re", "'s", "be", "been", "being"])
KEPT = frozenset(
    ["of", "about", "like", "between", "for", "on", "than", "including", "such", "regarding"]
)
"""Prepositions that rather belong to an object than to its verb."""
DEEPEST = 40
"""How deep groups may nest. Deeper words stay alone, so that no sentence overflows the stack."""

LONGEST = 24
"""Words looked at for a noun, so that time stays in proportion to length."""


def parse_english(text: str) -> list[Phrase]:
    """Sentences, their phrases and their words, in tree order.

    >>> text = "He saw it."
    >>> [text[p.begin : p.end] for p in parse_english(text)]
    ['He saw it.', 'He saw it', 'He', 'saw it', 'saw', 'it', '.']
    """
    phrases: list[Phrase] = []
    for words in split_sentences(text):
        phrases += _parse_sentence(words)
    return phrases


class EnglishParser:
    """`parse_english` as a `Parser`."""

    def __call__(self, texts: Sequence[str]) -> list[list[Phrase]]:
        return [parse_english(text) for text in texts]


def _parse_sentence(words: Sequence[Word]) -> list[Phrase]:
    written = [word.text for word in words]
    lower = [text.lower().replace("\u2019", "'") for text in written]
    reader = _Reader(tag(lower, written), lower)
    reader.read()
    phrases = [Phrase(words[0].begin, words[-1].end, "S")]
    phrases += [Phrase(words[a].begin, words[b - 1].end, label) for a, b, label in reader.groups]
    phrases += [Phrase(word.begin, word.end) for word in words]
    return nested(phrases)


def _bounded(method: Callable[..., int]) -> Callable[..., int]:
    """Skip a word where groups nest too deep."""

    @wraps(method)
    def guarded(self: _Reader, i: int, *args: Any) -> int:
        if self.depth >= DEEPEST:
            return i + 1
        self.depth += 1
        end = method(self, i, *args)
        self.depth -= 1
        return end

    return guarded


class _Reader:
    """Reads groups from left to right. Each method takes a place and returns where it stopped."""

    def __init__(self, tags: str, words: Sequence[str]) -> None:
        self.tags = tags + ".."  # so that looking ahead is always possible
        self.words = [*words, "", ""]
        self.count = len(words)
        self.groups: list[tuple[int, int, str]] = []
        self.depth = 0

    def add(self, begin: int, end: int, label: str) -> None:
        if end - begin > 1:
            self.groups.append((begin, end, label))

    def read(self) -> None:
        i = 0
        while i < self.count:
            i = max(i + 1, self.piece(i))

    def piece(self, i: int) -> int:
        """A group outside of any other: before the subject, the subject with its verb, a rest."""
        tag = self.tags[i]
        if tag in ".,CURX":
            return i + 1
        if tag in "SW":
            return self.subordinate(i)
        if tag in "VKGM":
            return self.verbal(i)
        if tag == "T":
            return self.infinitive(i)
        if tag == "P":
            return self.prepositional(i)
        end = self.nominal(i) if self.nominal_at(i) else self.adjectival(i)
        if end > i and self.verb_at(end):
            stop = self.verbal(end)
            if i == 0 or self.tags[i - 1] == "C":
                self.add(i, stop, "S")
            return stop
        return end

    def verb_at(self, i: int) -> bool:
        """Whether a finite verb follows, after any adverbs."""
        while self.tags[i] in "RX":
            i += 1
        return self.tags[i] in "MVK"

    @_bounded
    def subordinate(self, i: int) -> int:
        """A conjunction or relative word and its clause."""
        tags, at = self.tags, i + 1
        while tags[at] == "R" or (tags[at] == "J" and self.words[i] == "how"):
            at += 1
        if tags[at] == "T":
            end = self.infinitive(at)
        elif tags[at] in "MVKGX":
            end = self.verbal(at)
        elif tags[at] in "SW":
            end = self.subordinate(at)
        else:
            end = self.nominal(at)
            if end > at and self.verb_at(end):
                end = self.verbal(end)
                self.add(at, end, "S")
        self.add(i, end, "SBAR")
        return end

    @_bounded
    def verbal(self, i: int) -> int:
        """Auxiliaries, adverbs, the verb, and all that depends on it."""
        tags, head, at = self.tags, i, i
        while tags[at] in "MXR":
            head = at if tags[at] == "M" else head
            at += 1
        if tags[at] in "VKG":
            head = at
        elif tags[head] != "M":
            return i + 1
        end = self.complements(head + 1, head)
        self.add(i, end, "VP")
        self.add(head, end, "VP")
        return end

    def complements(self, i: int, head: int) -> int:
        """Objects, prepositional phrases, clauses and adverbs that follow a verb."""
        tags, words = self.tags, self.words
        kept = frozenset[str]() if words[head] in BE else KEPT
        while i < self.count:
            tag = tags[i]
            if tag in ".,MVKX":
                break
            if tag == "C":
                another = tags[i + 1] in "VMKGISWTX," or verb_follows(tags, i + 1)
                if another or words[i] == "but":
                    break
                i += 1
            elif tag in "SW":
                i = self.subordinate(i)
            elif tag == "T":
                i = self.infinitive(i)
            elif tag == "P":
                i = self.prepositional(i)
            elif tag == "G":
                i = self.verbal(i)
            elif self.nominal_at(i):
                end = self.nominal(i, kept)
                if self.verb_at(end) and tags[end] != "K":  # he thinks | she knows
                    end = self.verbal(end)
                    self.add(i, end, "S")
                i = end
            elif tag in "RJ":
                i = self.adjectival(i)
            else:
                i += 1
        return i

    def infinitive(self, i: int) -> int:
        at = i + 1
        while self.tags[at] in "RX":
            at += 1
        end = self.verbal(at) if self.tags[at] in "VMKG" else i + 1
        self.add(i, end, "VP")
        return end

    @_bounded
    def prepositional(self, i: int) -> int:
        tags, at = self.tags, i + 1
        while tags[at] == "P":
            at += 1
        if tags[at] == "G":
            end = self.verbal(at)
        elif tags[at] in "SW":
            end = self.subordinate(at)
        elif self.nominal_at(at):
            end = self.nominal(at, KEPT)
        else:
            end = self.adjectival(at) if tags[at] in "JR" else at
        self.add(i, end, "PP")
        return end

    def adjectival(self, i: int) -> int:
        """Adverbs and adjectives with what depends on them; adverbs alone are one word each."""
        tags, at = self.tags, i
        while tags[at] == "R":
            at += 1
        if tags[at] != "J":
            return i + 1
        while tags[at] == "J":
            at += 1
        end = at
        if tags[at] == "T":
            end = self.infinitive(at)
        elif tags[at] == "P":
            end = self.prepositional(at)
        elif tags[at] == "S" and self.words[at] == "that":
            end = self.subordinate(at)
        self.add(i, at, "ADJP")
        self.add(i, end, "ADJP")
        return end

    def nominal_at(self, i: int) -> bool:
        return self.noun_end(i) > i

    def noun_end(self, i: int) -> int:
        """Where the noun phrase that begins here has its noun; the place itself if there is none.

        >>> _Reader("DRJNP", "the very old man in".split()).noun_end(0)
        4
        """
        tags, at, last = self.tags, i, i
        if tags[at] == "I":
            return at + 1
        while at < min(self.count, i + LONGEST):
            tag, before, after = tags[at], tags[at - 1] if at > i else "", tags[at + 1]
            if tag in "NQ" or (tag == "O" and last == at):
                last = at + 1
            elif tag == "D":
                if before and before not in "DO":
                    break
            elif tag == "R":
                if before in ("N", "Q") or not (
                    after in "JQR" or (after == "N" and before in ("D", "R"))
                ):
                    break
            elif tag in "GK":
                if after not in "NJ" or before not in ("D", "J"):
                    break
            elif tag == "C":
                if before != "J" or after != "J":
                    break
            elif tag != "J":
                break
            at += 1
        return at if last == i and tags[i] == "D" else last  # the rich

    @_bounded
    def nominal(self, i: int, kept: frozenset[str] = frozenset()) -> int:
        """A noun phrase with what follows its noun, and with those joined to it.

        `kept`: the prepositions that belong to it; all, unless given.
        """
        tags, words = self.tags, self.words
        end = self.noun_end(i)
        for at in range(i + 1, end):
            if tags[at] == "O":
                self.add(i, at + 1, "NP")  # whose
        self.add(i, end, "NP")
        pronoun = tags[i] == "I"
        while end < self.count:
            tag, word = tags[end], words[end]
            if tag == "P" and (word in kept if kept else word == "of" or not pronoun):
                end = self.prepositional(end)
            elif tag == "T" and not pronoun and not kept:
                end = self.infinitive(end)
            elif tag == "W" or (tag == "S" and word == "that" and not pronoun):
                end = self.subordinate(end)
            elif tag in "C," and (at := self.joined(end)):
                self.add(i, end, "NP")
                end = self.nominal(at, kept)
            else:
                break
        self.add(i, end, "NP")
        return end

    def joined(self, i: int) -> int:
        """Where another noun phrase follows after `and` or a comma; 0 if none does."""
        tags, at = self.tags, i + 1
        if tags[i] == "," and tags[at] == "C":
            at += 1
        if tags[at] not in "DNJQ" or not self.nominal_at(at):
            return 0
        end = at
        while tags[end] in "DJNOQR":
            end += 1
        if tags[end] in "MVK":
            return 0  # another clause
        return at if "C" in (tags[i], tags[at - 1]) or tags[end] in ",C" else 0
