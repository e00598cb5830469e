"""Part of speech of each English word: by the word alone, then corrected by its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from marlhf.spans.lexicon import kind

PREPOSITIONS = {
    "such": "as",
    "rather": "than",
    "because": "of",
    "instead": "of",
    "due": "to",
    "according": "to",
    "out": "of",
    "away": "from",
    "as": "for",
}
"""Two words that are one preposition."""
SUBJECTS = frozenset(["i", "he", "she", "we", "they"])
THIRD_PERSON = frozenset(["it", "that", "this", "who", "which"])
ALONE = (
    "many few most all some any each both this these those several such another enough either more"
)
"""Words that precede a noun or replace one."""
BE_OR_HAVE = frozenset(["is", "are", "was", "were", "be", "has", "have", "had", "'s"])


def tag(words: Sequence[str], written: Sequence[str]) -> str:
    """One letter a word, see `lexicon`; `,` for marks within a sentence and `.` for its end."""
    written = [*words[:1], *written[1:]]  # the first has a capital in any case
    tags = [*map(kind, words, written), "."]  # index -1, before the first word, is the end as well
    for i, word in enumerate(words):
        if rule := BY_WORD.get(word) or BY_KIND.get(tags[i]):
            tags[i] = rule(tags, words, i)
    for i, word in enumerate(words[:-1]):
        if words[i + 1] == PREPOSITIONS.get(word):
            tags[i] = tags[i + 1] = "P"
    return "".join(tags[:-1])


def verb_follows(tags: Sequence[str], i: int) -> bool:
    """Whether a noun phrase that begins here is followed by a verb."""
    for at in range(i, min(i + 6, len(tags))):
        if tags[at] not in "DJNOQIR":
            return tags[at] in "MVBK"
    return False


def _noun_or_verb(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    before, after = tags[i - 1], tags[i + 1]
    if before in "ITX":
        return "V"
    if before == "M":
        return "N" if words[i - 1] in BE_OR_HAVE else "V"
    if before in "W.,UR":
        return "V" if after in "DIJPSWTQN" else "N"
    if before in "C":
        return "V" if after in "DI" else "N"
    if before == "N":
        return "V" if after in "DIJT" else "N"
    return "N"


def _adjective_or_verb(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    before, after = tags[i - 1], tags[i + 1]
    return "V" if before in "ITX" or (before == "M" and after in "DI") else "J"


def _ing(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    before, after = tags[i - 1], tags[i + 1]
    if before == "D" or (before == "J" and after not in "DI"):
        return "J" if after in "NJ" else "N"
    return "G"


def _past(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    before, after = tags[i - 1], tags[i + 1]
    return "J" if before in "DJ" or (before in "PC" and after in "NB") else "K"


def _verb(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    before, after = tags[i - 1], tags[i + 1]
    return "N" if before in "DO" or (before == "J" and after in ".,PC") else "V"


def _noun(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    """After `they` or `who` even an unknown word is a verb."""
    before = words[i - 1] if i else ""
    third = before in THIRD_PERSON and words[i].endswith("s")
    return "V" if before in SUBJECTS or third else "N"


def _apostrophe_s(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    after_noun = tags[i - 1] not in "IWUR." and words[i - 1] not in ("that", "let", "here", "how")
    return "O" if after_noun and tags[i + 1] not in "DGKXPIR" else "M"


def _that(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    before, after = tags[i - 1], tags[i + 1]
    if after in "NJ" and before in "PV":
        return "D"
    if after in ".,PC" or (after in "MX" and before in ".,CU"):
        return "I"
    return "S"


def _to(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    after = tags[i + 1]
    return "T" if after in "VBRX" or (after == "M" and words[i + 1] != "is") else "P"


def _her(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    return "D" if tags[i + 1] in "NJBGKQ" else "I"


def _so(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    return "S" if tags[i + 1] in "IDNS" else "R"


def _like(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    if tags[i - 1] in "ITMXR" and words[i - 1] not in ("is", "was", "'s"):
        return "V"
    return _before_clause(tags, words, i)


def _before_clause(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    """`before`, `since`, `as`: of a clause or of a noun phrase."""
    if tags[i + 1] in "ID" and verb_follows(tags, i + 1):
        return "S"
    return "R" if words[i] == "once" else "P"


def _particle(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    return "P" if tags[i + 1] in "DIN" and tags[i - 1] not in "VKGN" else "R"


def _determiner_alone(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    return "I" if tags[i + 1] in ".,MPVCSTX" else kind(words[i], words[i])


def _pretty(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    return "J" if tags[i + 1] == "N" else "R"


def _interjection(tags: Sequence[str], words: Sequence[str], i: int) -> str:
    before, after = tags[i - 1], tags[i + 1]
    if words[i] == "no" and after in "NJB":
        return "D"
    if before in ".,C" and (i > 0 or after in ",.IS"):
        return "U"
    return "R" if words[i] in ("well", "please") else "J"


Rule = Callable[[Sequence[str], Sequence[str], int], str]
BY_KIND: dict[str, Rule] = {
    "B": _noun_or_verb,
    "L": _adjective_or_verb,
    "G": _ing,
    "K": _past,
    "V": _verb,
    "N": _noun,
}
BY_WORD: dict[str, Rule] = {
    "'s": _apostrophe_s,
    "that": _that,
    "to": _to,
    "her": _her,
    "so": _so,
    "like": _like,
    "pretty": _pretty,
    **dict.fromkeys(["since", "before", "after", "once", "until", "as", "than"], _before_clause),
    **dict.fromkeys(["up", "down", "out", "off", "back", "away"], _particle),
    **dict.fromkeys(["no", "well", "sure", "okay", "please", "welcome", "sorry"], _interjection),
    **dict.fromkeys(
        ALONE.split(),
        _determiner_alone,
    ),
}
