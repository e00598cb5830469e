import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf.core import Constituents, NGram, Perplexity, Sentences, Words
from marlhf.data.rows import DataError
from marlhf.spans.show import cut_text, paint

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
    with pytest.raises(DataError, match="parser"):
        show("fox", Constituents())
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
