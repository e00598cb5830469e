import time

import pytest

from marlhf.data import DataError, Row, decode, encode_prompt, encode_response, fit_prompts
from marlhf.data.encode import cut_middle, encode_prompts, opening_ids

BOS, EOS = 1, 0
CHAT = [{"role": "user", "content": "hello"}]


def says(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos_behind", [False, True])
def test_a_prompt_has_the_tokenizers_bos_and_never_an_eos(make_tokenizer, bos, eos_behind):
    tokenizer = make_tokenizer(bos=bos, eos_behind=eos_behind)
    ids = encode_prompt(tokenizer, "Human: hello\n\nAssistant:")
    assert (ids[0] == BOS) == bos
    assert EOS not in ids
    assert decode(tokenizer, ids) == "Human: hello\n\nAssistant:"
    assert opening_ids(tokenizer) == ([BOS] if bos else [])


def test_a_bos_the_user_wrote_is_not_doubled(make_tokenizer):
    ids = encode_prompt(make_tokenizer(bos=True), "<s>hello")
    assert ids.count(BOS) == 1


@pytest.mark.parametrize("bos", [False, True])
def test_many_prompts_are_encoded_as_each_alone(make_tokenizer, chatml, bos):
    tokenizer = make_tokenizer(bos=bos, template=chatml)
    prompts = ["hello", CHAT, "Human: what"]
    assert encode_prompts(tokenizer, prompts) == [encode_prompt(tokenizer, p) for p in prompts]
    assert encode_prompts(tokenizer, []) == []


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"bos": True, "eos_behind": True}])
def test_a_response_ends_with_eos_once_and_has_no_bos(make_tokenizer, options):
    tokenizer = make_tokenizer(**options)
    for response in (" hello world", "hello", " hello<|im_end|>", ""):
        ids = encode_response(tokenizer, "Assistant:", response, EOS)
        assert (ids.count(EOS), ids[-1], ids.count(BOS)) == (1, EOS, 0)
        assert decode(tokenizer, ids) == response.removesuffix("<|im_end|>")


def test_special_tokens_written_in_a_response_stay_text(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = encode_response(tokenizer, "Q:", " a<|im_end|>b<s>", EOS)
    assert ids.count(EOS) == 1
    assert decode(tokenizer, ids) == " a<|im_end|>b<s>"
    # and the tokenizer is left as it was
    assert encode_prompt(tokenizer, "<s>") == [BOS]


def test_a_text_response_is_its_own_tokens(make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    bare = tokenizer(" It is a clot.", add_special_tokens=False)["input_ids"]
    assert encode_response(tokenizer, "Assistant:", " It is a clot.", EOS) == [*bare, EOS]


def test_a_response_that_fuses_with_a_colon_is_encoded_alone(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([":)"])
    ids = encode_response(tokenizer, "TL;DR:", ")", EOS)
    assert decode(tokenizer, ids) == ")"


def test_sentencepiece_puts_no_second_space_before_a_response(make_tokenizer):
    tokenizer = make_tokenizer(metaspace=True)
    prompt = encode_prompt(tokenizer, "Assistant:")
    response = encode_response(tokenizer, "Assistant:", " hello", EOS)
    whole = tokenizer("Assistant: hello", add_special_tokens=False)["input_ids"]
    assert prompt + response == [*whole, EOS]


def test_a_chat_prompt_ends_where_the_assistant_begins(make_tokenizer, chatml):
    tokenizer = make_tokenizer(bos=True, template=chatml)
    text = tokenizer.decode(encode_prompt(tokenizer, CHAT))
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_prompt_is_what_the_template_gives(make_tokenizer, chatml):
    tokenizer = make_tokenizer(template=chatml)
    theirs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert encode_prompt(tokenizer, CHAT) == list(theirs)


def test_a_chat_response_is_the_turn_up_to_eos(make_tokenizer, chatml):
    tokenizer = make_tokenizer(template=chatml)
    for response in (says("It is a clot."), "It is a clot."):
        ids = encode_response(tokenizer, CHAT, response, EOS)
        assert tokenizer.decode(ids) == "It is a clot.<|im_end|>"
        assert ids.count(EOS) == 1


def test_a_chat_response_keeps_the_prompts_ids_where_tokens_could_fuse(make_tokenizer, chatml):
    tokenizer = make_tokenizer(template=chatml)
    tokenizer.add_tokens(["\nworld"])  # the header's line break and the first word as one token
    ids = encode_response(tokenizer, CHAT, says("world"), EOS)
    whole = encode_prompt(tokenizer, CHAT) + ids
    assert tokenizer.decode(whole).endswith("<|im_start|>assistant\nworld<|im_end|>")


def test_a_template_without_eos_gets_one(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    ids = encode_response(tokenizer, CHAT, says("clot"), EOS)
    assert (ids.count(EOS), ids[-1]) == (1, EOS)
    assert decode(tokenizer, ids) == "clot\n"


def test_messages_without_a_template(make_tokenizer):
    with pytest.raises(DataError, match=r"no chat template.*or give the prompts as text"):
        encode_prompt(make_tokenizer(), CHAT)


def test_a_template_that_contradicts_its_own_generation_prompt(make_tokenizer, chatml):
    tokenizer = make_tokenizer(template=chatml.replace("assistant\n", "assistant\n<think>"))
    with pytest.raises(DataError, match="does not write an assistant's turn as it begins one"):
        encode_response(tokenizer, CHAT, says("clot"), EOS)


def test_cutting_keeps_both_ends():
    assert cut_middle([1, 2, 3, 4, 5, 6], 4) == [1, 2, 5, 6]
    assert cut_middle([1, 2, 3, 4, 5, 6], 3) == [1, 5, 6]
    assert cut_middle([1, 2, 3], 1) == [3]
    assert cut_middle([1, 2, 3], 3) == [1, 2, 3]


def test_long_prompts_are_dropped_and_counted(make_tokenizer):
    rows = [Row("hello"), Row("hello world " * 30), Row("what")]
    kept, counts = fit_prompts(rows, make_tokenizer(), 20)
    assert [each.row.prompt for each in kept] == ["hello", "what"]
    assert str(counts) == (
        "read 3 rows, kept 2\n  dropped 1: the prompt is longer than 20 tokens (row 2)"
    )


def test_truncation_keeps_the_opening_and_the_close(make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    row = Row("POST Subreddit: r/cats\n" + "hello world " * 30 + "\nTL;DR:")
    [each], counts = fit_prompts([row], tokenizer, 40, "truncate")
    assert len(each.prompt_ids) == 40
    assert each.prompt_ids[0] == BOS
    text = decode(tokenizer, each.prompt_ids)
    assert text.startswith("POST Sub")
    assert text.endswith("\nTL;DR:")
    assert counts.kept == 1
    assert counts.noted.total() == 1


def test_no_prompt_fits(make_tokenizer):
    with pytest.raises(DataError, match=r"None of the 1 prompts fits into 2 tokens.*truncate"):
        fit_prompts([Row("hello world, what is it?")], make_tokenizer(), 2)
    assert fit_prompts([], make_tokenizer(), 2)[0] == []


def test_a_prompt_of_no_tokens_is_dropped_and_counted(trained):
    kept, counts = fit_prompts([Row("\x01"), Row("the fox")], trained("wordpiece"), 8)
    assert [e.row.prompt for e in kept] == ["the fox"]
    assert counts.dropped == {"the tokenizer makes no tokens of the prompt": 1}


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
    ],
)
def test_a_template_that_refuses_a_chat_is_a_sentence(make_tokenizer, template, cause):
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    with pytest.raises(DataError, match=rf"refuses a chat of system, user \(.*{cause}.*Change"):
        encode_prompt(make_tokenizer(template=template), chat)


def test_a_huge_text_takes_no_time(make_tokenizer):
    tokenizer, huge = make_tokenizer(), "hello there " * 1_000_000
    rows = [Row("hello"), Row(huge, position="mine.jsonl:7")]
    began = time.monotonic()
    kept, counts = fit_prompts(rows, tokenizer, 64)
    assert [encoded.row for encoded in kept] == rows[:1]
    assert "longer than 64 tokens (mine.jsonl:7)" in str(counts)
    [_, cut], _ = fit_prompts(rows, tokenizer, 64, "truncate")
    whole = encode_prompt(tokenizer, "hello there " * 200)
    assert cut.prompt_ids == cut_middle(whole, 64)
    assert len(encode_response(tokenizer, "a", huge, EOS, max_tokens=64)) > 65
    assert time.monotonic() - began < 5


def test_a_limit_changes_no_text_that_is_not_huge(make_tokenizer):
    tokenizer, text = make_tokenizer(), "hello there " * 5000
    ids = encode_response(tokenizer, "a", text, EOS)
    assert encode_response(tokenizer, "a", text, EOS, max_tokens=3) == ids
