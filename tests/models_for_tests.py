"""Minuscule models of many families and tokenizers of the three usual kinds, built in code."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers
from hypothesis import settings
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from forked import fork_server, forked_samplers  # noqa: F401

torch.set_num_threads(1)
# No deadline: busy machines are no failures. On CI the cases are the same each time, so that what
# passed here passes there; elsewhere each run tries new ones.
settings.register_profile(
    "marlhf",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=int(os.environ.get("MARLHF_EXAMPLES", 100)),
)
settings.load_profile("marlhf")

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
    if name == "gemma2" and attention is None:  # transformers before 5.22 forgets its soft caps
        attention = "eager"
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


TEXTS = (
    "The hungry fox saw three red apples, and it ate them all at once.",
    "Was it late? No! The owl's clock said half past nine.\nThe fox went home.",
    "A small bird sang about the river, the river and the long way to the sea.",
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def train(kind, texts=TEXTS, *, extra=(), bos=False, size=300):
    """A small tokenizer of a kind, which knows the words of some texts in a few pieces each."""
    options = {"vocab_size": size, "special_tokens": [*SPECIAL, *extra], "show_progress": False}
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        spaces, first = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
        steps = [spaces, decoders.ByteFallback(), decoders.Fuse(), first]
        tokenizer.decoder = decoders.Sequence(steps)
        trainer = trainers.BpeTrainer(**options)
        texts = [text.replace("\n", " ") for text in texts]  # a line break is always a byte
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(**options)
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "metaspace":  # as SentencePiece: a character it has not seen falls back to bytes
        learnt = json.loads(tokenizer.to_str())["model"]
        vocab = learnt["vocab"]
        vocab |= {f"<0x{b:02X}>": len(vocab) + b for b in range(256)}
        merges = [(a, b) for a, b in learnt["merges"]]
        tokenizer.model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        additional_special_tokens=list(extra),
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def trained():
    """`trained("byte-level", extra=["<|user|>"])`: see `train`."""
    return train
