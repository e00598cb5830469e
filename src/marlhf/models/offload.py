"""Frozen models that stay in host memory, and are on the GPU only while they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


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
