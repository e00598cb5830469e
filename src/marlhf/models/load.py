"""Models and tokenizers from a folder, the hub, a GGUF file, or built in code (`tiny`).

Weights are float32, the master copy that the optimiser works on; bfloat16 is what autocast
computes in. Dropout is always off: PPO compares log-probs of two passes.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from marlhf.models.adapter_files import (
    adapter_base,
    is_scalar_adapter,
    merge_adapter,
    saved_members,
)
from marlhf.models.adapters import FrozenBaseModel
from marlhf.models.base import (
    Head,
    Model,
    ModelError,
    Tokenizer,
    disable_dropout,
    quiet_transformers,
)
from marlhf.models.heads import (
    SCALAR,
    hidden_scale,
    init_scalar_head,
    num_members,
    scalar_config,
    unknown_head,
    with_scalar_head,
)
from marlhf.models.tiny import tiny_model, tiny_tokenizer
from marlhf.runs.layout import MODEL, is_run

STEP_SEPARATOR = "step_separator"
"""What a process reward model's config has, and no other's."""
HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub's first answer."""


def load_tokenizer(
    path: str | Tokenizer, *, trust_remote_code: bool = False, setting: str = ""
) -> Tokenizer:
    """A tokenizer that has an EOS and a padding token, and pads on the left.

    `setting` is the one that named the path, for errors; so it is below.
    """
    if not isinstance(path, str):
        return _with_ends(path, "that was given")
    if path == "tiny":
        return tiny_tokenizer()
    if (base := adapter_base(path)) is not None and not (
        Path(path) / "tokenizer_config.json"
    ).is_file():
        return load_tokenizer(base, trust_remote_code=trust_remote_code, setting=setting)
    with explained(path, "tokenizer"):
        source = locate(path, setting)
        declared = {} if is_gguf(path) else get_tokenizer_config(**source)
        # AutoTokenizer goes by the model's family even where the folder says that its tokenizer
        # is a plain one, and a family's own class may cut text into other tokens.
        plain = declared.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        loader = PreTrainedTokenizerFast if plain else AutoTokenizer
        tokenizer = loader.from_pretrained(**source, trust_remote_code=trust_remote_code)
        if is_gguf(path) and (end := _gguf_end(path)) is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return _with_ends(tokenizer, f"of {path}")


def _with_ends(tokenizer: Tokenizer, which: str) -> Tokenizer:
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"The tokenizer {which} has no EOS token, so a response could never end. "
            "Set `eos_token` in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks come from lengths, not ids
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False  # text must come back as the tokens have it
    return tokenizer


def load_model(
    head: Head,
    path: str | Model,
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    checkpointing: bool = False,
    quantization: Any = None,
    device: torch.device | None = None,
    first_member: bool = False,
    setting: str = "",
) -> Model:
    """A model in float32, ready to train, with the head that its role needs.

    An ensemble of adapters is loaded to score with; `first_member` is what can train alone.
    """
    if not isinstance(path, str):
        name, model = f"The {type(path).__name__} given", path.float()
        if head == "scalar":
            _check_given_scalar(model, name)
        else:
            _check_causal(model, name)
        return _ready(model, checkpointing, name)
    if (base := adapter_base(path)) is not None:
        plain = load_model(
            head, base, seed=seed, trust_remote_code=trust_remote_code, setting=setting
        )
        if head == "scalar" and not first_member and (members := saved_members(path)) > 1:
            base_model = FrozenBaseModel(plain, base)
            return base_model.ensemble(Path(path), members=members, trainable=False)
        merged = merge_adapter(plain, path).requires_grad_(True)  # peft has frozen it
        return _ready(merged, checkpointing, path)
    if path == "tiny" or is_gguf(path):
        with explained(path, "model"):
            model = tiny_model(seed) if path == "tiny" else _load_gguf(path)
        if head == "scalar":
            model = with_scalar_head(model, seed)
        return _ready(model, checkpointing, path)
    with explained(path, "model"):
        source = locate(path, setting)
        config = _config(source, trust_remote_code)
        _check_architecture(head, path, config)
        fresh_head = head == "scalar" and not _has_scalar(config)
        if head == "scalar":
            config = scalar_config(config)
        auto: Any = AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM
        quantized = {"quantization_config": quantization, "device_map": {"": device or "cpu"}}
        model, info = auto.from_pretrained(
            **source,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # a pickle could run anything
            output_loading_info=True,
            **(quantized if quantization is not None else {}),
            **_attention(config),
        )
    if head == "scalar" and not isinstance(getattr(model, "score", None), nn.Linear):
        raise unknown_head(path, model)
    _check_whole(
        path, model, set(info["missing_keys"]) - ({"score.weight"} if fresh_head else set())
    )
    if fresh_head:
        init_scalar_head(model.score, seed, hidden_scale(model))
    elif head == "language":
        _check_causal(model, f"{path} ({type(model).__name__})")
    return _ready(model, checkpointing, path)


load_policy = partial(load_model, "language")
"""A causal language model: a policy or a reference."""
load_scalar = partial(load_model, "scalar")
"""A model with one number per token: a reward model or a critic.

This is transformers' own sequence classifier with one label, so it saves and loads without
marlhf. From a language model the head starts fresh, its scale such that scores are about 1.
"""


def is_scalar(path: str | Model, *, trust_remote_code: bool = False, setting: str = "") -> bool:
    """Whether a model has a scalar head, so that `load_scalar` need not make a fresh one."""
    if not isinstance(path, str):
        return hasattr(path, "score")
    if path == "tiny" or is_gguf(path):
        return False
    if adapter_base(path) is not None:
        return is_scalar_adapter(path)
    with explained(path, "model"):
        return _has_scalar(_config(locate(path, setting), trust_remote_code))


def step_separator(
    path: str | Model, *, trust_remote_code: bool = False, setting: str = ""
) -> str | None:
    """What separates the steps that a process reward model scores; None for any other model."""
    if not isinstance(path, str):
        return vars(path.config).get(STEP_SEPARATOR)
    if path == "tiny" or is_gguf(path) or adapter_base(path) is not None:
        return None
    with explained(path, "model"):
        return vars(_config(locate(path, setting), trust_remote_code)).get(STEP_SEPARATOR)


def refuse_process_model(
    path: str | Model, *, trust_remote_code: bool = False, setting: str = ""
) -> None:
    """A process model says nothing of a whole response, and an outcome model nothing of a step."""
    if step_separator(path, trust_remote_code=trust_remote_code, setting=setting) is not None:
        name = path if isinstance(path, str) else f"the {type(path).__name__} given"
        raise ModelError(
            f"{f'`{setting}`: ' if setting else ''}{name} is a process reward model, which scores "
            "steps and not whole responses. Name it as process_model, or take a reward model that "
            "`marlhf reward` trained."
        )


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


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether ids of one mean the same to the other."""
    return a is b or (a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id)


def has_same_tokenizer(
    path: str | Tokenizer, tokenizer: Tokenizer, *, trust_remote_code: bool, setting: str = ""
) -> bool:
    """Whether the model at a path reads the tokens of this tokenizer."""
    own = load_tokenizer(path, trust_remote_code=trust_remote_code, setting=setting)
    return same_tokenizer(own, tokenizer)


def end_tokens(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a response: the tokenizer's EOS and those the model declares."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    declared = [declared] if isinstance(declared, int) else declared or []
    return sorted({cast(int, tokenizer.eos_token_id), *declared})


def _attention(config: Any) -> dict[str, str]:
    """Gemma 2 caps its attention scores, which torch's fused attention leaves out silently."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


def _load_gguf(path: str) -> Model:
    # Later versions of transformers leave the weights packed where they have a kernel for it.
    options = locate(path)
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    auto: Any = AutoModelForCausalLM
    loaded, info = auto.from_pretrained(**options, dtype=torch.float32, output_loading_info=True)
    _check_whole(path, loaded, set(info["missing_keys"]))
    # A model read from GGUF counts as quantised and cannot be saved; a fresh one can.
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    model = auto.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model


def _check_architecture(head: Head, path: str, config: Any) -> None:
    """Refuse, before weights are read, models that cannot have this role."""
    if head == "scalar":
        if _has_scalar(config) and config.num_labels != num_members(config):
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


def _config(source: dict[str, Any], trust_remote_code: bool) -> Any:
    return AutoConfig.from_pretrained(**source, trust_remote_code=trust_remote_code)


def _has_scalar(config: Any) -> bool:
    return any(SCALAR in kind for kind in config.architectures or ())


def _ready(model: Model, checkpointing: bool, name: str) -> Model:
    _check_finite(model, name)
    disable_dropout(model)
    model.config.use_cache = not checkpointing
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # gradient checkpointing only works in this mode


def _gguf_end(path: str) -> int | None:
    """The token that ends a text, as the file says: some versions of transformers take another."""
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.eos_token_id")
    return None if field is None else int(field.contents())


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf")


def locate(path: str, setting: str = "") -> dict[str, Any]:
    """The options by which `from_pretrained` finds a model; `setting` is where it was named."""
    file = Path(path)
    named = f"`{setting}`: " if setting else ""
    if is_gguf(path):
        if not file.is_file():
            raise ModelError(f"{named}There is no file {path}. Check the path to the GGUF file.")
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    if file.exists():
        return {"pretrained_model_name_or_path": path}
    if is_run(file.parent):
        raise ModelError(
            f"{named}There is no {path}: the run {file.parent} is not finished. Finish it first, "
            "by the command that began it."
        )
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(
            f"{named}There is no folder {path}. If an earlier stage of the recipe writes it, run "
            "that stage first; `marlhf run` does all of them in order."
        )
    return {"pretrained_model_name_or_path": _on_hub(path, named)}


def _on_hub(name: str, named: str) -> str:
    """The name of a model on the hub; without the hub, the folder where it was downloaded before.

    One question with a short timeout: transformers asks for every file of a model, five times
    each, and takes more than a minute to say that there is no network.
    """
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except EntryNotFoundError:
        return name  # it exists, and may hold a tokenizer alone
    except GatedRepoError:
        cause = (
            f"the hub gives it only to those who accepted its terms. Do so on "
            f"https://huggingface.co/{name}, and log in with `hf auth login`"
        )
    except (RepositoryNotFoundError, HFValidationError):
        cause = "the hub has none either, or does not show it to you. Correct the name"
    except Exception as error:  # which class depends on the HTTP client of huggingface_hub
        reason = textwrap.shorten(str(error) or type(error).__name__, 100)
        cause = f"the hub cannot be reached ({reason}). Correct the name, or download it first"
    else:
        return name
    for file in ("config.json", "tokenizer_config.json"):
        if isinstance(cached := try_to_load_from_cache(name, file), str):
            return str(Path(cached).parent)
    raise ModelError(f"{named}There is no folder {name} here, and {cause}.")


@contextlib.contextmanager
def explained(path: str, what: str) -> Iterator[None]:
    """transformers' many ways to fail, as one sentence with the cause at its end."""
    try:
        with quiet_transformers():  # it warns of a fresh score head, which is intended
            yield
    except ModelError:
        raise
    except Exception as error:  # safetensors, tokenizers and gguf each raise kinds of their own
        inner = Path(path) / MODEL
        if (inner / "config.json").is_file():
            hint = f"It is the folder of a run; its model is {inner}."
        elif "trust_remote_code" in str(error):
            raise ModelError(
                f"The {what} {path} comes with Python code of its own, which is run only if you "
                "say so: --trust-code on the command line, trust_remote_code: true in a recipe."
            ) from error
        elif not Path(path).exists():
            hint = "Is it a model on the hub that you may read?"
        elif is_gguf(path):
            hint = "Is it a whole GGUF file, of a family that transformers can read?"
        elif what == "tokenizer":
            hint = "Is it a folder written by save_pretrained, with a tokenizer.json?"
        else:
            hint = "Is it a folder written by save_pretrained, with safetensors weights?"
        cause = textwrap.shorten(str(error) or repr(error), 240)
        raise ModelError(f"Cannot load the {what} {path}. {hint} ({cause})") from error
