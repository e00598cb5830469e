import pytest
import torch

from marlhf.core import Responses, Sentences, Words, segment
from marlhf.models.tiny import tiny_tokenizer
from marlhf.spans import special_tokens, token_texts, vocabulary

TEXTS = (
    "The fox, hungry as it was, ate the owl's lunch at half past nine.",
    "Was it late? No!  Two spaces, a tab\tand\nlines.\n\nThe fox went home",
    "Zoë sang 'über' to a 鳥 and ate 3.5 naïve 🍎🍏 apples",
    "Ġ is a letter in Malta, and ▁ is a low line",
)


def cut(rule, tokenizer, text):
    """The text of each macro action, as the tokenizer itself decodes it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([ids])
    responses = Responses(tokens, torch.ones_like(tokens).bool(), vocabulary=vocabulary(tokenizer))
    starts = segment(rule, responses).starts[0].nonzero().flatten().tolist()
    return [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)])]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_words_are_the_texts_words(trained, text):
    for tokenizer in (trained("byte-level"), tiny_tokenizer()):
        words = [tokenizer.decode(ids) for ids in cut(Words(), tokenizer, text)]
        assert "".join(words) == text
        assert [word.strip() for word in words] == text.split()


@pytest.mark.parametrize("text", TEXTS[:3])
def test_metaspace_words_are_the_texts_words(trained, text):
    tokenizer = trained("metaspace")
    words = [tokenizer.decode(ids).strip() for ids in cut(Words(), tokenizer, text)]
    assert words == text.split()


def test_word_pieces_are_joined_to_words(trained):
    tokenizer = trained("word-piece", TEXTS[:1])
    text = "the lunches past foxes ate"
    assert len(tokenizer(text)["input_ids"]) > 5
    assert [tokenizer.decode(ids) for ids in cut(Words(), tokenizer, text)] == text.split()


def test_word_piece_marks_are_words_of_their_own(trained):
    tokenizer = trained("word-piece", TEXTS[:1])
    words = [tokenizer.decode(ids) for ids in cut(Words(), tokenizer, "The fox, hungry.")]
    assert words == ["the", "fox", ",", "hungry", "."]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_sentences_end_before_white_space_and_at_lines(trained, kind):
    tokenizer = trained(kind)
    text = "Was it late? No! It was 3.5 miles\nThe owl said so. The fox went home"
    sentences = [tokenizer.decode(ids).strip() for ids in cut(Sentences(), tokenizer, text)]
    expected = ["Was it late?", "No!", "It was 3.5 miles", "The owl said so."]
    assert sentences == [*expected, "The fox went home"]


def test_quotes_and_brackets_may_close_a_sentence(trained):
    tokenizer = trained("byte-level")
    tokens = ['."', "?)", "!'", "\u3002", ",", '"', "e.g"]
    tokenizer.add_tokens(tokens)
    ends = vocabulary(tokenizer).ends_sentence
    found = ends[tokenizer.convert_tokens_to_ids(tokens)].tolist()
    assert found == [True, True, True, True, False, False, False]


def test_tables_of_a_byte_level_vocabulary_by_hand():
    tokenizer = tiny_tokenizer()
    table = vocabulary(tokenizer)
    ids = [tokenizer(text)["input_ids"] for text in (" ", "\n", ".", "a", '"', "<|eos|>")]
    assert all(len(i) == 1 for i in ids)
    found = torch.stack(list(vars(table).values()), dim=1)[[i for [i] in ids]].tolist()
    #     begins a word, is space, ends a sentence, breaks the line, closes
    assert found == [
        [True, True, False, False, False],  # a space
        [True, True, False, True, False],  # a line break
        [False, False, True, False, False],  # a full stop
        [False, False, False, False, False],  # a letter
        [False, False, False, False, True],  # a closing quote
        [True, False, False, False, False],  # special
    ]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_texts_of_tokens_join_to_the_text(trained, kind):
    tokenizer = trained(kind)
    texts = token_texts(tokenizer)
    assert len(texts) == len(tokenizer)
    ids = tokenizer("The hungry fox", add_special_tokens=False)["input_ids"]
    assert "".join(texts[i] for i in ids).lstrip() == "The hungry fox"


def test_half_a_character_is_no_text_and_no_word(trained):
    for kind in ("byte-level", "metaspace"):
        tokenizer = trained(kind)
        ids = tokenizer("鳥", add_special_tokens=False)["input_ids"][-3:]
        assert [token_texts(tokenizer)[i] for i in ids] == ["\ufffd"] * 3
        assert not vocabulary(tokenizer).begins_word[ids].any()


def test_one_token_of_another_kind_does_not_mislead(trained):
    # Ġ, the mark of byte-level tokenizers, is also a letter, and ## may begin any text.
    tokenizer = trained("metaspace", [*TEXTS[:1], "Ġ Ġ Ġuħ Ġuħ ## ##"])
    words = [tokenizer.decode(ids) for ids in cut(Words(), tokenizer, "Ġuħ ate ## lunch")]
    assert words == ["Ġuħ", "ate", "##", "lunch"]


def test_added_tokens_are_written_as_they_are(trained):
    tokenizer = trained("byte-level")
    tokenizer.add_tokens(["  ", "éé", " then"])
    assert token_texts(tokenizer)[-3:] == ["  ", "éé", " then"]
    assert vocabulary(tokenizer).begins_word[-3:].tolist() == [True, False, True]


def test_marks_that_no_name_is_given_to_are_special(trained):
    tokenizer = trained("byte-level")
    tokenizer.backend_tokenizer.add_special_tokens(["<|turn|>"])  # as in many a tokenizer.json
    assert special_tokens(tokenizer) == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|turn|>": 300}
    assert vocabulary(tokenizer).begins_word[[0, 1, 2, 300]].all()


@pytest.mark.parametrize("size", [None, 10, 512])
def test_tables_are_as_long_as_the_model_needs(trained, size):
    table = vocabulary(trained("byte-level"), size)
    for column in vars(table).values():
        assert column.shape == (max(size or 0, 300),)
        assert not column[300:].any()
