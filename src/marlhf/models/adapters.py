"""LoRA: small trained adapters on a frozen model, and several models on one base.

`FrozenBase` holds a model whose weights never change. Views stand on it: the policy is the base
with one adapter, the critic the base with another and a scalar head, the reference the base with
none. A view has its own trained weights and nothing else, so optimisers and checkpoints stay
small, and however many views there are, the base is in memory once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from marlhf.configs.model import LoRA, Precision
from marlhf.models.adapter_files import (
    digest,
    import_peft,
    is_scalar_adapter,
    read_adapter,
    save_adapter,
    save_merged,
)
from marlhf.models.base import Model, ModelError, autocast

OFF = "off"
"""A name that no adapter has: with it active, every layer is as it was before."""
Task = Literal["language", "scalar"]
Start: TypeAlias = Any
"""What an adapter starts from: `LoRA`, a `peft.LoraConfig`, or the `Path` of a saved adapter."""


KEPT = {
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "use_rslora"),
}
"""Those settings of a user's LoraConfig that hold here."""
IGNORED = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "modules_to_save", "lora_dropout", "init_lora_weights"),
    *("loftq_config", "runtime_config", "megatron_core", "qalora_group_size"),
}
"""Those looked at by themselves, or without meaning on their own."""


def to_peft(lora: LoRA | Any, task: Task) -> Any:
    """peft's settings for an adapter, from a recipe's `LoRA` or from a user's own LoraConfig.

    What would change the base, or train more than the adapter and the scalar head, is refused: the
    reference is the base with the adapter off, and others may stand on it.

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
            f"peft_config sets {', '.join(changed)}, which does not go with a base that must stay "
            "as it is. Leave it out: r, lora_alpha, target_modules, use_rslora and the like hold."
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
            "`pip install bitsandbytes`, or leave out quantize."
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


def frozen_dtype(device: torch.device, precision: Precision) -> torch.dtype | None:
    """What to store frozen matrices in, for passes under `autocast(device, precision)`."""
    with autocast(device, precision):
        return torch.bfloat16 if torch.is_autocast_enabled(device.type) else None


def store_matrices(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold frozen linear layers in the type that autocast casts them to at every pass anyway.

    Under autocast the results are the same to the last bit, for half the memory. Embeddings,
    norms and scalar heads stay as they are, and so do the hidden states between layers.
    """
    linear = (nn.Linear, Conv1D)
    parts = list(module.named_modules())
    elsewhere = {
        p for _, part in parts if not isinstance(part, linear) for p in part.parameters(False)
    }
    for name, part in parts:
        if isinstance(part, linear) and name != "score" and not elsewhere & {*part.parameters()}:
            part.to(dtype)


class FrozenBase:
    """A model whose weights never change, and the adapters on it.

    Which adapter is active is one list that all its layers look at, so switching costs nothing,
    however large the model, and leaves `requires_grad` alone. (peft's own `set_adapter` goes
    through all layers and lets only the active adapter train.) Gradient checkpointing runs layers
    a second time, in the backward pass, when another adapter may be active; each checkpoint
    remembers the adapter that it was made under.

    >>> from marlhf.models.load import load_policy
    >>> base = FrozenBase(load_policy("tiny"), "tiny")
    >>> policy, reference, critic = base.language(LoRA(r=4)), base.reference(), base.scalar(LoRA())
    >>> [sum(p.numel() for p in view.parameters()) for view in (policy, reference, critic)]
    [12288, 0, 49248]
    """

    def __init__(
        self,
        module: Model,
        source: str = "",
        *,
        matrices: torch.dtype | None = None,
        merge: bool = True,
    ) -> None:
        """`source` is the path or name that `module` came from; `matrices` is `frozen_dtype`."""
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
        self._active = [OFF]
        self._names: set[str] = set()
        if matrices is not None and not self.quantized:
            store_matrices(module, matrices)
        if module.is_gradient_checkpointing:
            remember = {"use_reentrant": False, "context_fn": self._remember}
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=remember)

    def reference(self) -> LanguageView:
        """The base as it is, with nothing to train."""
        return LanguageView(self, OFF, None)

    def frozen_scalar(self) -> ScalarView:
        """The base as it is, where it is a scalar model: the reward model of a critic on it."""
        return ScalarView(self, OFF, None, self.module.score)

    def language(
        self, start: Start, name: str = "policy", *, seed: int = 0, trainable: bool = True
    ) -> LanguageView:
        """The base with an adapter. A fresh one changes nothing at first; its seed is its own."""
        config, tensors = self._read(start, "language")
        self._insert(name, config, seed)
        view = LanguageView(self, name, config)
        return self._started(view, start, tensors, trainable)

    def scalar(
        self, start: Start, name: str = "critic", *, seed: int = 0, trainable: bool = True
    ) -> ScalarView:
        """The base with an adapter and a scalar head: the saved, a copy of the base's, or a
        fresh one."""
        config, tensors = self._read(start, "scalar")
        self._insert(name, config, seed)
        own = getattr(self.module, "score", None)  # a language model has none
        head = _fresh_head(self.module, seed) if own is None else copy.deepcopy(own)
        view = ScalarView(self, name, config, head)
        if tensors is not None and "score.weight" not in tensors:
            tensors["score.weight"] = head.weight.detach()  # a language model's adapter has none
        return self._started(view, start, tensors, trainable)

    @contextlib.contextmanager
    def using(self, adapter: str) -> Iterator[None]:
        """Every pass inside goes through this adapter."""
        before = self._active[0]
        self._active[0] = adapter
        try:
            yield
        finally:
            self._active[0] = before

    def _remember(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return contextlib.nullcontext(), self.using(self._active[0])

    def _read(self, start: Start, task: Task) -> tuple[Any, dict[str, Tensor] | None]:
        if not isinstance(start, Path):
            return to_peft(start, task), None
        if task == "language" and is_scalar_adapter(start):
            raise ModelError(
                f"{start} is the adapter of a reward model, which scores text and cannot write. "
                "Take the language model that it was made from, such as the SFT model."
            )
        config, tensors = read_adapter(start, self)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its dropout was for its own training
            return to_peft(config, task), tensors

    def _insert(self, name: str, config: Any, seed: int) -> None:
        """Put an adapter into the layers, and have them look at this base's list."""
        peft = import_peft()
        assert name not in self._names | {OFF}, f"there is an adapter called {name}"
        trains = [(p, p.requires_grad) for p in self.module.parameters()]
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a second adapter, which is meant
                torch.default_generator.manual_seed(seed)
                peft.inject_adapter_in_model(config, self.module, adapter_name=name)
        except ValueError as error:
            linear = (nn.Linear, Conv1D)
            found = {n.split(".")[-1] for n, m in self.module.named_modules() if type(m) in linear}
            raise ModelError(
                f"LoRA's target_modules {config.target_modules} do not fit a "
                f"{type(self.module).__name__}. Leave it out for all-linear, or choose from: "
                f"{', '.join(sorted(found))}."
            ) from error
        self._names.add(name)
        for parameter, flag in trains:
            parameter.requires_grad_(flag)
        ends = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        for path, layer in self.layers():
            if layer in ends:
                raise ModelError(
                    f"LoRA's target_modules reach {path}, the embeddings or the head. Name layers "
                    "between the two, or leave it out for all-linear."
                )
            layer._active_adapter = self._active

    def layers(self) -> Iterator[tuple[str, Any]]:
        """The layers that have adapters, with their names."""
        from peft.tuners.lora import LoraLayer

        for path, layer in self.module.named_modules():
            if isinstance(layer, LoraLayer):
                yield path, layer

    @staticmethod
    def _started(view: Any, start: Start, tensors: dict[str, Tensor] | None, train: bool) -> Any:
        if tensors is not None:
            mine = view.adapter_tensors()
            if {n: x.shape for n, x in mine.items()} != {n: x.shape for n, x in tensors.items()}:
                odd = min(mine.keys() ^ tensors.keys(), default="a weight of another shape")
                raise ModelError(
                    f"The weights in {start} are not those that its adapter_config.json describes "
                    f"({odd}). Save the adapter again."
                )
            for name, mine_now in mine.items():
                mine_now.copy_(tensors[name])
        return view.requires_grad_(train)


class View(nn.Module):
    """A model that stands on a base: its parameters are those that it trains, and no others."""

    def __init__(self, base: FrozenBase, adapter: str, lora: Any) -> None:
        super().__init__()
        self.base = base
        self.adapter = adapter
        self.lora = lora
        self.weights = nn.Module()  # the adapter's layers, under the names of those they adapt
        for path, layer in base.layers():
            if adapter in layer.lora_A:
                _plant(self.weights, f"{path}.lora_A", layer.lora_A[adapter])
                _plant(self.weights, f"{path}.lora_B", layer.lora_B[adapter])
        self.weights.float()  # the master copy, whatever the base is stored in
        self.train(base.module.training)

    def base_model(self, *args: Any, **kwargs: Any) -> Any:
        """The model without its head: hidden states."""
        with self.base.using(self.adapter):
            return self.base.module.base_model(*args, **kwargs)

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

    def train(self, mode: bool = True) -> View:
        self.module.train(mode)
        return super().train(mode)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """What the view adds to the base, by name; changing these changes the view."""
        found = self.state_dict()
        return {name.removeprefix("weights."): tensor for name, tensor in found.items()}

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:
        """A plain model with `adapter/` in it, or where the base says so the adapter alone."""
        if self.base.merge:
            save_merged(self, folder)
            folder = Path(folder) / "adapter"
        save_adapter(self, folder)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> View:
        """Moving a view moves the base, and with it the adapters of all that stand on it."""
        if not self.base.quantized:
            self.module._apply(fn, recurse)
        return super()._apply(fn, recurse)


class LanguageView(View):
    """A language model: the base with one adapter, or with none."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.base.using(self.adapter):
            return self.module(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        return self.module.get_output_embeddings()


class ScalarView(View):
    """A critic or reward model: the base with one adapter, and a scalar head in float32."""

    def __init__(self, base: FrozenBase, adapter: str, lora: Any, score: nn.Linear) -> None:
        super().__init__(base, adapter, lora)
        self.score = score.float()


def _plant(root: nn.Module, path: str, leaf: nn.Module) -> None:
    """Make `leaf` a descendant of `root` under a dotted name."""
    *branches, last = path.split(".")
    for branch in branches:
        if branch not in root._modules:
            root.add_module(branch, nn.Module())
        root = root.get_submodule(branch)
    root.add_module(last, leaf)


def _fresh_head(module: Model, seed: int) -> nn.Linear:
    """As `load_scalar` makes it: scores of about 1."""
    size = module.config.get_text_config().hidden_size
    head: Any = nn.utils.skip_init(nn.Linear, size, 1, bias=False)  # torch's own seed is left be
    generator = torch.Generator().manual_seed(seed)
    scale = 1 / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * scale)
    return head.to(module.device)
