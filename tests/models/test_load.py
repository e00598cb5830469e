import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from marlhf.models.base import ALLOCATOR_SETTINGS, ModelError, pick_device
from marlhf.models.facts import locate, model_facts, same_tokenizer
from marlhf.models.forward import Sequences, final_scores, token_stats
from marlhf.models.load import (
    check_vocabulary,
    end_tokens,
    load_policy,
    load_scalar,
    load_tokenizer,
)

IDS = torch.arange(2, 20)[None]


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def folder(tmp_path, small):
    """A small Llama, saved."""
    small("llama").save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_a_folder_by_transformers_loads_as_policy_and_as_scalar(tmp_path, small, family):
    original = small(family)
    original.save_pretrained(tmp_path)
    policy, scalar = load_policy(str(tmp_path)), load_scalar(str(tmp_path), seed=3)
    assert same_weights(policy, original)
    assert same_weights(scalar.base_model, original.base_model)
    assert scalar.score.weight.shape == (1, 32)
    torch.testing.assert_close(policy(IDS).logits, original(IDS).logits)


@torch.no_grad()
def test_a_saved_scalar_scores_alike_without_marlhf(tmp_path, small, family):
    small(family).save_pretrained(tmp_path / "policy")
    scalar = load_scalar(str(tmp_path / "policy"), seed=3)
    scalar.save_pretrained(tmp_path / "scalar")
    plain = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scalar", attn_implementation=scalar.config._attn_implementation
    )
    assert plain.config.num_labels == 1
    assert same_weights(load_scalar(str(tmp_path / "scalar"), seed=4), scalar)
    score = final_scores(scalar, Sequences.from_lists([[5, 6]], [[7, 8, 1]], pad_id=0))
    torch.testing.assert_close(plain(torch.tensor([[5, 6, 7, 8, 1]])).logits[0], score)


def test_a_fresh_head_is_the_seeds_alone(folder):
    heads = []
    for seed in (1, 1, 2):
        torch.rand(3)  # torch's own state is no part of it
        heads.append(load_scalar(str(folder), seed=seed).score.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert torch.equal(
        load_scalar("tiny", seed=1).score.weight, load_scalar("tiny", seed=1).score.weight
    )


def test_tiny_critic_and_tiny_policy_share_their_backbone():
    assert same_weights(
        load_scalar("tiny", seed=5).base_model, load_policy("tiny", seed=5).base_model
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi", "gpt-neox"])
@pytest.mark.parametrize("load", [load_policy, load_scalar])
def test_dropout_is_off_in_train_mode(tmp_path, small, name, load):
    rates = [k for k in small(name).config.to_dict() if k.endswith(("pdrop", "dropout"))]
    assert rates
    model = small(name, scalar=load is load_scalar, **dict.fromkeys(rates, 0.5))
    assert not torch.equal(model.train()(IDS).logits, model(IDS).logits)
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert loaded.training
    assert torch.equal(loaded(IDS).logits, loaded(IDS).logits)
    torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.parametrize("load", [load_policy, load_scalar])
def test_dropout_of_tiny_is_off(load):
    model = load("tiny")
    assert model.training
    assert torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_checkpointing_gives_the_same_gradients(tmp_path, small, name):
    small(name).save_pretrained(tmp_path)
    sequences = Sequences.from_lists([[5, 6, 7], [8]], [[9], [10, 11]], pad_id=0)
    plain, saving = (load_policy(str(tmp_path), checkpointing=c) for c in (False, True))
    assert saving.is_gradient_checkpointing
    for model in (plain, saving):
        token_stats(model, sequences).logprobs.sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_load_as_float32(tmp_path, small, dtype):
    small("llama").to(dtype).save_pretrained(tmp_path)
    for model in (load_policy(str(tmp_path)), load_scalar(str(tmp_path))):
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_tokenizer_without_pad_pads_with_eos(tmp_path, trained):
    tokenizer = trained("byte-level")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.pad_token, loaded.padding_side) == ("</s>", "left")


def test_a_tokenizer_without_eos_is_refused(tmp_path, trained):
    tokenizer = trained("byte-level")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no EOS token.*Set `eos_token`"):
        load_tokenizer(str(tmp_path))


def test_tokenizers_are_the_same_when_their_ids_mean_the_same(tmp_path, trained):
    tokenizer = trained("byte-level")
    tokenizer.save_pretrained(tmp_path)
    assert same_tokenizer(tokenizer, load_tokenizer(str(tmp_path)))
    assert not same_tokenizer(tokenizer, trained("byte-level", ["Some other words."], size=270))


def test_a_tokenizer_larger_than_the_embeddings_is_refused(small, trained):
    tokenizer = trained("byte-level")
    check_vocabulary(small("llama", vocab_size=300), tokenizer, "policy")
    tokenizer.add_tokens(["new"])
    with pytest.raises(ModelError, match=r"has 301 tokens but policy embeds only 300.*same folder"):
        check_vocabulary(small("llama", vocab_size=300), tokenizer, "policy")


def test_responses_end_at_each_eos_that_model_or_tokenizer_names(small, trained):
    model, tokenizer = small("llama"), trained("byte-level")  # EOS 1 and 2
    assert end_tokens(model, tokenizer) == [1, 2]
    model.generation_config.eos_token_id = [7, 2]
    assert end_tokens(model, tokenizer) == [2, 7]
    model.generation_config.eos_token_id = None
    assert end_tokens(model, tokenizer) == [2]


# What is wrong with the folder, and what the sentence must say besides its path.


def no_folder(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def pickle_only(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_short(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def one_weight_lost(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def broken_config(folder):
    (folder / "config.json").write_text("{")


def senseless_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "large"}))


@pytest.mark.parametrize("load", [load_policy, load_scalar])
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (no_folder, "There is no folder .* run that stage first"),
        (no_weights, "safetensors weights?"),
        (pickle_only, "safetensors weights?"),
        (cut_short, "safetensors weights?"),
        (one_weight_lost, r"lack 1 of .* model.layers.1.mlp.up_proj.weight .*Save it again"),
        (broken_config, "not a valid JSON file"),
        (senseless_config, "hidden_size"),
    ],
)
def test_a_spoilt_folder_is_a_sentence(folder, spoil, sentence, load):
    spoil(folder)
    with pytest.raises(ModelError, match=sentence) as caught:
        load(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_is_a_sentence(folder):
    with pytest.raises(ModelError, match=r"Cannot load the tokenizer .* tokenizer.json\?"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"Cannot load the tokenizer .* tokenizer.json\?"):
        load_tokenizer(str(folder))


def test_a_classifier_of_two_labels_is_no_reward_model(tmp_path, small):
    model = small("llama", scalar=True)
    model.score = torch.nn.Linear(32, 2, bias=False)
    model.config.num_labels = 2
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"classifies into 2 labels; a reward model has one. Take"):
        load_scalar(str(tmp_path))


def test_an_encoder_is_neither_policy_nor_scalar(tmp_path):
    config = BertConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is no decoder.*Take a decoder"):
        load_policy(str(tmp_path))
    with pytest.raises(ModelError, match=r"is a BertForSequenceClassification, .* have `score`"):
        load_scalar(str(tmp_path))


def test_an_encoder_decoder_is_neither_policy_nor_scalar(tmp_path):
    config = T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Cannot load the model"):
        load_policy(str(tmp_path))
    with pytest.raises(ModelError, match=r"is a T5ForSequenceClassification, .* have `score`"):
        load_scalar(str(tmp_path))


def write_gguf(path, model, tokenizer):
    """As llama.cpp's converter does; Qwen2, for it stores every matrix as it is."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    learnt = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(learnt["vocab"], key=learnt["vocab"].get))
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 297)
    writer.add_token_merges([" ".join(pair) for pair in learnt["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_a_gguf_file_loads_and_saves_as_any_other_model(tmp_path, small, trained):
    file, model = tmp_path / "model.gguf", small("qwen2", vocab_size=300)
    write_gguf(file, model, trained("byte-level"))
    tokenizer, policy, scalar = (
        load_tokenizer(str(file)),
        load_policy(str(file)),
        load_scalar(str(file)),
    )
    assert tokenizer.eos_token_id == 2  # as the file says
    text = "The fox ate a red apple, the owl didn't."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    torch.testing.assert_close(policy(IDS).logits, model(IDS).logits)
    assert same_weights(policy.base_model, scalar.base_model)
    for part, name in ((policy, "policy"), (tokenizer, "policy"), (scalar, "scalar")):
        part.save_pretrained(tmp_path / name)
    assert "quantization_config" not in (tmp_path / "policy" / "config.json").read_text()
    assert same_weights(load_policy(str(tmp_path / "policy")), policy)
    assert same_weights(load_scalar(str(tmp_path / "scalar")), scalar)
    assert same_tokenizer(load_tokenizer(str(tmp_path / "policy")), tokenizer)


def test_a_missing_or_damaged_gguf_file_is_a_sentence(tmp_path):
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    for load in (load_policy, load_scalar, load_tokenizer):
        with pytest.raises(ModelError, match=r"There is no file .*model.gguf. Check the path"):
            load(str(file))
    file.write_bytes(b"GGUF and no more")
    for load in (load_policy, load_scalar, load_tokenizer):
        with pytest.raises(ModelError, match="Is it a whole GGUF file"):
            load(str(file))


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_a_reward_model_is_no_policy(tmp_path, small, kind):
    small(kind, scalar=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a reward model"):
        load_policy(str(tmp_path))
    assert model_facts(str(tmp_path)).is_scalar
    assert not model_facts("tiny").is_scalar


def test_the_folder_of_a_run_is_told_from_its_model(tmp_path, small):
    small("llama").save_pretrained(tmp_path / "sft" / "model")
    with pytest.raises(ModelError, match=r"It is the folder of a run; its model is .*sft/model"):
        load_policy(str(tmp_path / "sft"))
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "run.json").write_text("{}")
    with pytest.raises(ModelError, match="is not finished"):
        load_scalar(str(tmp_path / "reward" / "model"))


def read_config(path, setting):
    return model_facts(path, setting=setting).config


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no.such.host.invalid"])
@pytest.mark.parametrize("load", [load_policy, load_scalar, load_tokenizer, read_config])
def test_without_the_hub_there_is_one_try_and_one_sentence(monkeypatch, capfd, load, endpoint):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"`reward_model`: There is no folder nope here.* hub"):
        load("nope", setting="reward_model")
    assert time.monotonic() - start < 5
    written = capfd.readouterr()
    assert "Retry" not in written.out + written.err


def test_what_was_downloaded_serves_without_the_hub(monkeypatch, tmp_path, small, trained):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    small("llama", vocab_size=300).save_pretrained(snapshot)
    trained("byte-level").save_pretrained(snapshot)
    start = time.monotonic()
    assert locate("someone/model") == {"pretrained_model_name_or_path": str(snapshot)}
    model = load_policy("someone/model")
    assert same_weights(model, small("llama", vocab_size=300))
    assert load_tokenizer("someone/model").eos_token == "</s>"
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("load", [load_policy, load_scalar])
def test_weights_that_are_no_numbers_are_named(tmp_path, small, load, value):
    model = small("llama", scalar=load is load_scalar)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4:6] = value
    sentence = r"not a number: 2 of the 1024 in model.layers.1.mlp.up_proj.weight"
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{tmp_path.name} has weights .*{sentence}"):
        load(str(tmp_path))
    with pytest.raises(ModelError, match=f"The Llama.* given has weights .*{sentence}"):
        load(model)


@pytest.mark.parametrize("given", [None, *ALLOCATOR_SETTINGS])
def test_the_allocator_wastes_no_blocks_unless_the_user_has_set_it(monkeypatch, given):
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    assert pick_device("cpu") == torch.device("cpu")
    found = {name: os.environ.get(name) for name in ALLOCATOR_SETTINGS}
    if given:
        assert found == dict.fromkeys(ALLOCATOR_SETTINGS) | {given: "max_split_size_mb:64"}
    else:
        assert found == dict.fromkeys(ALLOCATOR_SETTINGS, "expandable_segments:True")
        for name in ALLOCATOR_SETTINGS:
            monkeypatch.setenv(name, "")  # so that monkeypatch takes it away again
