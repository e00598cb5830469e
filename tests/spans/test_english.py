import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marlhf.spans.english import parse_english
from marlhf.spans.phrases import Phrase, nested
from marlhf.spans.show import draw_trees
from marlhf.spans.words import split_sentences

ODD = (
    "",
    "   \n\t\n",
    "🍎🍏 lol!!! 😂😂😂",
    "see https://example.com/a?b=c, r/aww and u/me (or mail me@x.org)",
    "1. First\n2) second\n- third\n* fourth\n\n> quoted",
    "so i was like no way and he was like yes way and then we just left and and and",
    "Mr. Smith's U.S. tour, e.g. at 3.5 p.m., cost $20 (10%)... Right?!",
    "don't can't it's they'd we\u2019re y'all gonna",
    "\u0000\ufffd\u2028\u00a0\u200d\u0301",
    "a_b-c __init__ --- === *** ((( ]]] \"'`",
    "日本語のテキスト。そして、もう一つ。",
)

PIECES = "the a of to and that he is not very old cat ran running , . who if 's n't"


def bracket(text):
    return " ".join(draw_trees(text, "english"))


@settings(max_examples=120)
@given(
    st.one_of(
        st.text(max_size=120),
        st.lists(
            st.sampled_from(PIECES.split()),
            max_size=40,
        ).map(" ".join),
    )
)
@example(ODD[2])
def test_phrases_nest_in_the_order_of_a_tree_and_cover_every_character(text):
    phrases = parse_english(text)
    assert nested(phrases) == phrases
    covered = set()
    for phrase in phrases:
        assert 0 <= phrase.begin < phrase.end <= len(text)
        if not phrase.label:
            covered |= set(range(phrase.begin, phrase.end))
    singles = {i for p in phrases for i in range(p.begin, p.end)}
    assert singles >= {i for i, c in enumerate(text) if not c.isspace()}
    assert parse_english(text) == phrases


@pytest.mark.parametrize("text", ODD)
def test_odd_text_is_parsed(text):
    words = [word for sentence in split_sentences(text) for word in sentence]
    assert "".join(word.text for word in words) == "".join(text.split())
    assert len(parse_english(text)) >= len(split_sentences(text))


@pytest.mark.parametrize(
    "piece",
    ["and ", "to ", "the of ", "that he said ", "a, ", "of the man who ", "( ", "1. ", "very ",
     "don't ", "because if ", "running ", "happy to ", "'s ", "big and ", "dogs and ", "a_b-c.",
     "x@", "www.", "because "],
)  # fmt: skip
def test_run_ons_take_time_in_proportion_to_their_length(piece):
    start = time.process_time()
    parse_english(piece * 4000)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("The old dog slept.", "(S (S (NP The old dog) slept) .)"),
        ("I told my sister.", "(S (S I (VP told (NP my sister))) .)"),
        ("He sat on the red chair", "(S He (VP sat (PP on (NP the red chair))))"),
        ("a cup of tea", "(S (NP a cup) (PP of tea))"),
        ("She wants to help us.", "(S (S She (VP wants (VP to (VP help us)))) .)"),
        ("Tell me a story.", "(S (VP Tell me (NP a story)) .)"),
        ("my friend's new car", "(S (NP my friend 's) new car)"),
        ("If it rains, we stay.", "(S (SBAR If (S it rains)) , we stay .)"),
    ],
)
def test_trees_by_hand(text, tree):
    assert bracket(text) == tree


def test_sentences_end_at_stops_and_lines():
    text = 'Was it late? No! It was 3.5 miles\n1. Go home. "Now." She went (alone.) Then'
    sentences = ["".join(text[s[0].begin : s[-1].end]) for s in split_sentences(text)]
    assert sentences == [
        *["Was it late?", "No!", "It was 3.5 miles", "1. Go home.", '"Now."'],
        *["She went (alone.)", "Then"],
    ]


def test_crossing_empty_and_repeated_phrases_are_left_out():
    given_ = [Phrase(4, 9), Phrase(0, 6, "NP"), Phrase(0, 6, "S"), Phrase(2, 2), Phrase(0, 2)]
    assert nested(given_) == [Phrase(0, 6, "NP"), Phrase(0, 2)]
