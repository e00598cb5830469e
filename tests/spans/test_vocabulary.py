import pytest
import torch
from tokenizers import AddedToken

from marlhf.core import Responses, Sentences, Words, segment
from marlhf.models.tiny import tiny_tokenizer
from marlhf.spans import special_tokens, token_texts, vocabulary
from marlhf.spans.align import TokenBytes

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
    # begins a word, is space, ends a sentence, breaks the line, closes; full-width, short, number
    assert [row[:5] for row in found] == [
        [True, True, False, False, False],  # a space
        [True, True, False, True, False],  # a line break
        [False, False, True, False, False],  # a full stop
        [False, False, False, False, False],  # a letter
        [False, False, False, False, True],  # a closing quote
        [True, False, False, False, False],  # special
    ]
    assert not any(value for row in found for value in row[5:])


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


def texts(rule, tokenizer, text):
    return [tokenizer.decode(ids).strip() for ids in cut(rule, tokenizer, text)]


def test_sentences_of_chinese_and_japanese_need_no_white_space(trained):
    sentences = ["狐狸饿了。", "它吃了吗？", "「吃了！」", "他说。", "再见"]  # noqa: RUF001
    tokenizer = trained("byte-level")
    tokenizer.add_tokens(sorted(set("".join(sentences))))
    assert texts(Sentences(), tokenizer, "".join(sentences)) == sentences


def test_abbreviations_and_the_numbers_of_lists_end_no_sentence(trained):
    tokenizer = trained("byte-level")
    tokenizer.add_tokens(["Dr", " Dr", " Mrs.", "1", "2", "0"])
    text = "Dr. Fox saw Mrs. Owl. It was 20. Then:\n1. The fox\n12. The owl. All of it"
    expected = ["Dr. Fox saw Mrs. Owl.", "It was 20.", "Then:", "1. The fox", "12. The owl."]
    assert texts(Sentences(), tokenizer, text) == [*expected, "All of it"]


def test_runs_of_spaces_that_were_added_are_spaces(trained):
    """As in Gemma's vocabulary, whose decoder turns the mark into a space in added tokens too."""
    tokenizer = trained("metaspace")
    tokenizer.add_tokens([AddedToken("\u2581" * 4, normalized=False), "\u2581\u2581"])
    table = TokenBytes.of(tokenizer)
    [four, two] = tokenizer.convert_tokens_to_ids(["\u2581" * 4, "\u2581\u2581"])
    words = tokenizer("if x:", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([words[0], four, *words]).count(" ") >= 4
    aligned = table.align([[four, *words], [two]])
    assert aligned.texts[0].startswith("    ")
    assert "\u2581" not in "".join(aligned.texts)
    assert vocabulary(tokenizer).is_space[[four, two]].all()
    # Special tokens and other kinds of tokenizer keep the mark: there it is a character.
    plain = trained("byte-level")
    plain.add_tokens(["a\u2581b"])
    assert token_texts(plain)[-1] == "a\u2581b"
