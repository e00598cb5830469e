"""A model small enough to train on two CPU cores, built in code: no hub, no download.

It is an ordinary Llama with an ordinary fast tokenizer, so everything that
works on a real model works on this one, and the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from marlhf.data import toy

PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>"
MAX_POSITIONS = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}<|eos|>"
    "{% else %}"
    "<|user|>{{ message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows each word of `data.toy` as one token.

    Other words fall apart into bytes, so any text comes back exactly. There is
    nothing to train: with `ignore_merges` a word that is in the vocabulary is
    taken whole, and there are no merges to build one that is not.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = {word for text in toy.phrases() for word, _ in byte_level.pre_tokenize_str(text)}
    symbols = pre_tokenizers.ByteLevel.alphabet()
    vocab = [PAD, EOS, USER, ASSISTANT, *sorted(symbols), *sorted(words - set(symbols))]
    model = models.BPE({token: i for i, token in enumerate(vocab)}, [], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


def tiny_config(**overrides: Any) -> LlamaConfig:
    """A Llama of 0.2 million parameters that fits `tiny_tokenizer`.

    Llama's own initial spread of 0.02 suits wide models; at this width it keeps
    attention flat at first, and learning to copy names takes many more steps.
    """
    tokenizer = tiny_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": "sdpa",
        "dtype": "float32",
    }
    return LlamaConfig(**{**settings, **overrides})


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Untrained, with weights that the seed alone decides; torch's own seed is left be."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config())
