import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf.core import Constituents, NGram, Perplexity, Sentences, Words
from marlhf.data.rows import DataError
from marlhf.spans.apply import SegmenterError
from marlhf.spans.phrases import ParserError
from marlhf.spans.show import cut_text, draw_trees, paint

RULES = (NGram(3), Words(), Sentences())


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=60), st.sampled_from(RULES))
def test_every_character_is_kept(text, rule):
    actions = cut_text(text, rule, tokenizer="tiny", model=None, seed=0)
    assert "".join("".join(action) for action in actions) == text


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "word-piece"])
@pytest.mark.parametrize("text", [" a fox\n", "Zoë  ate 🍎🍏 ", "\tthe  fox "])
def test_every_kind_of_tokenizer_keeps_every_character(tmp_path, trained, kind, text):
    trained(kind).save_pretrained(tmp_path)
    actions = cut_text(text, NGram(1), tokenizer=str(tmp_path), model=None, seed=0)
    assert "".join("".join(action) for action in actions) == text


def test_actions_are_the_rules():
    text = "The fox ate.  Then it\nslept"
    cut = {rule: cut_text(text, rule, tokenizer="tiny", model=None, seed=0) for rule in RULES}
    words = ["".join(action) for action in cut[Words()]]
    assert words == ["The", " fox", " ate.", "  Then", " it", "\nslept"]
    assert ["".join(a) for a in cut[Sentences()]] == ["The fox ate.", "  Then it\n", "slept"]
    assert {len(action) for action in cut[NGram(3)][:-1]} == {3}


def test_perplexity_asks_the_model():
    actions = cut_text("The fox ate.", Perplexity(), tokenizer="tiny", model="tiny", seed=0)
    assert "".join("".join(action) for action in actions) == "The fox ate."


def test_what_cannot_be_shown_is_a_sentence(tmp_path, trained):
    def show(text, rule, tokenizer="tiny"):
        return cut_text(text, rule, tokenizer=tokenizer, model=None, seed=0)

    with pytest.raises(DataError, match="text is empty"):
        show("", Words())
    with pytest.raises(DataError, match="give --model"):
        show("fox", Perplexity())
    with pytest.raises(ParserError, match="no parser"):
        show("fox", Constituents(parser="klingon"))
    trained("word-piece").save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no tokens of this text"):
        show(" \n ", Words(), str(tmp_path))


def test_paint_with_bars_and_with_colours():
    actions = [["The", " fox"], ["\n"], [" ate"]]
    assert paint(actions, colour=False) == "The fox|\n| ate"
    painted = paint(actions, colour=True)
    assert painted.count("\x1b[0m") == 4  # after each action, and before the line break
    for code in ("\x1b[30;44m", "\x1b[30;42m", "\x1b[30;45m", "\x1b[0m"):
        painted = painted.replace(code, "")
    assert painted == "The fox\n ate"


def test_constituents_are_shown_with_their_trees():
    text = "Tell me a tale of a brave fox. The fox met a hungry owl."
    actions = cut_text(text, Constituents(), tokenizer="tiny", model=None, seed=0)
    joined = ["".join(action) for action in actions]
    assert joined == ["Tell me", " a tale", " of a brave fox.", " The fox", " met a hungry owl."]
    assert draw_trees(text, "english") == [
        "(S (VP Tell me (NP (NP a tale) (PP of (NP a brave fox)))) .)",
        "(S (S (NP The fox) (VP met (NP a hungry owl))) .)",
    ]
    assert draw_trees("", "english") == []
    assert draw_trees("x = [1]\ny", "python") == [
        "(expression_statement x = (list [ 1 ]))",
        "y",
    ]


def test_sentences_may_be_boundaries():
    text = "He slept. It ran. We saw. The end."
    rules = Constituents(), Constituents(sentences=True)
    plain, sentences = (cut_text(text, r, tokenizer="tiny", model=None, seed=0) for r in rules)
    begins = {"".join(action).split()[0] for action in sentences}
    assert begins >= {"He", "It", "We", "The"}
    assert len(plain) < len(sentences)


@settings(max_examples=30)
@given(st.text(min_size=1, max_size=60), st.sampled_from(["english", "python", "auto"]))
def test_constituents_of_any_text_keep_every_character(text, parser):
    rule = Constituents(max_length=6, parser=parser)
    actions = cut_text(text, rule, tokenizer="tiny", model=None, seed=0)
    assert "".join("".join(action) for action in actions) == text
    assert max(map(len, actions)) <= 6


def test_a_segmenter_that_raises_is_named():
    def broken(responses):
        return responses.nothing

    with pytest.raises(SegmenterError, match=r"broken raised AttributeError: .*bool tensor"):
        cut_text("some words", broken, tokenizer="tiny", model=None, seed=0)
