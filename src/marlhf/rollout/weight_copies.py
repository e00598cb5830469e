"""Copies of a model's matrices in the type that sampling computes with.

For decoders that go through a model's own modules; `llama_weights.py` has those of a Llama.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers.pytorch_utils import Conv1D

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers with the same input, by their names in most families."""


class ModuleWeightCopies:
    """Copies of the matrices of a model in the precision of autocast.

    Autocast would cast them again at every step, and decoding is bound by memory traffic. The
    copies cost two bytes per weight. Embeddings and norms stay as they are, as they do under
    autocast, so the numbers are the same.

    With `join` the layers of `JOINED` become parts of one matrix product, for models that run
    compiled: three small products take nearly three times as long as one.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, join: bool) -> None:
        self.parts = list(_joined_layers(model, dtype)) if join else []
        joined = {id(layer) for parts in self.parts for layer in parts.layers}
        self.owners = [
            (layer, name)
            for layer in model.modules()
            if isinstance(layer, nn.Linear | Conv1D) and id(layer) not in joined
            for name, parameter in layer._parameters.items()
            if parameter is not None
        ]
        self.copies = [
            torch.empty_like(layer.get_parameter(name), dtype=dtype) for layer, name in self.owners
        ]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Bring the copies up to date, and let the layers compute with them for a while."""
        originals = [cast(Tensor, layer._parameters[name]) for layer, name in self.owners]
        joined = [pair for parts in self.parts for pair in parts.pairs]
        pairs = [*zip(self.copies, originals), *joined]
        if pairs:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [copy for copy, _ in pairs], [original for _, original in pairs]
            )
        try:
            # Straight into `_parameters`: assignment would refuse what is no nn.Parameter.
            for (layer, name), copy in zip(self.owners, self.copies):
                layer._parameters[name] = cast(nn.Parameter, copy)
            for parts in self.parts:
                parts.owner._modules.update(zip(parts.names, parts.replacements))
            yield
        finally:
            for (layer, name), original in zip(self.owners, originals):
                layer._parameters[name] = cast(nn.Parameter, original)
            for parts in self.parts:
                parts.owner._modules.update(zip(parts.names, parts.layers))


class JoinedLayers:
    """Linear layers of one module with the same input, and what computes them as one."""

    def __init__(self, owner: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
        self.owner, self.names = owner, names
        self.layers = [cast(nn.Linear, owner._modules[name]) for name in names]
        self.sizes = [layer.out_features for layer in self.layers]
        first = self.layers[0]
        whole = skip_init(  # drawing weights would change what is drawn after
            nn.Linear,
            first.in_features,
            sum(self.sizes),
            first.bias is not None,
            device=first.weight.device,
            dtype=dtype,
        )
        self.whole = cast(nn.Linear, whole.requires_grad_(False))
        self.pairs = split_pairs(self.whole, self.layers)
        stops = itertools.accumulate(self.sizes)
        self.replacements = [
            PartOfProduct(self.whole, stop - size, stop) for size, stop in zip(self.sizes, stops)
        ]


class PartOfProduct(nn.Module):
    """Some outputs of a linear layer, all of which are computed.

    Compiled layers compute what is the same only once (`compile_blocks`), so that all parts are one
    product; and parts that get another input than the others after all are still right.
    """

    def __init__(self, whole: nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.start : self.stop]


def split_pairs(whole: Any, layers: Sequence[nn.Linear]) -> list[tuple[Tensor, Tensor]]:
    """Each part of joined weights and biases with its original."""
    sizes = [layer.out_features for layer in layers]
    pairs = list(zip(whole.weight.split(sizes), (x.weight for x in layers)))
    if whole.bias is not None:
        pairs += zip(whole.bias.split(sizes), (x.bias for x in layers))
    return pairs


def _joined_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[JoinedLayers]:
    for owner in model.modules():
        for names in JOINED:
            layers = [owner._modules.get(name) for name in names]
            if all(map(_is_a_matrix, layers)):
                linear = cast(list[nn.Linear], layers)
                kinds = {(x.in_features, x.bias is None, x.weight.dtype) for x in linear}
                if len(kinds) == 1:
                    yield JoinedLayers(owner, names, dtype)


def _is_a_matrix(layer: nn.Module | None) -> bool:
    """Neither an adapter nor another layer in its place, nor one with hooks or another forward."""
    return (
        type(layer) is nn.Linear
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and "forward" not in vars(layer)
    )
