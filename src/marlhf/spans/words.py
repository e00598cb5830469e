"""English text as sentences, words and parts of speech. Contractions are two words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

LETTERS = r"[^\W\d_]"
WORD = re.compile(
    rf"""
      (?:https?://|www\.)[^\s<>"]*[^\s<>".,;:!?'\)\]]     # an address
    | [\w.+-]{{1,64}}@[\w-]+(?:\.[\w-]+)+                    # a mail address
    | /?[ru]/\w+                                           # Reddit's own
    | (?:{LETTERS}\.){{2,}}                                # e.g., U.S.
    | (?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|approx|Inc|Ltd)\.
    | [$\u00a3\u20ac#]?\d+(?:[.,:/]\d+)*(?:%|[^\W\d_]{{1,2}}\b)?  # 3.5, $20, 10:30, 21st
    | {LETTERS}+?(?=n['\u2019]t\b)                         # do|n't
    | n['\u2019]t\b
    | ['\u2019](?:s|re|ve|ll|d|m)\b                        # it|'s
    | \w+(?:[-\u2010]\w+)*
    | ([^\w\s])\1*                                         # marks, and runs of one: ... !!! ---
    """,
    re.VERBOSE | re.IGNORECASE,
)
MARKER = re.compile(r"(?:[-*\u2022\u2013>#]+|\(?(?:\d{1,3}|[A-Za-z])[.)])(?=[ \t])")
STOP = re.compile(r"[.!?\u2026\u3002]+$")
CLOSING = frozenset("\"')]\u201d\u2019*")


class Word(NamedTuple):
    """Characters `begin` to before `end`."""

    begin: int
    end: int
    text: str


def split_sentences(text: str) -> list[list[Word]]:
    """The words of each sentence. A line break ends one, so the items of a list stay apart."""
    sentences: list[list[Word]] = []
    place = 0
    for line in text.splitlines(keepends=True):
        _split_line(line, place, sentences)
        place += len(line)
    return sentences


def _split_line(line: str, place: int, sentences: list[list[Word]]) -> None:
    words: list[Word] = []
    at = len(line) - len(line.lstrip())
    if marker := MARKER.match(line, at):  # the number of a list is no sentence of its own
        words.append(Word(place + at, place + marker.end(), marker[0]))
        at = marker.end()
    ended = False
    for match in WORD.finditer(line, at):
        begin, end = match.span()
        word = match[0]
        if ended and not (word in CLOSING and line[begin - 1 : begin].strip()):
            if begin == 0 or line[begin - 1].isspace():
                sentences.append(words)
                words = []
            ended = False
        words.append(Word(place + begin, place + end, word))
        if STOP.search(word) and not word[0].isalnum():
            ended = True
    if words:
        sentences.append(words)


PREPOSITIONS = frozenset(
    ["such as", "rather than", "because of", "instead of", "out of", "due to", "according to"]
) | {"away from", "as for"}
"""Two words that are one preposition."""
SUBJECTS = frozenset(["i", "he", "she", "we", "they"])
THIRD_PERSON = frozenset(["it", "that", "this", "who", "which"])
BE_OR_HAVE = frozenset(["is", "are", "was", "were", "be", "has", "have", "had", "'s"])
AFTER_VERB = {"C": "DI", "N": "DIJT"} | dict.fromkeys("W.,UR", "DIJPSWTQN")
"""What follows a word that may be a noun or a verb where it is a verb, by what precedes it."""
_ENDINGS = {
    "J": "able ible ful less ous ish ive ical ic ary",
    "R": "ly wards wise",
    "N": "tion sion ment ness ity ship ism ist ance ence ency ancy hood dom ology ling thing",
    "G": "ing",
    "K": "ed",
    "V": "ize ise ify",
}
_BY_ENDING = {ending: tag for tag, endings in _ENDINGS.items() for ending in endings.split()}
_ENDING_SIZES = sorted(set(map(len, _BY_ENDING)), reverse=True)


@cache
def _lexicon() -> dict[str, str]:
    """The tag of each common word, from `lexicon.txt`."""
    lines = Path(__file__).with_name("lexicon.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split() for line in lines if not line.startswith("#")]
    return {word: tag for tag, *words in split for word in words}


def tag(words: Sequence[str], written: Sequence[str]) -> str:
    """One letter per word; `,` for marks within a sentence and `.` for its end.

    D determiner, N noun, I pronoun, Q number, J adjective, R adverb, V verb (base or present),
    K verb in -ed or -en (past or participle), G verb in -ing, M auxiliary, X not, T to,
    P preposition, C and or or, S conjunction, W who, which, what, U interjection, O 's of
    possession. In the lexicon also B, noun or verb alike, and L, adjective or verb alike, which
    the neighbours decide.
    """
    written = [*words[:1], *written[1:]]  # the first has a capital in any case
    tags = [*map(_kind, words, written), "."]  # index -1, before the first word, is the end as well
    for i in range(len(words)):
        tags[i] = _by_word(tags, words, i) or _by_kind(tags, words, i)
    for i, both in enumerate(map(" ".join, pairwise(words))):
        if both in PREPOSITIONS:
            tags[i] = tags[i + 1] = "P"
    return "".join(tags[:-1])


def verb_follows(tags: Sequence[str], i: int) -> bool:
    """Whether a noun phrase that begins here is followed by a verb."""
    for at in range(i, min(i + 6, len(tags))):
        if tags[at] not in "DJNOQIR":
            return tags[at] in "MVBK"
    return False


@lru_cache(maxsize=1 << 16)
def _kind(word: str, written: str) -> str:
    """The kind of a word by itself, given in lower case and as written."""
    if tag := _lexicon().get(word):
        return "N" if written[0].isupper() and tag in "BVJL" and len(written) > 1 else tag
    if word[0].isalpha():
        endings = (word[-size:] for size in _ENDING_SIZES if len(word) > size + 2)
        known = (_BY_ENDING[ending] for ending in endings if ending in _BY_ENDING)
        return "N" if written[0].isupper() else next(known, "N")
    if word[0].isdigit() or (word[0] in "$#\u00a3\u20ac" and len(word) > 1):
        return "Q"
    return "." if word[0] in ".!?\u2026" else ","


def _by_word(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    """The kind of words with rules of their own; empty for all others."""
    word, before, after = words[i], tags[i - 1], tags[i + 1]
    match word:
        case "'s":
            named = before not in "IWUR." and words[i - 1] not in ("that", "let", "here", "how")
            return "O" if named and after not in "DGKXPIR" else "M"
        case "that":
            if after in "NJ" and before in "PV":
                return "D"
            return "I" if after in ".,PC" or (after in "MX" and before in ".,CU") else "S"
        case "to":
            return "T" if after in "VBRX" or (after == "M" and words[i + 1] != "is") else "P"
        case "her":
            return "D" if after in "NJBGKQ" else "I"
        case "so":
            return "S" if after in "IDNS" else "R"
        case "pretty":
            return "J" if after == "N" else "R"
        case "like" if before in "ITMXR" and words[i - 1] not in ("is", "was", "'s"):
            return "V"
        case "like" | "since" | "before" | "after" | "once" | "until" | "as" | "than":
            if after in "ID" and verb_follows(tags, i + 1):
                return "S"
            return "R" if word == "once" else "P"
        case "up" | "down" | "out" | "off" | "back" | "away":
            return "P" if after in "DIN" and before not in "VKGN" else "R"
        case "no" if after in "NJB":
            return "D"
        case "no" | "well" | "sure" | "okay" | "please" | "welcome" | "sorry":
            if before in ".,C" and (i > 0 or after in ",.IS"):
                return "U"
            return "R" if word in ("well", "please") else "J"
        case (
            "many" | "few" | "most" | "all" | "some" | "any" | "each" | "both" | "this" | "these"
            | "those" | "several" | "such" | "another" | "enough" | "either" | "more"
        ):  # fmt: skip
            return "I" if after in ".,MPVCSTX" else _kind(word, word)
    return ""


def _by_kind(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    """The kind of a word among its neighbours."""
    tag, before, after = tags[i], tags[i - 1], tags[i + 1]
    match tag:
        case "B":
            if before == "M":
                return "N" if words[i - 1] in BE_OR_HAVE else "V"
            return "V" if before in "ITX" or after in AFTER_VERB.get(before, ()) else "N"
        case "L":
            return "V" if before in "ITX" or (before == "M" and after in "DI") else "J"
        case "G" if before == "D" or (before == "J" and after not in "DI"):
            return "J" if after in "NJ" else "N"
        case "K":
            return "J" if before in "DJ" or (before in "PC" and after in "NB") else "K"
        case "V":
            return "N" if before in "DO" or (before == "J" and after in ".,PC") else "V"
        case "N":  # after `they` or `who` even an unknown word is a verb
            previous = words[i - 1] if i else ""
            third = previous in THIRD_PERSON and words[i].endswith("s")
            return "V" if previous in SUBJECTS or third else "N"
    return tag
