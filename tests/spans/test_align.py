import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf.core import Constituents, Responses, segment
from marlhf.data.encode import decode
from marlhf.models.tiny import tiny_tokenizer
from marlhf.spans.align import TokenBytes
from marlhf.spans.parser import build_parser
from marlhf.spans.workers import parse_flat

TINY = tiny_tokenizer()
TABLE = TokenBytes.of(TINY)
TEXT = "Zoë  ate 🍎🍏.\n\n\tThen\u00a0she slept\u2028till 10:30, 鳥 said. "
KINDS = ("byte-level", "metaspace", "word-piece")
SOLID = [i for i, token in enumerate(TABLE.table) if token.strip()]


def anchor_texts(table, ids):
    aligned = table.align([ids])
    return [aligned.texts[0][at : at + 1] for at in aligned.row(0)]


@settings(max_examples=80)
@given(st.text(max_size=80))
def test_text_is_what_the_tokens_decode_to(text):
    ids = TINY(text, add_special_tokens=False)["input_ids"]
    assert TABLE.align([ids]).texts == [decode(TINY, ids)]
    if "<|" not in text:  # special tokens are no text
        assert decode(TINY, ids) == text


@settings(max_examples=80)
@given(st.lists(st.lists(st.integers(0, len(TABLE.table) - 1), max_size=30), max_size=6))
def test_any_tokens_align_whatever_they_decode_to(rows):
    aligned = TABLE.align(rows)
    assert len(aligned.texts) == len(rows)
    for i, ids in enumerate(rows):
        raw = b"".join(TABLE.table[token] for token in ids)
        # Each byte that is no text is one character, where others write one for several.
        assert aligned.texts[i] == "".join(
            "\ufffd" if "\udc80" <= c <= "\udcff" else c
            for c in raw.decode("utf-8", errors="surrogateescape")
        )
        anchors = aligned.row(i)
        assert len(anchors) == len(ids)
        assert anchors == sorted(anchors)
        assert all(0 <= at <= len(aligned.texts[i]) for at in anchors)


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from(SOLID), max_size=20), min_size=1, max_size=4))
def test_rows_do_not_depend_on_each_other(rows):
    together = TABLE.align(rows)
    for i, ids in enumerate(rows):
        alone = TABLE.align([ids])
        assert alone.texts[0] == together.texts[i]
        assert alone.row(0) == together.row(i)


@settings(max_examples=50)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=4))
def test_spans_nest_and_lie_in_their_row(texts):
    rows = [
        TINY(text, add_special_tokens=False)["input_ids"] + [TINY.eos_token_id] for text in texts
    ]
    aligned = TABLE.align(rows)
    spans = torch.from_numpy(
        aligned.token_spans(parse_flat(build_parser("english"), aligned.texts))
    )
    width = max(map(len, rows))
    mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    responses = Responses(torch.zeros_like(mask).long(), mask, spans=spans).validate()
    assert (spans[:, :, 1].amax(dim=1) <= mask.sum(dim=1)).all()
    segments = segment(Constituents(), responses).validate()
    assert segments.lengths.sum(dim=1).tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_keeps_its_words(trained, kind):
    tokenizer = trained(kind, (TEXT.replace("\n", " "),))
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    [text] = TokenBytes.of(tokenizer).align([ids]).texts
    assert "".join(text.split()) == "".join(decode(tokenizer, ids).split())
    if kind != "word-piece":  # which also forgets case and accents
        assert text.strip() == TEXT.strip()


def test_anchors_by_hand():
    ids = TINY("Zoë  ate 🍎.\n Go", add_special_tokens=False)["input_ids"]
    tokens = TINY.convert_ids_to_tokens(ids)
    found = list(zip(tokens, anchor_texts(TABLE, ids)))
    assert found[:9] == [
        *[("Z", "Z"), ("o", "o"), ("Ã", "ë"), ("«", "ë")],  # two bytes of one letter
        *[("Ġ", "a"), ("Ġ", "a"), ("a", "a"), ("t", "t"), ("e", "e")],  # blanks go with the word
    ]
    assert [c for token, c in found if c == "🍎"] == ["🍎"] * 5  # a blank and four bytes
    assert found[15:17] == [("Ċ", "\n"), ("Ġ", "G")]  # a line break stands for itself


def test_special_tokens_go_with_what_is_before_them_but_the_last_with_nothing():
    eos = TINY.eos_token_id
    [a, b] = TINY("a b", add_special_tokens=False)["input_ids"][::2]
    aligned = TABLE.align([[eos, a, eos, b, eos, eos]])
    assert aligned.texts == ["ab"]
    assert aligned.row(0) == [0, 0, 0, 1, 2, 2]


def test_ids_beyond_the_tokenizer_write_nothing():
    assert TABLE.align([[10**6, SOLID[0]]]).texts == [TABLE.table[SOLID[0]].decode()]


def test_half_a_character_stays_in_its_row():
    apple = TINY("🍎", add_special_tokens=False)["input_ids"]
    aligned = TABLE.align([apple[:2], apple[2:], apple])
    assert aligned.texts == ["\ufffd\ufffd", "\ufffd\ufffd", "🍎"]
    assert aligned.row(2) == [0, 0, 0, 0]


def test_spans_of_tokens_by_hand():
    table = TokenBytes([b"The", b" old", b" fox", b" ran", b".", b"", b"\n", b" "])
    aligned = table.align([[0, 1, 2, 3, 4, 5], [6, 5], [2]])
    assert aligned.texts == ["The old fox ran.", "\n", " fox"]
    spans = aligned.token_spans([[0, 16, 0, 11, 0, 3, 4, 7, 12, 15], [], [1, 4]])
    assert spans.tolist() == [
        [[0, 5], [0, 3]],  # without the end token, and without single words
        [[0, 2], [0, 0]],  # nothing to parse: the whole
        [[0, 1], [0, 0]],  # a sentence of one word
    ]


def test_no_rows_are_no_rows():
    aligned = TABLE.align([])
    assert aligned.texts == []
    assert aligned.token_spans([]).shape == (0, 1, 2)
    assert np.array_equal(aligned.token_begins, [0])
