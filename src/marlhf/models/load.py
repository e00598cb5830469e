"""Models and tokenizers from a folder, the hub, a GGUF file, or built in code (`tiny`).

Weights are float32, the master copy that the optimiser works on; bfloat16 is what autocast
computes in. Dropout is always off: PPO compares log-probs of two passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from marlhf.models.adapter_files import adapter_base, is_scalar_adapter, merge_adapter
from marlhf.models.base import Model, ModelError, Tokenizer
from marlhf.models.dropout import disable_dropout
from marlhf.models.heads import (
    SCALAR,
    hidden_scale,
    init_scalar_head,
    scalar_config,
    unknown_head,
    with_scalar_head,
)
from marlhf.models.locate import explained, is_gguf, locate
from marlhf.models.tiny import tiny_model, tiny_tokenizer


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
    _FOLDERS[tokenizer] = path
    return _with_ends(tokenizer, f"of {path}")


_FOLDERS: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()
"""Where tokenizers were loaded from."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def load_tokenizer_like(
    tokenizer: Tokenizer,
    path: str | Tokenizer,
    *,
    trust_remote_code: bool = False,
    setting: str = "",
) -> Tokenizer:
    """The tokenizer at a path, which is the one at hand where their files are the same.

    The models of a run mostly have copies of one tokenizer, and each takes half a second to load.
    """
    known = _FOLDERS.get(tokenizer)
    local = isinstance(path, str) and not trust_remote_code  # whose code may be elsewhere
    if local and known is not None and _same_files(Path(path), Path(known)):
        return tokenizer
    return load_tokenizer(path, trust_remote_code=trust_remote_code, setting=setting)


def _same_files(a: Path, b: Path) -> bool:
    """Whether two folders have the same tokenizer, all of which is in files that are known."""

    def contents(folder: Path) -> list[bytes | None]:
        paths = [folder / name for name in TOKENIZER_FILES]
        return [path.read_bytes() if path.is_file() else None for path in paths]

    return (a / TOKENIZER_FILES[0]).is_file() and contents(a) == contents(b)


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


def load_policy(
    path: str | Model,
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    checkpointing: bool = False,
    quantization: Any = None,
    device: torch.device | None = None,
    setting: str = "",
) -> Model:
    """A causal language model in float32, ready to train."""
    if not isinstance(path, str):
        name = f"The {type(path).__name__} given"
        _check_causal(path.float(), name)
        return _ready(path, checkpointing, name)
    if (base := adapter_base(path)) is not None:
        plain = load_policy(base, seed=seed, trust_remote_code=trust_remote_code, setting=setting)
        return _merged(plain, path, checkpointing)
    if path == "tiny":
        model: Model = tiny_model(seed)
    elif is_gguf(path):
        with explained(path, "model"):
            model = _load_gguf(path)
    else:
        with explained(path, "model"):
            source = locate(path, setting)
            config = _config(source, trust_remote_code)
            for kind in config.architectures or ():
                if kind.endswith(("ForMaskedLM", "ForPreTraining")):
                    raise _not_causal(f"{path} ({kind})")
                if kind.endswith(SCALAR):
                    raise ModelError(
                        f"{path} is a reward model ({kind}), which scores text and cannot write. "
                        "Take the language model that it was made from, such as the SFT model."
                    )
            auto = AutoModelForCausalLM
            model, missing = _load(auto, source, config, trust_remote_code, quantization, device)
            _check_whole(path, model, missing)
        _check_causal(model, f"{path} ({type(model).__name__})")
    return _ready(model, checkpointing, path)


def load_scalar(
    path: str | Model,
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    checkpointing: bool = False,
    quantization: Any = None,
    device: torch.device | None = None,
    setting: str = "",
) -> Model:
    """A model with one number per token: a reward model or a critic.

    This is transformers' own sequence classifier with one label, so it saves and loads without
    marlhf. From a language model the head starts fresh, its scale such that scores are about 1.
    """
    if not isinstance(path, str):
        if not isinstance(getattr(path, "score", None), nn.Linear):
            raise ModelError(
                f"A {type(path).__name__} has no scalar head that marlhf knows. Give an "
                "AutoModelForSequenceClassification with num_labels=1."
            )
        if path.score.out_features != 1:
            raise ModelError(
                f"The {type(path).__name__} given has {path.score.out_features} labels; a reward "
                "model has one. Load it with num_labels=1."
            )
        return _ready(path.float(), checkpointing, f"The {type(path).__name__} given")
    if (base := adapter_base(path)) is not None:
        scalar = load_scalar(base, seed=seed, trust_remote_code=trust_remote_code, setting=setting)
        return _merged(scalar, path, checkpointing)
    if path == "tiny" or is_gguf(path):
        language_model = load_policy(path, seed=seed, setting=setting)
        return _ready(with_scalar_head(language_model, seed), checkpointing, path)
    with explained(path, "model"):
        source = locate(path, setting)
        config = _config(source, trust_remote_code)
        fresh = not _has_scalar(config)
        if not fresh and config.num_labels != 1:
            raise ModelError(
                f"{path} classifies into {config.num_labels} labels; a reward model has one. "
                "Take a reward model, or the language model that it was made from."
            )
        config = scalar_config(config)
        auto = AutoModelForSequenceClassification
        model, missing = _load(auto, source, config, trust_remote_code, quantization, device)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise unknown_head(path, model)
    _check_whole(path, model, missing - {"score.weight"} if fresh else missing)
    if fresh:
        init_scalar_head(head, seed, hidden_scale(model))
    return _ready(model, checkpointing, path)


def is_scalar(path: str, *, trust_remote_code: bool = False, setting: str = "") -> bool:
    """Whether a model has a scalar head, so that `load_scalar` need not make a fresh one."""
    if path == "tiny" or is_gguf(path):
        return False
    if adapter_base(path) is not None:
        return is_scalar_adapter(path)
    with explained(path, "model"):
        return _has_scalar(_config(locate(path, setting), trust_remote_code))


def check_vocabulary(model: Model, tokenizer: Tokenizer, name: str) -> None:
    """A tokenizer with more tokens than the model has embeddings fails deep inside otherwise."""
    rows = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
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
    own = load_tokenizer_like(tokenizer, path, trust_remote_code=trust_remote_code, setting=setting)
    return same_tokenizer(own, tokenizer)


def end_tokens(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a response: the tokenizer's EOS and those the model declares."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    declared = [declared] if isinstance(declared, int) else declared or []
    return sorted({cast(int, tokenizer.eos_token_id), *declared})


def _load(
    auto: Any,
    source: dict[str, Any],
    config: Any,
    trust_remote_code: bool,
    quantization: Any = None,
    device: torch.device | None = None,
) -> tuple[Model, set[str]]:
    """A model, and the names of those weights that were not there and so are random."""
    packed = {"quantization_config": quantization, "device_map": {"": device or "cpu"}}
    model, info = auto.from_pretrained(
        **source,
        config=config,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,  # a pickle could run anything
        output_loading_info=True,
        **(packed if quantization is not None else {}),
        **_attention(config),
    )
    return model, set(info["missing_keys"])


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


def _merged(base: Model, path: str, checkpointing: bool) -> Model:
    merged = merge_adapter(base, path)
    return _ready(merged.requires_grad_(True), checkpointing, path)  # peft has frozen it


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
