"""Models and tokenizers from a folder, the hub, a GGUF file, or built in code (`tiny`).

Weights are float32, the master copy that the optimiser works on; bfloat16 is what autocast
computes in. Dropout is always off: PPO compares log-probs of two passes.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf.models.adapter_files import merge_adapter
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.base import Head, Model, ModelError, Tokenizer
from marlhf.models.facts import ModelFacts, explained, model_facts, with_ends
from marlhf.models.heads import (
    SCALAR,
    check_head,
    hidden_scale,
    init_scalar_head,
    num_members,
    scalar_config,
    with_scalar_head,
)
from marlhf.models.tiny import tiny_model


def load_tokenizer(
    path: str | Tokenizer, *, trust_remote_code: bool = False, setting: str = ""
) -> Tokenizer:
    """A tokenizer that has an EOS and a padding token, and pads on the left.

    `setting` is the one that named the path, for errors; so it is below.
    """
    if not isinstance(path, str):
        return with_ends(path, "that was given")
    return model_facts(path, trust_remote_code=trust_remote_code, setting=setting).tokenizer


def load_policy(
    model: str | Model, *, trust_remote_code: bool = False, setting: str = "", **options: Any
) -> Model:
    """A causal language model: a policy or a reference. Options are those of `load_model`."""
    facts = model_facts(model, trust_remote_code=trust_remote_code, setting=setting)
    return load_model("language", facts, **options)


def load_scalar(
    model: str | Model, *, seed: int = 0, trust_remote_code: bool = False, setting: str = ""
) -> Model:
    """A model with one number per token: a reward model or a critic.

    This is transformers' own sequence classifier with one label, so it saves and loads without
    marlhf. From a language model the head starts fresh, its scale such that scores are about 1. An
    ensemble of adapters is loaded to score with.
    """
    facts = model_facts(model, trust_remote_code=trust_remote_code, setting=setting)
    if facts.members == 1:
        return load_model("scalar", facts, seed=seed)
    base = FrozenBaseModel(load_model("scalar", facts.base, seed=seed), str(facts.base.model))
    return base.ensemble(facts.saved, members=facts.members, trainable=False)


def load_model(
    head: Head,
    facts: ModelFacts,
    *,
    seed: int = 0,
    copied: bool = False,
    checkpointing: bool = False,
    quantization: Any = None,
    device: torch.device | None = None,
) -> Model:
    """A model in float32, ready to train, with the head that its role needs.

    Of an ensemble of adapters it is the first member, which can train alone. With `copied` a given
    object stays as it is, for another role has it.
    """
    if not isinstance(facts.model, str):
        model, name = _given(head, facts, copied, seed), f"The {type(facts.model).__name__} given"
    elif facts.saved is not None:
        plain, name = load_model(head, facts.base, seed=seed), facts.model
        model = merge_adapter(plain, name).requires_grad_(True)  # peft has frozen it
    else:
        name = facts.model
        with explained(name, "model"):
            model = _read(head, facts, seed, quantization, device)
    _check_finite(model, name)
    disable_dropout(model)
    model.config.use_cache = not checkpointing
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # gradient checkpointing only works in this mode


def _given(head: Head, facts: ModelFacts, copied: bool, seed: int) -> Model:
    """The object itself, or a copy of it with the head that is asked for."""
    given: Any = facts.model
    if copied and head == "scalar" and not facts.is_scalar:
        return with_scalar_head(given, seed)
    model = (copy.deepcopy(given).requires_grad_(True) if copied else given).float()
    name = f"The {type(model).__name__} given"
    (_check_given_scalar if head == "scalar" else _check_causal)(model, name)
    return model


def _read(
    head: Head, facts: ModelFacts, seed: int, quantization: Any, device: torch.device | None
) -> Model:
    """From a folder, the hub or a GGUF file by transformers, or `tiny`."""
    if facts.config is None:
        model = tiny_model(seed) if facts.model == "tiny" else _read_gguf(facts)
        return with_scalar_head(model, seed) if head == "scalar" else model
    _check_architecture(head, facts)
    path, options = facts.model, _attention(facts.config)
    if quantization is not None:
        options |= {"quantization_config": quantization, "device_map": {"": device or "cpu"}}
    fresh_head = head == "scalar" and not facts.is_scalar
    config = scalar_config(facts.config) if head == "scalar" else facts.config
    auto: Any = AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM
    model, info = auto.from_pretrained(
        **facts.files,
        config=config,
        dtype=torch.float32,
        trust_remote_code=facts.trust_remote_code,
        use_safetensors=True,  # a pickle could run anything
        output_loading_info=True,
        **options,
    )
    if head == "scalar":
        check_head(model, path)
    _check_whole(
        path, model, set(info["missing_keys"]) - ({"score.weight"} if fresh_head else set())
    )
    if fresh_head:
        init_scalar_head(model.score, seed, hidden_scale(model))
    elif head == "language":
        _check_causal(model, f"{path} ({type(model).__name__})")
    return model


def check_vocabulary(model: Model, tokenizer: Tokenizer, name: str) -> None:
    """A tokenizer with more tokens than the model has embeddings fails deep inside otherwise."""
    check_embeddings(model.get_input_embeddings().weight.shape[0], tokenizer, name)


def check_embeddings(rows: int, tokenizer: Tokenizer, name: str) -> None:
    tokens = max(tokenizer.get_vocab().values()) + 1  # more than len() where ids leave gaps
    if tokens > rows:
        raise ModelError(
            f"The tokenizer has {tokens} tokens but {name} embeds only {rows}. "
            "They do not belong together: take both from the same folder."
        )


def end_tokens(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a response: the tokenizer's EOS and those the model declares."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    declared = [declared] if isinstance(declared, int) else declared or []
    return sorted({cast(int, tokenizer.eos_token_id), *declared})


def _attention(config: Any) -> dict[str, Any]:
    """Gemma 2 caps its attention scores, which torch's fused attention leaves out silently."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


def _read_gguf(facts: ModelFacts) -> Model:
    # Later versions of transformers leave the weights packed where they have a kernel for it.
    options = dict(facts.files)
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    auto: Any = AutoModelForCausalLM
    loaded, info = auto.from_pretrained(**options, dtype=torch.float32, output_loading_info=True)
    _check_whole(facts.model, loaded, set(info["missing_keys"]))
    # A model read from GGUF counts as quantised and cannot be saved; a fresh one can.
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    model = auto.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model


def _check_architecture(head: Head, facts: ModelFacts) -> None:
    """Refuse, before weights are read, models that cannot have this role."""
    config, path = facts.config, facts.model
    if head == "scalar":
        if facts.is_scalar and config.num_labels != num_members(config):
            raise ModelError(
                f"{path} classifies into {config.num_labels} labels; a reward model has one. "
                "Take a reward model, or the language model that it was made from."
            )
        return
    for kind in config.architectures or ():
        if kind.endswith(("ForMaskedLM", "ForPreTraining")):
            raise _not_causal(f"{path} ({kind})")
        if kind.endswith(SCALAR):
            raise ModelError(
                f"{path} is a reward model ({kind}), which scores text and cannot write. "
                "Take the language model that it was made from, such as the SFT model."
            )


def _check_given_scalar(model: Model, name: str) -> None:
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"A {type(model).__name__} has no scalar head that marlhf knows. Give an "
            "AutoModelForSequenceClassification with num_labels=1."
        )
    if model.score.out_features != num_members(model.config):
        raise ModelError(
            f"{name} has {model.score.out_features} labels; a reward model has one. Load it with "
            "num_labels=1."
        )


@torch.no_grad()
def _check_causal(model: Model, name: str) -> None:
    """Refuse models whose tokens see the tokens after them, such as BERT and XLNet.

    Most attention layers say that they are causal. For the rest, a small pass shows whether the
    last token changes what comes before it.
    """
    if model.config.is_encoder_decoder:
        raise _not_causal(name)
    layers = [vars(module).get("is_causal") for module in model.modules()]
    causal = [flag for flag in layers if flag is not None]
    if causal and all(causal):
        return
    ids = torch.tensor([[2, 3, 4, 5], [2, 3, 4, 6]], device=model.device)
    training = model.training
    one, other = model.eval()(input_ids=ids).logits[:, :-1]
    model.train(training)
    if (one - other).abs().max() > 1e-4 * one.std():  # more than rounding
        raise _not_causal(name)


def _not_causal(name: str) -> ModelError:
    return ModelError(
        f"{name} is no decoder: its tokens see those after them, so it cannot write. Take a "
        "decoder such as Llama, Qwen, Gemma or GPT-2."
    )


@torch.no_grad()
def _check_finite(model: Model, name: str) -> None:
    """Refuse weights that are infinite or not a number: every pass would be NaN.

    A sum is one pass over the memory; only one that is not finite is looked at more closely.
    """
    for parameter, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.sum().isfinite():
            bad = int((~weight.isfinite()).sum())
            if bad:
                raise ModelError(
                    f"{name} has weights that are infinite or not a number: {bad} of the "
                    f"{weight.numel()} in {parameter}. Take an earlier checkpoint, or save the "
                    "model again."
                )


def _check_whole(path: str, model: Model, missing: set[str]) -> None:
    """transformers only warns of weights that it did not find, and draws them at random."""
    if missing:
        raise ModelError(
            f"The weights in {path} lack {len(missing)} of those that a {type(model).__name__} "
            f"has, {min(missing)} among them. Is it a model of another kind, or was it not saved "
            "whole? Save it again with save_pretrained."
        )


def disable_dropout(model: Model) -> None:
    """Make passes in training mode deterministic, for every family and however it was loaded.

    PPO compares the log-probs of two passes over the same tokens.

    `model.eval()` would do, but gradient checkpointing only works in training mode. Families hold
    dropout as modules, as numbers of their layers (`F.dropout(x, p=self.dropout)`), or read it
    from the config in each pass, so all three are set to 0.
    """
    for module in list(model.modules()):
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _zero_dropout_numbers(module)
        config = vars(module).get("config")
        if config is not None:
            _zero_dropout_numbers(config)
        if any(_is_noise(name, value) for name, value in vars(module).items()):
            _keep_in_eval_mode(module)
    _zero_dropout_numbers(model.config)
    _zero_dropout_numbers(model.config.get_text_config())


def _zero_dropout_numbers(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if "drop" in name and _is_positive(value):
            setattr(owner, name, 0.0)


def _is_noise(name: str, value: Any) -> bool:
    return ("jitter" in name or "noise" in name) and _is_positive(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _keep_in_eval_mode(module: nn.Module) -> None:
    """Routers add noise in training mode, or draw experts at random.

    Setting their number to 0 is not enough: PhiMoE's is also a threshold in evaluation mode.
    """
    module.eval()
    module.train = MethodType(_stay, module)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
