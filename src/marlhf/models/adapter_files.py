"""LoRA adapters on disk and their settings, in peft's own format."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlhf.config.stage import LoRA
from marlhf.models.base import Head, Model, ModelError
from marlhf.models.facts import RECORD, adapter_source, damaged, read_json
from marlhf.models.heads import backbone

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the name of every weight."""
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


def member_folder(folder: str | Path, number: int) -> Path:
    """Where an ensemble has a member's adapter. That of the first is the ensemble's own folder, so
    whatever reads a single adapter, such as peft or a critic, finds this one."""
    return Path(folder) / f"member-{number}" if number else Path(folder)


def merge_adapter(model: Model, folder: str | Path) -> Model:
    """A model with a folder's adapter merged into it, of any kind that peft can merge.

    `model` is the adapter's base, a sequence classifier where the adapter has a scalar head. It is
    changed in place and becomes the result.
    """
    peft = import_peft()
    _weights_file(folder)
    recorded = _recorded_digest(Path(folder))
    if recorded and recorded != digest(model):
        raise _mismatch(folder, "its weights are not those that the adapter was trained on")
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.task_type = None  # peft's wrappers for a task call methods that not all models have
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped = peft.PeftModel.from_pretrained(model, str(folder), config=config)
            merged = wrapped.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise _mismatch(folder, str(error)) from error
    for warning in caught:
        if "missing adapter keys" in str(warning.message):  # peft would leave them random or zero
            raise _mismatch(folder, "some of its weights are missing")
    return merged


def read_adapter(
    folder: Path, base_source: str, base_digest: str | None
) -> tuple[Any, dict[str, Tensor]]:
    """Settings and weights of a LoRA adapter that was trained on exactly this base."""
    peft = import_peft()
    _check_base(folder, base_source, base_digest)
    config = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, peft.LoraConfig):
        raise ModelError(
            f"{folder} is a {type(config).__name__} adapter, and only LoRA can share a base. "
            "Set lora.shared_base: false, or merge it into its model first."
        )
    tensors = load_file(_weights_file(folder))
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def write_adapter(
    folder: str | Path,
    config: Any,
    tensors: dict[str, Tensor],
    base_source: str,
    base_digest: str | None,
    members: int = 1,
) -> None:
    """An adapter alone, in peft's own format; `members` is for the first one of an ensemble.

    It loads by `PeftModel.from_pretrained(base, folder)`; the base of an adapter with a scalar
    head is `AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(config)
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # sets have no order to reproduce
    config.base_model_name_or_path = base_source
    config.inference_mode = True
    config.modules_to_save = ["score"] if "score.weight" in tensors else None
    config.save_pretrained(str(folder))
    prefixed = {PREFIX + name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(prefixed, folder / WEIGHTS, metadata={"format": "pt"})
    record: dict[str, Any] = {"source": base_source, "digest": base_digest}
    if members > 1:
        record["members"] = members
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def digest(module: Model) -> str:
    """A hash of the model without its head: some numbers of each weight.

    It is the same for a language model and a scalar model with the same weights. A path would not
    identify them: it may hold another model tomorrow, or the same model may be copied elsewhere.
    """
    hashed = hashlib.sha256()
    for name, parameter in sorted(backbone(module).named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, flat.numel() // 256)][:256].float().cpu()
        hashed.update(f"{name}{tuple(parameter.shape)}".encode())
        hashed.update(some.numpy().tobytes())
    return hashed.hexdigest()


def _check_base(folder: Path, base_source: str, base_digest: str | None) -> None:
    """An adapter means nothing on other weights than those it was trained on.

    Digests decide where both are known; quantised bases and adapters from elsewhere have none, so
    there the recorded path does.
    """
    recorded = _recorded_digest(folder)
    source = adapter_source(folder) or "a model it does not name"
    same_place = _resolved(source) == _resolved(base_source)
    if recorded and base_digest:
        if recorded == base_digest:
            return
    elif same_place:
        return
    where = (
        f"{source}, which has changed since"
        if same_place
        else f"{source}, not on {base_source or 'the model given here'}"
    )
    raise ModelError(
        f"The adapter {folder} was trained on {where}: it cannot share this base. Train it again "
        "on the model that this run starts from, or set lora.shared_base: false."
    )


def _recorded_digest(folder: Path) -> str | None:
    """The digest of the base that an adapter was trained on; None where it was not recorded."""
    record = folder / RECORD
    return read_json(record).get("digest") if record.is_file() else None


def _resolved(name: str) -> str:
    """A path in one spelling; a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _weights_file(folder: str | Path) -> Path:
    file = Path(folder) / WEIGHTS
    if not file.is_file():
        raise ModelError(
            f"There is no {WEIGHTS} in {folder}. Save the adapter again with save_pretrained; "
            "pickled weights (.bin) are not read."
        )
    try:
        with safe_open(file, "pt"):  # compares the header with the size of the file
            return file
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def _mismatch(folder: str | Path, cause: str) -> ModelError:
    return ModelError(
        f"The adapter {folder} does not fit its base {adapter_source(folder)} ({cause[:240]}). "
        "Was it saved whole, and is base_model_name_or_path in its adapter_config.json right?"
    )


def to_peft(lora: LoRA | Any, head: Head) -> Any:
    """peft's settings for an adapter, from a recipe's `LoRA` or from a user's own LoraConfig.

    Settings that would change the base, or train more than the adapter and the scalar head, are
    refused: the reference is the base without an adapter, and other models may share the base.

    >>> to_peft(LoRA(r=8), "scalar").r
    8
    """
    peft = import_peft()
    kind = "SEQ_CLS" if head == "scalar" else "CAUSAL_LM"
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
