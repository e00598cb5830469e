"""Scalar heads, also for families that have none in transformers."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from marlhf.config.stage import LoRA
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.base import ModelError
from marlhf.models.facts import model_facts
from marlhf.models.forward import Sequences, final_scores, token_values
from marlhf.models.heads import backbone, with_scalar_head
from marlhf.models.load import load_policy, load_scalar
from tiny_families import random_config

BATCH = Sequences.from_lists([[5, 6], [7, 8, 9]], [[7, 8, 1], [3, 1]], 0)
WITHOUT_CLASSIFIER = [
    *("cohere", "cohere2", "granite", "granitemoe", "llama4_text", "olmoe", "glm4_moe", "ernie4_5"),
    *("ernie4_5_moe", "xglm", "gpt_neox_japanese"),
]


def language_model(kind):
    torch.manual_seed(0)
    return load_policy(AutoModelForCausalLM.from_config(random_config(kind)))


@torch.no_grad()
@pytest.mark.parametrize("kind", [*WITHOUT_CLASSIFIER, "llama", "gpt_bigcode"])
def test_a_language_model_becomes_a_scalar_model_that_loads_again(tmp_path, kind):
    model = language_model(kind)
    scalar = load_scalar(with_scalar_head(model, seed=3))
    scores = final_scores(scalar, BATCH)
    hidden = backbone(model)(input_ids=BATCH.ids).last_hidden_state
    expected = scalar.score(hidden)[0, 4], scalar.score(hidden)[1, 4]  # the last real tokens
    torch.testing.assert_close(scores[:, None], torch.stack(expected))
    scalar.save_pretrained(tmp_path / "scalar")
    assert model_facts(str(tmp_path / "scalar")).is_scalar
    assert torch.equal(final_scores(load_scalar(str(tmp_path / "scalar"), seed=9), BATCH), scores)
    model.save_pretrained(tmp_path / "language")
    assert not model_facts(str(tmp_path / "language")).is_scalar
    fresh = load_scalar(str(tmp_path / "language"), seed=3)
    assert torch.equal(final_scores(fresh, BATCH), scores)
    with pytest.raises(ModelError, match="is a reward model"):
        load_policy(str(tmp_path / "scalar"))


@pytest.mark.parametrize("kind", ["cohere", "llama4_text", "granite"])
def test_a_critic_as_an_adapter_saves_as_a_scalar_model(tmp_path, kind):
    pytest.importorskip("peft")
    model = language_model(kind)
    alone = load_scalar(with_scalar_head(model, seed=3))
    base = FrozenBaseModel(model)
    critic = base.scalar_model(LoRA(r=2, target_modules=("q_proj", "v_proj")), seed=3)
    assert torch.equal(token_values(critic, BATCH), token_values(alone, BATCH))
    token_values(critic, BATCH).sum().backward()
    critic.save_pretrained(tmp_path)
    saved = load_scalar(str(tmp_path))
    torch.testing.assert_close(token_values(saved, BATCH), token_values(critic, BATCH))


def test_a_decoder_out_of_a_larger_model_is_refused():
    config = transformers.MarianConfig(vocab_size=48, d_model=16, decoder_layers=1, pad_token_id=0)
    for heads in ("decoder_attention_heads", "encoder_attention_heads"):
        setattr(config, heads, 2)
    model = transformers.MarianForCausalLM(config)
    with pytest.raises(ModelError, match="MarianForCausalLM cannot have a scalar head"):
        with_scalar_head(model, 0)


SMALL = {"vocab_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}


@pytest.mark.parametrize(
    "model",
    [
        lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SMALL)),
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
        lambda: transformers.RobertaForCausalLM(transformers.RobertaConfig(**SMALL)),
        lambda: transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(vocab_size=48, d_model=16, n_layer=1, n_head=2, d_inner=16)
        ),
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1)
        ),
    ],
    ids=["bert", "masked", "roberta", "xlnet", "t5"],
)
def test_models_whose_tokens_see_later_ones_are_refused(tmp_path, model):
    given = model()
    with pytest.raises(ModelError, match=r"The .* given is no decoder.*Take a decoder"):
        load_policy(given)
    if not isinstance(given, transformers.T5ForConditionalGeneration):
        given.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="is no decoder"):
            load_policy(str(tmp_path))


def test_a_bert_decoder_is_one():
    config = transformers.BertConfig(**SMALL, is_decoder=True)
    assert load_policy(transformers.BertLMHeadModel(config)).training


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt_bigcode"])
@pytest.mark.parametrize("size", [1 / 16, 1.0, 8.0])
def test_a_fresh_head_scores_about_1_however_large_the_hidden_states(kind, size):
    """A random head of one scale would start some critics with values of 8 for rewards of 1."""
    model = language_model(kind)
    plain = with_scalar_head(model, seed=3).score.weight
    norm = [module for module in backbone(model).modules() if "Norm" in type(module).__name__][-1]
    norm.weight.mul_(size)
    scalar = load_scalar(with_scalar_head(model, seed=3))
    assert torch.equal(scalar.score.weight, plain / size)  # by the same seed
    assert 0.05 < float(final_scores(scalar, BATCH).square().mean().sqrt()) < 5
    critic = FrozenBaseModel(model).scalar_model(LoRA(r=2), seed=3)
    assert torch.equal(critic.score.weight, scalar.score.weight)
