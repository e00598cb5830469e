"""Several models on one frozen base: LoRA adapters that are switched, not copied.

`FrozenBaseModel` holds a transformers model whose weights never change. The policy is that base
with one adapter applied, the critic the base with another adapter and a scalar head, the reference
the base with none. Each of these `AdaptedModel`s lists only its own trained weights as parameters,
so optimisers and checkpoints stay small, and the base is in memory once.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from marlhf.models.adapter_files import (
    digest,
    import_peft,
    member_folder,
    read_adapter,
    to_peft,
    write_adapter,
)
from marlhf.models.base import Head, Model, ModelError, cast_linear_layers
from marlhf.models.facts import is_scalar_adapter, saved_members
from marlhf.models.heads import (
    backbone,
    declare_heads,
    fresh_scalar_head,
    hidden_scale,
    scalar_config,
    set_heads,
)

NO_ADAPTER = "off"
"""A name that no adapter has: while it is active, every layer computes as the plain base does."""
AdapterInit: TypeAlias = Any
"""What an adapter starts from: `LoRA`, a `peft.LoraConfig`, the `Path` of a saved adapter, or None
for the base without one."""


def _like_autocast(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Inputs of a 4-bit layer, in autocast's dtype.

    Its outputs have the dtype of its inputs. Those of float32 would keep twice the memory for the
    backward pass, although it computes in bfloat16.
    """
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return None
    return (inputs[0].to(torch.get_autocast_dtype(device)), *inputs[1:])


def is_adapted_linear(layer: Any) -> bool:
    """Whether a layer is a plain linear one to which peft adds x A B."""
    if not hasattr(layer, "lora_A"):
        return False
    from peft.tuners import lora  # an optional dependency

    return type(layer) is lora.Linear and type(layer.base_layer) is nn.Linear


class FrozenBaseModel:
    """A model whose weights never change, and the adapters in its layers.

    peft's own `set_adapter` walks through all layers and makes only the active adapter trainable.
    Here every layer reads the active adapter's name from one shared list instead. Switching then
    costs nothing, however large the model, and leaves `requires_grad` alone: policy and critic
    can both have gradients pending.

    >>> from marlhf.config.stage import LoRA
    >>> from marlhf.models.load import load_policy
    >>> base = FrozenBaseModel(load_policy("tiny"), "tiny")
    >>> policy, critic = base.language_model(LoRA(r=4)), base.scalar_model(LoRA())
    >>> reference = base.language_model(None)
    >>> [sum(p.numel() for p in model.parameters()) for model in (policy, reference, critic)]
    [12288, 0, 49248]
    """

    def __init__(
        self,
        module: Model,
        source: str = "",
        *,
        linear_dtype: torch.dtype | None = None,
        merge: bool = True,
    ) -> None:
        """`source` is the path or name of `module`; `linear_dtype` comes from `frozen_dtype`."""
        if hasattr(module, "peft_config"):
            raise ModelError(
                "The model already has adapters, and marlhf puts its own on a plain one. Give the "
                "plain model and a peft_config, or the folder of a saved adapter as the model."
            )
        self.module = module.requires_grad_(False)
        self.source = source
        self.merge = merge
        self.quantized = getattr(module, "hf_quantizer", None) is not None
        self.digest = None if self.quantized else digest(module)
        self._active = [NO_ADAPTER]
        self._names: set[str] = set()
        if linear_dtype is not None:
            cast_linear_layers(module, linear_dtype)
        for layer in module.modules():
            if type(layer).__name__ == "Linear4bit":
                layer.register_forward_pre_hook(_like_autocast)
            # On some CPUs bitsandbytes repacks 4-bit weights at the first pass of a model in
            # evaluation mode. Repacked ones have no gradients, and adapters are trained on these.
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False  # pyright: ignore[reportArgumentType]
        if module.is_gradient_checkpointing:
            # A checkpointed layer runs a second time in the backward pass. By then another
            # adapter may be active, so each checkpoint restores the one it was made under.
            module.gradient_checkpointing_enable(
                {"use_reentrant": False, "context_fn": self._checkpoint_contexts}
            )

    def language_model(
        self, init: AdapterInit, name: str = "policy", *, seed: int = 0, trainable: bool = True
    ) -> AdaptedLanguageModel:
        """The base with an adapter, which at first changes nothing; without one, a reference."""
        config, tensors = self._insert(init, "language", name, seed)
        model = AdaptedLanguageModel(self, name if config else NO_ADAPTER, config)
        _load_adapter_tensors(model, tensors, init)
        return model.requires_grad_(trainable)

    def scalar_model(
        self, init: AdapterInit, name: str = "critic", *, seed: int = 0, trainable: bool = True
    ) -> AdaptedScalarModel:
        """The base with an adapter and a scalar head; without an adapter, a reward model.

        The head is the saved adapter's, else a copy of the base's, else a fresh one.
        """
        config, tensors = self._insert(init, "scalar", name, seed)
        head = copy.deepcopy(getattr(self.module, "score", None))
        if head is None:  # the base is a language model
            hidden_size = self.module.config.get_text_config().hidden_size
            head = fresh_scalar_head(hidden_size, seed, hidden_scale(self.module))
            head = head.to(self.module.device)
        model = AdaptedScalarModel(self, name if config else NO_ADAPTER, config, head)
        if tensors is not None:  # a language model's adapter has no head
            saved = tensors.setdefault("score.weight", head.weight.detach())
            set_heads(model, len(saved), seed, fresh=False)  # an ensemble has several
        _load_adapter_tensors(model, tensors, init)
        return model.requires_grad_(trainable and config is not None)

    def ensemble(
        self,
        init: AdapterInit,
        name: str = "reward",
        *,
        members: int,
        seed: int = 0,
        trainable: bool = True,
    ) -> AdaptedEnsemble:
        """An adapter and a head per member: those that a folder has, else fresh ones.

        Member m is what `scalar_model` gives with the seed `seed + m`.
        """
        whole = isinstance(init, Path) and saved_members(init) > 1
        inits = [member_folder(init, m) if whole else init for m in range(members)]
        return AdaptedEnsemble(
            [
                self.scalar_model(each, f"{name}-{m}", seed=seed + m, trainable=trainable)
                for m, each in enumerate(inits)
            ]
        )

    @contextlib.contextmanager
    def applied(self, adapter: str) -> Iterator[None]:
        """Every pass inside goes through this adapter."""
        before = self._active[0]
        self._active[0] = adapter
        try:
            yield
        finally:
            self._active[0] = before

    def adapted_layers(self) -> Iterator[tuple[str, Any]]:
        """The layers that have adapters, with their names."""
        from peft.tuners.lora import LoraLayer  # an optional dependency

        for path, layer in self.module.named_modules():
            if isinstance(layer, LoraLayer):
                yield path, layer

    def _checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a checkpoint's first run and of its second."""
        return contextlib.nullcontext(), self.applied(self._active[0])

    def _insert(
        self, init: AdapterInit, head: Head, name: str, seed: int
    ) -> tuple[Any, dict[str, Tensor] | None]:
        """Put an adapter into the layers, and let them read the shared active name.

        Returns peft's config of it, and its weights where it is a saved one.
        """
        if init is None:
            return None, None
        config, tensors = self._read(init, head)
        peft = import_peft()
        assert name not in self._names | {NO_ADAPTER}, f"there is an adapter called {name}"
        flags = [(p, p.requires_grad) for p in self.module.parameters()]
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a second adapter, which is intended
                torch.default_generator.manual_seed(seed)
                peft.inject_adapter_in_model(config, self.module, adapter_name=name)
        except ValueError as error:
            linear = (nn.Linear, Conv1D)
            names = {n.split(".")[-1] for n, m in self.module.named_modules() if type(m) in linear}
            raise ModelError(
                f"LoRA's target_modules {config.target_modules} do not fit a "
                f"{type(self.module).__name__}. Leave it out for all-linear, or choose from: "
                f"{', '.join(sorted(names))}."
            ) from error
        self._names.add(name)
        for parameter, trains in flags:  # peft has frozen the adapters that were there before
            parameter.requires_grad_(trains)
        ends = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        for path, layer in self.adapted_layers():
            if layer in ends:
                raise ModelError(
                    f"LoRA's target_modules reach {path}, the embeddings or the head. Name layers "
                    "between the two, or leave it out for all-linear."
                )
            layer._active_adapter = self._active
        return config, tensors

    def _read(self, init: AdapterInit, head: Head) -> tuple[Any, dict[str, Tensor] | None]:
        if not isinstance(init, Path):
            return to_peft(init, head), None
        if head == "language" and is_scalar_adapter(init):
            raise ModelError(
                f"{init} is the adapter of a reward model, which scores text and cannot write. "
                "Take the language model that it was made from, such as the SFT model."
            )
        config, tensors = read_adapter(init, self.source, self.digest)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about dropout, which was for its own training
            return to_peft(config, head), tensors


class AdaptedModel(nn.Module):
    """The base with one adapter applied. Its parameters are those that it trains, and no others."""

    def __init__(self, base: FrozenBaseModel, adapter: str, adapter_config: Any) -> None:
        super().__init__()
        self.base = base  # not a submodule: its weights are not this model's parameters
        self.adapter = adapter
        self.adapter_config = adapter_config
        self.weights = nn.Module()  # the adapter's layers, under the names of those they adapt
        for path, layer in base.adapted_layers():
            if adapter in layer.lora_A:
                _add_submodule(self.weights, f"{path}.lora_A", layer.lora_A[adapter])
                _add_submodule(self.weights, f"{path}.lora_B", layer.lora_B[adapter])
        self.weights.float()  # the master copy, whatever dtype the base is stored in
        self.train(base.module.training)

    def base_model(self, *args: Any, **kwargs: Any) -> Any:
        """The model without its head: hidden states."""
        module: Any = self.base.module
        with self.base.applied(self.adapter):
            if not issubclass(type(module), FSDPModule):
                return backbone(module)(*args, **kwargs)
            # FSDP gathers weights in hooks of the module that it wraps, which is the whole base.
            module.forward = backbone(module).__call__
            try:
                return module(*args, **kwargs)
            finally:
                del module.forward  # the class's own again

    @property
    def module(self) -> Model:
        """The transformers model underneath."""
        return self.base.module

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def generation_config(self) -> Any:
        return self.module.generation_config

    @property
    def device(self) -> torch.device:
        return self.module.device

    def get_input_embeddings(self) -> nn.Module:
        return self.module.get_input_embeddings()

    def train(self, mode: bool = True) -> AdaptedModel:
        self.module.train(mode)
        return super().train(mode)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """What this model adds to the base, by name: the live tensors, not copies."""
        state = self.state_dict()
        return {name.removeprefix("weights."): tensor for name, tensor in state.items()}

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What `save_pretrained` writes, gathered where it is sharded: a collective call."""
        for name, tensor in self.adapter_tensors().items():
            yield f"adapter.{name}", _full(tensor)
        if self.base.merge:
            for name, tensor in merged_tensors(self):
                yield f"merged.{name}", tensor

    def save_pretrained(
        self, folder: str | Path, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """A merged plain model with `adapter/` in it; with `merge=False` the adapter alone.

        `state_dict` holds `full_tensors`, where they were gathered before.
        """
        parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "merged": {}}
        tensors = self.full_tensors() if state_dict is None else state_dict.items()
        for name, tensor in tensors:
            part, _, own_name = name.partition(".")
            parts[part][own_name] = tensor
        if self.base.merge:
            _save_merged(self, folder, parts["merged"])
            folder = Path(folder) / "adapter"
        base = self.base
        write_adapter(folder, self.adapter_config, parts["adapter"], base.source, base.digest)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> AdaptedModel:
        """`model.to(device)` moves the base as well, with the adapters of all who share it."""
        if not self.base.quantized:
            self.module._apply(fn, recurse)
        return super()._apply(fn, recurse)


class AdaptedLanguageModel(AdaptedModel):
    """A policy or reference: the base with one adapter, or with none."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.base.applied(self.adapter):
            return self.module(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        return self.module.get_output_embeddings()


class AdaptedScalarModel(AdaptedModel):
    """A critic or reward model: the base with one adapter, and a scalar head in float32."""

    def __init__(
        self, base: FrozenBaseModel, adapter: str, adapter_config: Any, score: nn.Linear
    ) -> None:
        super().__init__(base, adapter, adapter_config)
        self.score = score.float()


class AdaptedEnsemble(AdaptedModel):
    """The members of an ensemble on one base, which take turns: a pass for each.

    A merged model holds a single adapter, so this one is saved as adapters alone.
    """

    def __init__(self, members: list[AdaptedScalarModel]) -> None:
        super().__init__(members[0].base, NO_ADAPTER, members[0].adapter_config)
        self.members = nn.ModuleList(members)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, member in enumerate(self.members):
            for name, tensor in cast(AdaptedModel, member).adapter_tensors().items():
                yield f"{number}.{name}", _full(tensor)

    def save_pretrained(
        self, folder: str | Path, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Each member's adapter in a folder of its own, in peft's format."""
        parts: list[dict[str, Tensor]] = [{} for _ in self.members]
        for name, tensor in self.full_tensors() if state_dict is None else state_dict.items():
            number, _, own_name = name.partition(".")
            parts[int(number)][own_name] = tensor
        base = self.base
        for number, tensors in enumerate(parts):
            where, members = member_folder(folder, number), 1 if number else len(parts)
            write_adapter(
                where, self.adapter_config, tensors, base.source, base.digest, members=members
            )


def _save_merged(model: AdaptedModel, folder: str | Path, merged: dict[str, Tensor]) -> None:
    """A plain model in float32 that needs neither marlhf nor peft; the live weights stay put."""
    module = model.base.module
    config = copy.deepcopy(module.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        if (head := model.adapter_tensors().get("score.weight")) is not None:
            config = scalar_config(config)
            declare_heads(config, len(head))
            plain = AutoModelForSequenceClassification.from_config(config)
        else:
            plain = type(module)(config)
    wanted = plain.state_dict().keys()
    tensors = {
        name: tensor.float().cpu() if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in merged.items()
        if name in wanted  # a scalar model has no use for the language model's head
    }
    plain.load_state_dict(tensors, assign=True)
    plain.tie_weights()
    if plain.can_generate():
        plain.generation_config = module.generation_config
    plain.save_pretrained(folder)


@torch.no_grad()
def merged_tensors(model: AdaptedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights of the equivalent plain model, under its names, one at a time.

    Tied weights come under each of their names. Each merged weight is a new tensor, so an engine
    that copies them as they come needs no second model in memory.
    """
    module = model.base.module
    names = list(module.state_dict(keep_vars=True))  # first: this reshards what FSDP has gathered
    known = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for name in names:
        # Quantised models also list the statistics that their weights are dequantised with.
        if name not in known or ".lora_" in name or name == "score.weight":
            continue
        owner, _, leaf = name.rpartition(".")
        tensor = known[name].detach()
        if model.base.quantized and leaf == "weight":
            tensor = _dequantized(module.get_submodule(owner))
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            layer = module.get_submodule(owner)
            if leaf == "weight" and model.adapter in layer.lora_A:
                tensor = tensor.float() + layer.get_delta_weight(model.adapter).float()
        yield f"{owner}.{leaf}" if owner else leaf, _full(tensor)
    if (head := model.adapter_tensors().get("score.weight")) is not None:
        yield "score.weight", _full(head)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _load_adapter_tensors(
    model: AdaptedModel, tensors: dict[str, Tensor] | None, source: AdapterInit
) -> None:
    """Copy a saved adapter's weights into the layers; a fresh adapter has none to copy."""
    if tensors is None:
        return
    own = model.adapter_tensors()
    if {n: x.shape for n, x in own.items()} != {n: x.shape for n, x in tensors.items()}:
        odd = min(own.keys() ^ tensors.keys(), default="a weight of another shape")
        raise ModelError(
            f"The weights in {source} are not those that its adapter_config.json describes "
            f"({odd}). Save the adapter again."
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _add_submodule(root: nn.Module, path: str, leaf: nn.Module) -> None:
    """Make `leaf` a descendant of `root` under a dotted name."""
    *parents, last = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(last, leaf)


def _dequantized(module: Any) -> Tensor:
    """The weight of a layer as floats. (peft's own function for it moves the live weight.)"""
    weight = module.weight
    if weight.is_floating_point():
        return weight.detach()
    if hasattr(weight, "quant_state"):  # 4 bits
        from bitsandbytes.functional import dequantize_4bit  # pyright: ignore

        return dequantize_4bit(weight.data, weight.quant_state)
    scale = module.state.SCB if weight.SCB is None else weight.SCB  # moves at the first pass
    return weight.data * scale[:, None] / 127
