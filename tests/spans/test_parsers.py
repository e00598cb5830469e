import sys
from types import ModuleType, SimpleNamespace

import pytest

from marlhf.spans.parser import DependencyWord as Word
from marlhf.spans.parser import build_parser, constituents
from marlhf.spans.phrases import ParserError, Phrase

TEXT = "She saw the old car."
WORDS = [(0, 3), (4, 7), (8, 11), (12, 15), (16, 19), (19, 20)]
HEADS = [1, 1, 4, 4, 1, 1]
RELATIONS = ["nsubj", "ROOT", "det", "amod", "dobj", "punct"]
TAGS = ["PRON", "VERB", "DET", "ADJ", "NOUN", "PUNCT"]


def texts(phrases, text=TEXT):
    return [(p.label, text[p.begin : p.end]) for p in phrases if p.label]


def test_dependencies_become_constituents():
    words = [Word(*w, *rest) for w, *rest in zip(WORDS, HEADS, RELATIONS, TAGS)]
    found = texts(constituents(words))
    assert found == [
        ("S", TEXT),
        ("S", "She saw the old car"),
        ("VP", "saw the old car"),
        ("NP", "the old car"),
    ]


def test_what_is_joined_is_a_phrase_before_it_is_joined():
    text = "We ate cake and drank tea"
    places = [(0, 2), (3, 6), (7, 11), (12, 15), (16, 21), (22, 25)]
    heads, tags = [1, 1, 1, 1, 1, 4], ["PRON", "VERB", "NOUN", "CCONJ", "VERB", "NOUN"]
    relations = ["nsubj", "ROOT", "dobj", "cc", "conj", "dobj"]
    words = [Word(*w, *rest) for w, *rest in zip(places, heads, relations, tags)]
    found = texts(constituents(words), text)
    assert {("S", "We ate cake"), ("VP", "ate cake"), ("VP", "drank tea")} <= set(found)


def test_dependencies_that_cross_still_nest():
    words = [Word(2 * i, 2 * i + 1, head, "dep", "NOUN") for i, head in enumerate([2, 3, 2, 2])]
    assert constituents(words)
    assert constituents([]) == []


class Token(SimpleNamespace):
    is_space = False


def spacy_stand_in(pipes=("tok2vec", "parser")):
    tokens = [
        Token(i=i, idx=w[0], text=TEXT[slice(*w)], dep_=r, pos_=t)
        for i, (w, r, t) in enumerate(zip(WORDS, RELATIONS, TAGS))
    ]
    for token, head in zip(tokens, HEADS):
        token.head = tokens[head]
    tokens.append(
        Token(i=6, idx=20, text="\n", dep_="", pos_="SPACE", is_space=True, head=tokens[1])
    )

    class Pipeline:
        pipe_names = pipes

        def pipe(self, given):
            return [SimpleNamespace(sents=[tokens] if text.strip() else []) for text in given]

    def load(name, exclude):
        if name == "missing":
            raise OSError("E050")
        return Pipeline()

    module = ModuleType("spacy")
    vars(module).update(load=load)
    return module


def test_spacy_pipelines_are_parsers(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", spacy_stand_in())
    parser = build_parser("spacy:en_core_web_sm")
    found, nothing = parser([TEXT + "\n", ""])
    assert ("VP", "saw the old car") in texts(found)
    assert Phrase(16, 19) in found
    assert nothing == []
    with pytest.raises(ParserError, match="python -m spacy download missing"):
        build_parser("spacy:missing")
    monkeypatch.setitem(sys.modules, "spacy", spacy_stand_in(pipes=("tagger",)))
    with pytest.raises(ParserError, match="has no dependency parser"):
        build_parser("spacy:en_core_web_sm")


class Tree:
    """As stanza's."""

    def __init__(self, label, *children):
        self.label, self.children = label, children


STANZA = Tree(
    "ROOT",
    Tree(
        "S",
        Tree("NP", Tree("PRP", Tree("She"))),
        Tree(
            "VP",
            Tree("VBD", Tree("saw")),
            Tree(
                "NP", *[Tree(t, Tree(w)) for t, w in (("DT", "the"), ("JJ", "old"), ("NN", "car"))]
            ),
        ),
        Tree(".", Tree(".")),
    ),
)


class NltkTree(list):
    """As nltk's, which benepar gives: leaves are strings, labels a method."""

    def __init__(self, tree):
        super().__init__(NltkTree(c) if c.children else c.label for c in tree.children)
        self._label = tree.label

    def label(self):
        return self._label


def test_stanza_gives_constituents(monkeypatch):
    tokens = [SimpleNamespace(start_char=a, end_char=b, words=[0]) for a, b in WORDS]
    document = SimpleNamespace(sentences=[SimpleNamespace(tokens=tokens, constituency=STANZA)])

    def pipeline(language, **settings):
        assert settings["download_method"] is None
        if language != "en":
            raise FileNotFoundError("no resources")
        return lambda text: document

    module = ModuleType("stanza")
    vars(module).update(Pipeline=pipeline)
    monkeypatch.setitem(sys.modules, "stanza", module)
    found, nothing = build_parser("stanza:en")([TEXT, " "])
    assert texts(found) == [("S", TEXT), ("VP", "saw the old car"), ("NP", "the old car")]
    assert nothing == []
    with pytest.raises(ParserError, match=r"stanza.download\('tlh'\)"):
        build_parser("stanza:tlh")


def test_benepar_gives_constituents(monkeypatch):
    class Parser:
        def __init__(self, name):
            if name != "benepar_en3":
                raise LookupError

        def parse_sents(self, sentences):
            assert [s.words for s in sentences] == [["She", "saw", "the", "old", "car", "."]]
            return [NltkTree(STANZA)]

    module = ModuleType("benepar")
    vars(module).update(Parser=Parser, InputSentence=lambda words: SimpleNamespace(words=words))
    monkeypatch.setitem(sys.modules, "benepar", module)
    found, nothing = build_parser("benepar:benepar_en3")([TEXT, ""])
    assert texts(found) == [("S", TEXT), ("VP", "saw the old car"), ("NP", "the old car")]
    assert nothing == []
    with pytest.raises(ParserError, match=r"benepar.download\('other'\)"):
        build_parser("benepar:other")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("spacy:en_core_web_sm", r"pip install 'marlhf\[spacy\]'"),
        ("stanza:en", r"pip install 'marlhf\[stanza\]'"),
        ("benepar:benepar_en3", r"pip install 'marlhf\[benepar\]'"),
        ("python", r"pip install 'marlhf\[code\]'"),
        ("auto", r"pip install 'marlhf\[code\]'"),
    ],
)
def test_what_is_missing_is_a_sentence_with_the_command_that_gets_it(monkeypatch, name, command):
    for package in ("spacy", "stanza", "benepar", "tree_sitter"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ParserError, match=command):
        build_parser(name)


@pytest.mark.parametrize("name", ["klingon", "spacy", "spacy:", "English", ""])
def test_unknown_parsers_are_named_beside_those_there_are(name):
    with pytest.raises(ParserError, match="It is one of english, python, auto"):
        build_parser(name)
