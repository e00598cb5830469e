import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from marlhf.data import toy
from marlhf.models.tiny import tiny_config, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def words_and_marks(text):
    """How many tokens the text needs when every word and every mark is one."""
    return len(TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text))


@given(st.text(max_size=300))
def test_any_text_comes_back_exactly(text):
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert None not in ids


def test_every_word_of_the_task_is_one_token():
    for row in toy.rows(256):
        for text in (row.prompt, row.prompt + row.chosen, row.rejected):
            assert len(TOKENIZER(text)["input_ids"]) == words_and_marks(text)


def test_prompt_and_response_are_tokenized_apart_as_together():
    for row in toy.rows(64):
        apart = TOKENIZER(row.prompt)["input_ids"] + TOKENIZER(row.chosen)["input_ids"]
        assert apart == TOKENIZER(row.prompt + row.chosen)["input_ids"]


def test_every_process_builds_the_same_vocabulary():
    vocab = sorted(TOKENIZER.get_vocab().items(), key=lambda item: item[1])
    assert [i for _, i in vocab] == list(range(len(vocab)))
    assert len(vocab) < 512
    digest = hashlib.sha256(json.dumps(vocab).encode()).hexdigest()
    assert digest == "ab758e79c40065181a4d100e0c2450fea8ffba1a60ca516dcb7782161fd29d78"


def test_special_tokens_are_their_own():
    names = ("<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>")
    assert TOKENIZER.convert_tokens_to_ids(names) == [0, 1, 2, 3]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)
    story = "".join((names[2], "Hi", names[3], " fox", names[1]))
    assert TOKENIZER.decode(TOKENIZER(story)["input_ids"], skip_special_tokens=True) == "Hi fox"


def test_chat_template_marks_who_speaks():
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>Hi?<|assistant|>Ho.<|eos|>"
    prompt = TOKENIZER.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>Hi?<|assistant|>"
    assert text.startswith(prompt)


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = tiny_model(), tiny_model(0), tiny_model(1)
    assert torch.equal(torch.get_rng_state(), before), "torch's own seed must be left alone"
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_the_model_fits_the_tokenizer():
    model = tiny_model()
    config = model.config
    assert config.vocab_size == len(TOKENIZER)
    assert (config.pad_token_id, config.eos_token_id) == (0, 1)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.dtype == torch.float32
    assert config.num_key_value_heads < config.num_attention_heads
    assert sum(p.numel() for p in model.parameters()) < 300_000
    assert tiny_config(hidden_size=32, num_hidden_layers=1).hidden_size == 32


@pytest.mark.filterwarnings("error::UserWarning")
def test_model_and_tokenizer_survive_a_folder(tmp_path):
    model = tiny_model().eval()
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    text = toy.rows(1)[0].prompt + " Ein Fuchs, ein Bär\n\t<|eos|>"
    assert tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.eos_token == "<|eos|>"
    assert tokenizer.model_max_length == 512
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_it_generates_after_left_padding():
    batch = TOKENIZER(["Tell me a tale of a shy cat.", "Hi"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1, 0] == TOKENIZER.pad_token_id
    out = tiny_model().generate(**batch, do_sample=False, max_new_tokens=4)
    assert out.shape[0] == 2
    assert out.shape[1] <= batch["input_ids"].shape[1] + 4
