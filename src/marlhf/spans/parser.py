"""The parser that a recipe names: rules of our own, or a model of spaCy, stanza or benepar.

Python programs are parsed as nested phrases, whole or broken, by tree-sitter; `MixedParser` reads
prose with code in it. What a parser needs beyond marlhf is imported when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Any, NamedTuple

from marlhf.spans.english import EnglishParser, parse_english
from marlhf.spans.phrases import Parser, ParserError, Phrase, TextParser, nested
from marlhf.spans.words import split_sentences

SUBJECTS = frozenset({"nsubj", "nsubjpass", "nsubj:pass", "csubj", "csubjpass", "expl"})
PROSE = frozenset({"comment", "string_content"})
"""Leaves that people wrote to people: their words are phrases, too."""
FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+#-]*)[^\n]*$", re.M)
LANGUAGES = frozenset({"", "python", "py", "python3", "pycon"})
CODE_LINE = re.compile(
    r"\s*(?:(?:def|class|for|while|if|elif|with|try|except|else|finally|async)\b.*:|"
    r"(?:import|from|return|yield|raise|assert|del|global|pass|break|continue)\b(?!.*[.!?]$)|"
    r"[@#]|[\w.\[\]'\"]+(?:, *\w+)* *(?:[-+*/%|&]|//|\*\*)?= *\S|[\w.]+\(.*\)?\s*$|[\])}]+,?\s*$)"
)
LABELS = {"NOUN": "NP", "PROPN": "NP", "PRON": "NP", "ADP": "PP", "VERB": "VP", "AUX": "VP"}


def build_parser(name: str) -> Parser:
    """The parser called `name`, such as `english` or `spacy:en_core_web_sm`."""
    if name in PARSERS:
        return PARSERS[name]()
    kind, _, model = name.partition(":")
    if kind in MODEL_PARSERS and model:
        return MODEL_PARSERS[kind](model)
    raise ParserError(f"There is no parser {name!r}. It is one of {', '.join(NAMES)}.")


class DependencyWord(NamedTuple):
    """A word of a sentence as a dependency parser sees it."""

    begin: int  # characters
    end: int
    head: int  # its place among the words; its own for the root
    relation: str
    tag: str  # universal part of speech


def constituents(words: Sequence[DependencyWord]) -> list[Phrase]:
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


def _words(sentence: Any) -> list[DependencyWord]:
    """The words of a sentence, without spaCy's tokens of white space."""
    tokens = [token for token in sentence if not token.is_space]
    place = {token.i: at for at, token in enumerate(tokens)}
    return [
        DependencyWord(
            token.idx,
            token.idx + len(token.text),
            place.get(token.head.i, at),
            token.dep_,
            token.pos_,
        )
        for at, token in enumerate(tokens)
    ]


class BeneparParser(TextParser):
    """The Berkeley neural parser, by the name of its model: `benepar_en3`."""

    def __init__(self, name: str) -> None:
        try:
            import benepar  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ParserError(
                f"The parser benepar:{name} needs benepar: pip install 'marlhf[benepar]'"
            ) from None
        try:
            self.parser: Any = benepar.Parser(name)
        except (LookupError, OSError) as error:
            raise ParserError(
                f"benepar has no model {name!r} here. Get it: "
                f"python -c \"import benepar; benepar.download('{name}')\""
            ) from error
        self.sentence: Any = benepar.InputSentence

    def parse(self, text: str) -> list[Phrase]:
        sentences = split_sentences(text)
        given = [self.sentence(words=[word.text for word in words]) for words in sentences]
        trees = self.parser.parse_sents(given) if given else ()
        phrases: list[Phrase] = []
        for words, tree in zip(sentences, trees, strict=True):
            phrases += tree_phrases(tree, [(word.begin, word.end) for word in words])
        return phrases


class StanzaParser(TextParser):
    """A stanza pipeline with a constituency parser, by language: `en`, `zh-hans` ..."""

    def __init__(self, language: str) -> None:
        try:
            import stanza  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ParserError(
                f"The parser stanza:{language} needs stanza: pip install 'marlhf[stanza]'"
            ) from None
        try:
            self.pipeline: Any = stanza.Pipeline(
                language,
                processors="tokenize,pos,constituency",
                download_method=None,  # no silent downloads
                use_gpu=False,
                verbose=False,
            )
        except Exception as error:  # of many types, some of them stanza's own
            raise ParserError(
                f"stanza cannot parse {language!r} ({error}). Get its models: "
                f"python -c \"import stanza; stanza.download('{language}')\""
            ) from error

    def parse(self, text: str) -> list[Phrase]:
        phrases: list[Phrase] = []
        for sentence in self.pipeline(text).sentences if text.strip() else ():
            # Words of one token (`don't`) share its characters.
            places = [
                (token.start_char, token.end_char) for token in sentence.tokens for _ in token.words
            ]
            phrases += tree_phrases(sentence.constituency, places)
        return phrases


class PythonParser(TextParser):
    """Syntax trees of Python. Its statements are what sentences are in prose."""

    def __init__(self) -> None:
        try:
            import tree_sitter
            import tree_sitter_python
        except ImportError:
            raise ParserError(
                "Parsing Python needs tree-sitter and its grammar: pip install 'marlhf[code]'"
            ) from None
        self.parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))

    def parse(self, text: str) -> list[Phrase]:
        source = text.encode("utf-8", errors="surrogatepass")
        place = _characters(text, source)
        phrases: list[Phrase] = []
        for node in _walk(self.parser.parse(source)):
            begin, end = place[node.start_byte], place[node.end_byte]
            leaf = not node.child_count
            phrases.append(Phrase(begin, end, "" if leaf and node.type not in PROSE else node.type))
            if leaf and node.type in PROSE:
                inner = parse_english(text[begin:end])
                phrases += [Phrase(begin + a, begin + b, label) for a, b, label in inner]
        return nested(phrases)


def _walk(tree: Any) -> Any:
    """All nodes but the root, without recursion: broken programs nest as deep as they like."""
    cursor = tree.walk()
    if not cursor.goto_first_child():
        return
    while True:
        yield cursor.node
        if cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent() or cursor.depth == 0:
                return


def _characters(text: str, source: bytes) -> Sequence[int]:
    """The character at each byte of the text as UTF-8, and their number at the end."""
    if len(source) == len(text):
        return range(len(source) + 1)
    place = [0] * (len(source) + 1)
    widths = (len(character.encode("utf-8", errors="surrogatepass")) for character in text)
    for number, end in enumerate(accumulate(widths), start=1):
        place[end] = number
    return place


class MixedParser(TextParser):
    """Prose as English; fenced code, and a text that is evidently a program, as Python."""

    def __init__(self) -> None:
        self.python = PythonParser()

    def parse(self, text: str) -> list[Phrase]:
        phrases: list[Phrase] = []
        for begin, end, program in _parts(text):
            part = text[begin:end]
            parsed = self.python.parse(part) if program else parse_english(part)
            phrases += [Phrase(begin + a, begin + b, label) for a, b, label in parsed]
        return phrases


def looks_like_code(text: str) -> bool:
    """Whether most lines of a text are Python's."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and 2 * sum(bool(CODE_LINE.match(line)) for line in lines) > len(lines)


def _parts(text: str) -> list[tuple[int, int, bool]]:
    """Begin and end of each part, and whether it is a program; lines of a fence are prose.

    A fence that nothing closes lasts to the end: the response was cut off.
    """
    fences = list(FENCE.finditer(text))
    if not fences:
        return [(0, len(text), looks_like_code(text))]
    parts: list[tuple[int, int, bool]] = []
    at, opened = 0, None
    for fence in fences:
        if opened is None:
            parts.append((at, fence.end(), False))
            opened, at = fence, fence.end()
        elif fence[1].startswith(opened[1]) and not fence[2]:
            parts.append((at, fence.start(), opened[2].lower() in LANGUAGES))
            opened, at = None, fence.start()
    parts.append((at, len(text), opened is not None and opened[2].lower() in LANGUAGES))
    return parts


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


PARSERS: dict[str, Callable[[], Parser]] = {
    "english": EnglishParser,
    "python": PythonParser,
    "auto": MixedParser,
}
MODEL_PARSERS: dict[str, Callable[[str], Parser]] = {
    "spacy": SpacyParser,
    "stanza": StanzaParser,
    "benepar": BeneparParser,
}
"""Parsers with trained models, which are named after a colon."""
NAMES = (*PARSERS, "spacy:NAME", "stanza:LANGUAGE", "benepar:NAME")
