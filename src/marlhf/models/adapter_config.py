"""Settings of LoRA adapters: a recipe's own, and peft's."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from typing import Any, Literal

import torch
import transformers

from marlhf.config.model import LoRA
from marlhf.models.base import ModelError

Task = Literal["language", "scalar"]
"""What a model's head gives: the next token, or one number per token."""


KEPT = {
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "use_rslora"),
}
"""Settings of a user's LoraConfig that are used as they are."""
IGNORED = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "modules_to_save", "lora_dropout", "init_lora_weights"),
    *("loftq_config", "runtime_config", "megatron_core", "qalora_group_size"),
}
"""Settings that are checked one by one below, or that mean nothing on their own."""


def to_peft(lora: LoRA | Any, task: Task) -> Any:
    """peft's settings for an adapter, from a recipe's `LoRA` or from a user's own LoraConfig.

    Settings that would change the base, or train more than the adapter and the scalar head, are
    refused: the reference is the base without an adapter, and other models may share the base.

    >>> to_peft(LoRA(r=8), "scalar").r
    8
    """
    peft = import_peft()
    kind = "SEQ_CLS" if task == "scalar" else "CAUSAL_LM"
    if isinstance(lora, LoRA):
        targets = lora.target_modules
        return peft.LoraConfig(
            task_type=kind,
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=lora.use_rslora,
        )
    if not isinstance(lora, peft.LoraConfig):
        raise ModelError(
            f"peft_config must be a peft.LoraConfig; got a {type(lora).__name__}. Other kinds of "
            "adapters do not work here."
        )
    plain = peft.LoraConfig()
    changed = [
        field.name
        for field in dataclasses.fields(lora)
        if field.name not in KEPT | IGNORED
        and getattr(lora, field.name) != getattr(plain, field.name)
    ]
    if set(lora.modules_to_save or ()) - {"score", "classifier"}:
        changed.append("modules_to_save")
    if lora.init_lora_weights not in (True, "gaussian"):
        changed.append("init_lora_weights")
    if changed:
        raise ModelError(
            f"peft_config sets {', '.join(changed)}, which would change or train the base. "
            "Leave it out; r, lora_alpha, target_modules, use_rslora and the like are used."
        )
    if lora.lora_dropout:
        warnings.warn(
            f"lora_dropout {lora.lora_dropout} is taken as 0: PPO compares two passes over the "
            "same tokens, and dropout would make them differ.",
            stacklevel=2,
        )
    kept = {name: getattr(lora, name) for name in KEPT}
    if kept["target_modules"] is None:
        kept["target_modules"] = "all-linear"
    return peft.LoraConfig(task_type=kind, init_lora_weights=lora.init_lora_weights, **kept)


def quantization(lora: LoRA) -> Any | None:
    """What `from_pretrained` takes as quantization_config, or None."""
    if lora.quantize == "none":
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"lora.quantize: {lora.quantize} needs bitsandbytes, which is not installed. Run "
            "`pip install 'marlhf[quant]'`, or leave out quantize."
        )
    heads = ["lm_head", "embed_out", "score"]
    if lora.quantize == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=heads)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=heads,
    )


def import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "LoRA adapters need peft, which is not installed. Run `pip install 'marlhf[lora]'`, "
            "or leave out `lora`."
        ) from error
    return peft
