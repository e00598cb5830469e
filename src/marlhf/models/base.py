"""What everything about models shares: types, errors, devices, precision; and frozen models that
stay in host memory, on the GPU only while they compute."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as hf_logging

from marlhf.config.stage import Precision
from marlhf.errors import MarlhfError

Model: TypeAlias = Any
"""A transformers model: its own annotations are too loose to check anything against."""
Tokenizer: TypeAlias = Any
"""A transformers tokenizer, likewise."""
Head = Literal["language", "scalar"]
"""What a model's head gives: the next token, or one number per token."""


ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's names for them, read as CUDA starts. From 2.9 on it knows both, and warns of the first
where that stands alone."""


class ModelError(MarlhfError, ValueError):
    """Something about a model or tokenizer that the user has to put right."""


def pick_device(name: str = "auto") -> torch.device:
    """The device to compute on. CUDA's allocator is told not to lose memory between blocks.

    Its blocks have fixed sizes otherwise, and a QLoRA run of an 8B model fails on 24 GB with a
    quarter of it unused (docs/gpu.md). What the user has set stays.
    """
    if not any(setting in os.environ for setting in ALLOCATOR_SETTINGS):
        os.environ |= dict.fromkeys(ALLOCATOR_SETTINGS, "expandable_segments:True")
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            cause = textwrap.shorten(str(error), 120)
            raise ModelError(
                f"There is no device {name!r} here ({cause}). Set `device` to cpu, cuda, cuda:0 "
                "or the like, or to auto."
            ) from error
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """bfloat16 arithmetic on GPUs that support it, float32 elsewhere, unless `precision` is set."""
    enabled = computes_in_bfloat16(device, precision)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def computes_in_bfloat16(device: torch.device, precision: Precision) -> bool:
    auto = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16" or (precision == "auto" and auto)


def frozen_dtype(device: torch.device, precision: Precision) -> torch.dtype | None:
    """The dtype to store frozen linear layers in, for passes under `autocast`."""
    return torch.bfloat16 if computes_in_bfloat16(device, precision) else None


def cast_linear_layers(module: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen linear layers in the dtype that autocast casts them to at every pass anyway.

    Under autocast the results are the same to the last bit, for half the memory. Embeddings, norms
    and scalar heads keep their dtype, and so do the hidden states between layers.
    """
    linear = (nn.Linear, Conv1D)
    submodules = list(module.named_modules())
    # A head tied to the embeddings shares their weight, which is read without autocast.
    used_elsewhere = {
        p for _, part in submodules if not isinstance(part, linear) for p in part.parameters(False)
    }
    for name, part in submodules:
        tied = used_elsewhere & {*part.parameters()}
        if not isinstance(part, linear) or name == "score" or tied:
            continue
        if part.weight.is_floating_point():  # else it is quantized
            part.to(dtype)


def cast_trained_weights(model: nn.Module) -> None:
    """Keep trained matrices in bfloat16. Scalar heads stay float32, in which they compute, and so
    do vectors, which take next to no memory."""
    head = getattr(model, "score", None)
    kept = set() if head is None else {*head.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1 and parameter not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and notices, which would break up our own output."""
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


class HostCopy:
    """The weights of a frozen model, pinned in host memory: nothing is ever copied back."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = [*model.parameters(), *model.buffers()]
        self.device = self.tensors[0].device
        pin = self.device.type == "cuda"
        self.host = [_pinned(x.detach()) if pin else x.detach().clone() for x in self.tensors]
        self._put(self.host)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The model on its device while this is open."""
        self._put([x.to(self.device, non_blocking=True, copy=True) for x in self.host])
        try:
            yield
        finally:
            self._put(self.host)

    def _put(self, values: list[Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.data = value


def offload(model: nn.Module) -> None:
    """Keep a frozen model in host memory from here on; its passes are inside of `loaded`."""
    vars(model)["_marlhf_host_copy"] = HostCopy(model)


def loaded(model: nn.Module) -> AbstractContextManager[None]:
    """A model on its device: at once, unless it is offloaded."""
    copy: HostCopy | None = vars(model).get("_marlhf_host_copy")
    return contextlib.nullcontext() if copy is None else copy.on_device()


def _pinned(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)
