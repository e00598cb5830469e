"""Two passes in training mode agree bit for bit, however a family holds its dropout."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf.models.heads import with_scalar_head
from marlhf.models.load import disable_dropout, load_policy, load_scalar
from tiny_families import random_config

IDS = torch.arange(2, 20)[None]
KINDS = [
    *("opt", "gpt_bigcode", "biogpt", "xglm", "seed_oss", "bloom", "starcoder2", "doge"),
    *("gpt_neox", "gpt_neox_japanese", "phi", "qwen2_moe", "olmoe", "granite", "cohere", "llama"),
    *("mixtral", "phimoe", "minimax", "granitemoe"),
]


def random_model(kind, auto=AutoModelForCausalLM):
    torch.manual_seed(0)
    return auto.from_config(random_config(kind))


def is_random(model):
    model.train()
    with torch.no_grad():
        return not torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_given_as_an_object(kind):
    model = random_model(kind)
    if kind not in ("olmoe", "llama", "cohere", "granite", "granitemoe", "qwen2_moe"):
        assert is_random(model)  # else its dropout is nowhere but in attention, which may be fused
    with torch.no_grad():
        expected = model.eval()(IDS).logits
    loaded = load_policy(model)
    assert loaded is model
    assert loaded.training
    assert not is_random(loaded)
    torch.testing.assert_close(loaded(IDS).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_from_a_folder(tmp_path, kind):
    random_model(kind).save_pretrained(tmp_path)
    assert not is_random(load_policy(str(tmp_path)))


@pytest.mark.parametrize("kind", ["opt", "mixtral", "phimoe", "seed_oss", "gpt_bigcode"])
def test_scalar_models_too(tmp_path, kind):
    model = random_model(kind, AutoModelForSequenceClassification)
    model.config.num_labels = 1
    model.score = torch.nn.Linear(32, 1, bias=False)
    assert is_random(model)
    assert not is_random(load_scalar(model))
    assert not is_random(load_scalar(with_scalar_head(random_model(kind), 0)))
    random_model(kind).save_pretrained(tmp_path)
    assert not is_random(load_scalar(str(tmp_path)))


@pytest.mark.parametrize("kind", ["opt", "phimoe"])
def test_gradient_checkpointing_and_copies_stay_deterministic(kind):
    model = load_policy(random_model(kind), checkpointing=True)
    assert model.is_gradient_checkpointing
    again = copy.deepcopy(model)
    for one in (model, again):
        assert not is_random(one)
        one(IDS).logits.logsumexp(-1).sum().backward()
    for a, b in zip(model.parameters(), again.parameters()):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_what_is_not_dropout_stays(small):
    model = small("llama")
    before = {**vars(model.config)}
    disable_dropout(model)
    assert vars(model.config) == before
