"""Models and tokenizers from a folder, the hub, a GGUF file, or built in code (`tiny`).

Weights are float32, the master copy that the optimiser works on; bfloat16 is what autocast
computes in (`compute_dtype`). Dropout is always off: PPO compares log-probs of two passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from marlhf.models.tiny import tiny_model, tiny_tokenizer

Precision = Literal["auto", "float32", "bfloat16"]


class ModelError(ValueError):
    """Something about a model or tokenizer that the user has to put right."""


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A tokenizer that is sure to have an EOS and something to pad with."""
    if path == "tiny":
        return tiny_tokenizer()
    with _explained(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            **_source(path), trust_remote_code=trust_remote_code
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"The tokenizer of {path} has no EOS token, so a response could never end. "
            "Set `eos_token` in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks come from lengths, not ids
    tokenizer.padding_side = "left"
    return tokenizer


def load_policy(
    path: str, *, seed: int = 0, trust_remote_code: bool = False, checkpointing: bool = False
) -> PreTrainedModel:
    """A causal language model in float32, ready to train."""
    if path == "tiny":
        model: PreTrainedModel = tiny_model(seed)
    else:
        with _explained(path, "model"):
            model = _load(AutoModelForCausalLM, path, trust_remote_code)
    return _ready(model, checkpointing)


def load_scalar(
    path: str, *, seed: int = 0, trust_remote_code: bool = False, checkpointing: bool = False
) -> PreTrainedModel:
    """A model with one number a token: a reward model or a critic.

    This is transformers' own sequence classifier with one label, so it saves and loads without
    marlhf. From a language model the head starts fresh, its scale such that scores are about 1.
    """
    if path == "tiny" or _gguf(path):
        backbone = load_policy(path, seed=seed, trust_remote_code=trust_remote_code)
        config = backbone.config
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        model.base_model.load_state_dict(backbone.base_model.state_dict())
        fresh = True
    else:
        with _explained(path, "model"):
            config = _config(path, trust_remote_code)
            fresh = not any("SequenceClassification" in a for a in config.architectures or [])
            if not fresh and config.num_labels != 1:
                raise ModelError(
                    f"{path} classifies into {config.num_labels} labels; a reward model has one."
                )
            model = _load(
                AutoModelForSequenceClassification, path, trust_remote_code, num_labels=1
            )
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{path} is a {type(model).__name__}, whose scalar head marlhf does not know. "
            "Decoder families such as Llama, Qwen, Gemma, Mistral and GPT-2 have `score`."
        )
    if fresh:
        generator = torch.Generator().manual_seed(seed)
        scale = 1 / math.sqrt(head.in_features + 1)
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * scale)
    return _ready(model, checkpointing)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """A tokenizer with more tokens than the model has embeddings fails deep inside otherwise."""
    rows, tokens = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if tokens > rows:
        raise ModelError(
            f"The tokenizer has {tokens} tokens but {name} embeds only {rows}. "
            "They do not belong together: take both from the same folder."
        )


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether ids of one mean the same to the other."""
    return a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a response: the tokenizer's EOS and those the model declares."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    declared = [declared] if isinstance(declared, int) else declared or []
    return sorted({tokenizer.eos_token_id, *declared})


def pick_device(name: str = "auto") -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """bfloat16 arithmetic on GPUs that have it, float32 elsewhere, unless told otherwise."""
    auto = device.type == "cuda" and torch.cuda.is_bf16_supported()
    enabled = precision == "bfloat16" or (precision == "auto" and auto)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _load(auto: Any, path: str, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    if _gguf(path):
        loaded = auto.from_pretrained(**_source(path), dtype=torch.float32)
        # A model read from GGUF counts as quantised and cannot be saved; a fresh one can.
        model = auto.from_config(loaded.config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        return model
    config = _config(path, trust_remote_code)
    silent = {k: 0.0 for k in config.to_dict() if k.endswith(("dropout", "pdrop", "dropout_prob"))}
    return auto.from_pretrained(
        path,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        **silent,
        **options,
    )


def _config(path: str, trust_remote_code: bool) -> Any:
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def _ready(model: PreTrainedModel, checkpointing: bool) -> PreTrainedModel:
    model.config.use_cache = not checkpointing
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # dropout is 0; gradient checkpointing only works in this mode


def _gguf(path: str) -> bool:
    return path.endswith(".gguf")


def _source(path: str) -> dict[str, Any]:
    if not _gguf(path):
        return {"pretrained_model_name_or_path": path}
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"There is no file {path}.")
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its bars and notices, which would break up ours."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _explained(path: str, what: str) -> Iterator[None]:
    """transformers' many ways to fail, as one sentence with the cause at its end."""
    try:
        with quiet_transformers():  # a fresh score head is meant to be fresh
            yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        looks_local = Path(path).exists() or path.startswith((".", "/", "~"))
        hint = (
            "Is it a folder written by save_pretrained, with safetensors weights?"
            if looks_local
            else "Is it a folder here, or a name on the hub that you can reach and may read?"
        )
        if looks_local and not Path(path).exists():
            hint = "There is no such folder. Has the stage before this one been run?"
        cause = str(error).strip().splitlines()
        raise ModelError(
            f"Cannot load the {what} {path}. {hint} ({cause[0] if cause else error!r})"
        ) from error
