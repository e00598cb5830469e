"""Minuscule models of many families and tokenizers of the three usual kinds, built in code."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

VOCABULARY = 48
LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large, so that no two tokens look alike
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA2 = {**LLAMA_LIKE, **WINDOW, "query_pre_attn_scalar": 8}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": ("LlamaConfig", LLAMA_LIKE),
    "llama-tied": ("LlamaConfig", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", LLAMA_LIKE),
    "qwen3": ("Qwen3Config", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**LLAMA_LIKE, "sliding_window": 4}),
    "gemma": ("GemmaConfig", LLAMA_LIKE),
    "gemma2": ("Gemma2Config", {**GEMMA2, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA2, "tie_word_embeddings": False}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-untied": ("GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "gpt-neox": ("GPTNeoXConfig", LLAMA_LIKE),
    "phi": ("PhiConfig", LLAMA_LIKE),
}


def build(name, scalar=False, attention=None, seed=0, **overrides):
    """A random model of a family, its dropout off as far as the config's own defaults say."""
    kind, settings = FAMILIES[name]
    config = getattr(transformers, kind)(**{**settings, **overrides})
    if scalar:
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, attn_implementation=attention)
    return model.float().eval()


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def small():
    """`small("llama", scalar=True, **config)`: see `build`."""
    return build
