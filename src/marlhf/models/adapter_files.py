"""Adapters on disk: in peft's own form, or merged into a plain model; and back again.

A folder with `adapter_config.json` is an adapter. marlhf also keeps one as `adapter/` inside the
folder of a merged model, so that the same folder serves those who load plain models and a shared
base that wants the adapter alone.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from marlhf.models.base import Model, ModelError

if TYPE_CHECKING:
    from marlhf.models.adapters import FrozenBase, View

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "base.json"
PREFIX = "base_model.model."
"""What peft puts before the name of every weight."""


def import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "LoRA adapters need peft, which is not installed. Run `pip install 'marlhf[lora]'`, "
            "or leave out `lora`."
        ) from error
    return peft


def adapter_base(path: str | Path) -> str | None:
    """The model that an adapter folder belongs to; None where the folder is no adapter."""
    if not (Path(path) / CONFIG).is_file():
        return None
    if not (source := _source(path)):
        raise ModelError(
            f"The adapter {path} does not say which model it belongs to. Set "
            f"base_model_name_or_path in its {CONFIG}."
        )
    return source


def find_adapter(path: str | Path) -> Path | None:
    """The adapter that a folder is, or that lies beside the merged model in it."""
    folders = (Path(path), Path(path) / "adapter")
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def is_scalar_adapter(folder: str | Path) -> bool:
    """Whether an adapter comes with a scalar head, as a reward model's does."""
    return _read(Path(folder) / CONFIG).get("task_type") == "SEQ_CLS"


def merge_adapter(model: Model, folder: str | Path) -> Model:
    """A model with a folder's adapter merged into it, of any kind that peft can merge.

    `model` is the adapter's base, a sequence classifier where the adapter has a scalar head. It
    becomes the result: it has no use of its own afterwards.
    """
    peft = import_peft()
    _weights_file(folder)
    theirs = _recorded(Path(folder))
    if theirs and theirs != digest(model):
        raise _unfit(folder, "its weights are not those that the adapter was trained on")
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.task_type = None  # a plain wrapper: those for a task want methods that not all have
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped = peft.PeftModel.from_pretrained(model, str(folder), config=config)
            merged = wrapped.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise _unfit(folder, str(error)) from error
    for warning in caught:
        if "missing adapter keys" in str(warning.message):  # else they stay random, or zero
            raise _unfit(folder, "some of its weights are missing")
    return merged


def read_adapter(folder: Path, base: FrozenBase) -> tuple[Any, dict[str, Tensor]]:
    """Settings and weights of a LoRA adapter that was trained on this very base."""
    peft = import_peft()
    _check_base(folder, base)
    config = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, peft.LoraConfig):
        raise ModelError(
            f"{folder} is a {type(config).__name__} adapter, and only LoRA can share a base. "
            "Set lora.shared_base: false, or merge it into its model first."
        )
    tensors = load_file(_weights_file(folder))
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def save_adapter(view: View, folder: str | Path) -> None:
    """What a view trained, alone, in peft's own form.

    It loads by `PeftModel.from_pretrained(base, folder)`; the base of an adapter with a scalar
    head is `AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(view.lora)
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    config.base_model_name_or_path = view.base.source
    config.inference_mode = True
    tensors = view.adapter_tensors()
    config.modules_to_save = ["score"] if "score.weight" in tensors else None
    config.save_pretrained(str(folder))
    whole = {PREFIX + name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    record = {"source": view.base.source, "digest": view.base.digest}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def save_merged(view: View, folder: str | Path) -> None:
    """A view as a plain model in float32 that needs neither marlhf nor peft; nothing live moves."""
    module = view.base.module
    config = copy.deepcopy(module.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        if "score.weight" in view.adapter_tensors():
            config.num_labels = 1
            plain = AutoModelForSequenceClassification.from_config(config)
        else:
            plain = type(module)(config)
    wanted = plain.state_dict().keys()
    tensors = {
        name: tensor.float().cpu() if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in merged_tensors(view)
        if name in wanted  # a scalar model has no use for the language model's head
    }
    plain.load_state_dict(tensors, assign=True)
    plain.tie_weights()
    if plain.can_generate():
        plain.generation_config = module.generation_config
    plain.save_pretrained(folder)


@torch.no_grad()
def merged_tensors(view: View) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain model that a view amounts to, under its names, one at a time.

    Tied weights come under each of their names. Each merged weight is a new tensor, so an engine
    that copies them as they come needs no second model in memory.
    """
    module = view.base.module
    known = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for name in module.state_dict(keep_vars=True):
        if name not in known or ".lora_" in name or name == "score.weight":
            continue  # quantised models list what their weights unpack with
        owner, _, leaf = name.rpartition(".")
        tensor = known[name].detach()
        if view.base.quantized and leaf == "weight":
            tensor = _unpacked(module.get_submodule(owner))
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            layer = module.get_submodule(owner)
            if leaf == "weight" and view.adapter in layer.lora_A:
                tensor = tensor.float() + layer.get_delta_weight(view.adapter).float()
        yield f"{owner}.{leaf}" if owner else leaf, tensor
    if (head := view.adapter_tensors().get("score.weight")) is not None:
        yield "score.weight", head


def digest(module: Model) -> str:
    """A name for the weights of a model's body: some numbers of each, hashed.

    The same for a language model and a scalar one on the same body. A path would not do: it may
    hold another model tomorrow, or the same one may lie elsewhere.
    """
    found = hashlib.sha256()
    for name, parameter in sorted(module.base_model.named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, flat.numel() // 256)][:256].float().cpu()
        found.update(f"{name}{tuple(parameter.shape)}".encode())
        found.update(some.numpy().tobytes())
    return found.hexdigest()


def _check_base(folder: Path, base: FrozenBase) -> None:
    """An adapter means nothing on other weights than those it was trained on."""
    theirs = _recorded(folder)
    source = _source(folder) or "a model it does not name"
    if theirs and base.digest:
        if theirs == base.digest:
            return
    elif _place(source) == _place(base.source):
        return
    where = (
        f"{source}, which has changed since"
        if _place(source) == _place(base.source)
        else f"{source}, not on {base.source or 'the model given here'}"
    )
    raise ModelError(
        f"The adapter {folder} was trained on {where}: it cannot share this base. Train it again "
        "on the model that this run starts from, or set lora.shared_base: false."
    )


def _recorded(folder: Path) -> str | None:
    """The digest of the base that an adapter was trained on; None where nobody wrote it down."""
    record = folder / RECORD
    return _read(record).get("digest") if record.is_file() else None


def _source(folder: str | Path) -> str:
    return _read(Path(folder) / CONFIG).get("base_model_name_or_path") or ""


def _weights_file(folder: str | Path) -> Path:
    file = Path(folder) / WEIGHTS
    if not file.is_file():
        raise ModelError(
            f"There is no {WEIGHTS} in {folder}. Save the adapter again with save_pretrained; "
            "pickled weights (.bin) are not read."
        )
    return file


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file} is damaged ({error}). Save the adapter again, or take another folder."
        ) from error


def _unfit(folder: str | Path, cause: str) -> ModelError:
    return ModelError(
        f"The adapter {folder} does not fit its base {_source(folder)} ({cause[:240]}). "
        "Was it saved whole, and is base_model_name_or_path in its adapter_config.json right?"
    )


def _unpacked(module: Any) -> Tensor:
    """The weight of a layer as floats. (peft's own function for it moves the live weight.)"""
    weight = module.weight
    if weight.is_floating_point():
        return weight.detach()
    if hasattr(weight, "quant_state"):  # 4 bits
        from bitsandbytes.functional import dequantize_4bit  # pyright: ignore

        return dequantize_4bit(weight.data, weight.quant_state)
    scale = module.state.SCB if weight.SCB is None else weight.SCB  # where depends on its passes
    return weight.data * scale[:, None] / 127


def _place(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name
