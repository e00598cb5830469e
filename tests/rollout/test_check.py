"""Families whose cache or attention is unusual: sampled as they are trained, or refused."""

import warnings

import pytest
import torch
import transformers

from marlhf.errors import SettingError
from marlhf.models.forward import Sequences, token_stats
from marlhf.rollout import Sampling
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.native import NativeEngine, check_length
from marlhf.rollout.slots import ModuleDecoder

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
UNUSUAL = {
    "Llama4Text": {
        **SIZES,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 32,
        "no_rope_layers": [1, 0],
    },
    "Phimoe": {**SIZES, "sliding_window": 8, "num_local_experts": 2},
    "RecurrentGemma": {
        **SIZES,
        "num_hidden_layers": 3,
        "attention_window_size": 8,
        "lru_width": 32,
    },
    "DeepseekV32": LATENT,
    "HYV4": {**SIZES, "index_topk": 8},
    "MiniMax": {**SIZES, "num_local_experts": 2, "block_size": 8},
    "KimiLinear": {**SIZES, "num_key_value_heads": 4},
    "OpenAIGPT": {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
PROMPTS = [[5 + i % 7, 2 + i, *range(3, 3 + i % 5 * 4)] for i in range(6)]
PROMPTS.append([7 * i % 45 + 2 for i in range(30)])


def build(name, **settings):
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(kind(**settings)).float().eval()


@torch.no_grad()
def largest_gap(model, engine, length=24):
    """Log-probs of sampling against those of training, each row trained on alone."""
    rollout = engine.generate(PROMPTS, Sampling(length), range(len(PROMPTS)))
    gaps = []
    for prompt, response, sampled in zip(PROMPTS, rollout.responses, rollout.logprobs):
        trained = token_stats(model, Sequences.from_lists([prompt], [response], 0)).logprobs[0]
        gaps.append(float((sampled[: len(response)] - trained).abs().max()))
    return max(gaps)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_families_are_sampled_as_they_are_trained_or_refused(name):
    model = build(name, **UNUSUAL[name])
    engine = NativeEngine(model, [1], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            gap = largest_gap(model, engine)
        except SettingError as error:
            assert "cannot sample from a" in str(error)  # noqa: PT017
            assert "engine: vllm" in str(error)  # noqa: PT017
        else:
            assert gap < 1e-3


@pytest.mark.parametrize("name", ["Llama4Text", "Phimoe"])
def test_the_check_goes_past_windows_and_chunks_that_texts_exceed(name):
    model = build(name, **UNUSUAL[name])
    engine = NativeEngine(model, [1], 0)
    engine.generate([[5, 6]], Sampling(4), [0])  # within 8 tokens the slots are right
    assert engine.decoder_class is ModuleDecoder
    with pytest.warns(UserWarning, match="cannot replace the attention .* plain loop"):
        assert largest_gap(model, engine) < 1e-3
    assert engine.decoder_class is None


def test_a_model_that_padding_disturbs_is_sampled_row_by_row():
    model = build("RecurrentGemma", **UNUSUAL["RecurrentGemma"])
    engine = NativeEngine(model, [1], 0)
    with pytest.warns(UserWarning, match="one row at a time"):
        assert largest_gap(model, engine) < 1e-3


def test_a_model_that_no_cache_serves_is_refused_before_anything_is_sampled():
    model = build("OpenAIGPT", **UNUSUAL["OpenAIGPT"])
    with pytest.raises(SettingError, match=r"OpenAIGPTLMHeadModel with a key-value cache \("):
        NativeEngine(model, [1], 0).generate(PROMPTS, Sampling(4), range(7))


def test_sizes_that_no_text_exceeds_cost_nothing():
    mistral = transformers.MistralConfig(sliding_window=4096, max_position_embeddings=32768)
    assert check_length(mistral, 4096) == 6
    assert check_length(mistral, 4097) == 4 * 4096
    assert check_length(transformers.LlamaConfig(), 10**6) == 6
    chunked = transformers.Llama4TextConfig(attention_chunk_size=64, max_position_embeddings=128)
    assert check_length(chunked, 65) == 128


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dynamic", {"factor": 4.0}),
        ("longrope", {"short_factor": [1.0] * 4, "long_factor": [4] * 4}),
    ],
)
def test_rotary_angles_that_change_with_length_are_refused_past_the_original_length(kind, settings):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    limits = {"max_position_embeddings": 16 if kind == "dynamic" else 64}
    model = build("Llama", **{**SIZES, **limits, "rope_parameters": {**rope, **settings}})
    engine = NativeEngine(model, [1], 0)
    with pytest.raises(SettingError, match=rf"\({kind}\) change beyond 16 tokens.* may have 38"):
        engine.generate(PROMPTS, Sampling(8), range(7))
    rollout = engine.generate([[5, 6], [3]], Sampling(14), [0, 1])
    assert not LlamaDecoder.fits(model)
    with torch.no_grad():
        sequences = Sequences.from_lists([[5, 6], [3]], rollout.responses, 0)
        expected = token_stats(model, sequences).logprobs
    torch.testing.assert_close(rollout.logprobs, expected, atol=1e-4, rtol=0)
