"""The parser that a recipe names: rules of our own, or a model of spaCy, stanza or benepar.

What a parser needs beyond marlhf is imported when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

from marlhf.spans.english import EnglishParser
from marlhf.spans.phrases import Parser, ParserError, Phrase, TextParser, nested
from marlhf.spans.python import MixedParser, PythonParser
from marlhf.spans.words import split_sentences

SUBJECTS = frozenset({"nsubj", "nsubjpass", "nsubj:pass", "csubj", "csubjpass", "expl"})
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
