"""Decoder layers compiled for training and scoring passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as shape_config
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

_UNCOMPILED = ContextVar("whether layers run as they are", default=False)


KEEP = 0.8
"""Share of a layer's results to keep for the backward pass rather than compute them again."""
VARIANTS = 64
"""Versions of a layer's code in one process, past which torch compiles nothing. The stages of a
recipe want more than its 8: with and without gradients, masks, bfloat16, `deterministic`."""


IN_PLACE = {"setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "iand", "ior"}
"""Operators that change a tensor; methods that do have names that end in an underscore."""


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the decoder layers, for passes without a cache or with a `LayerwiseCache`.

    Half of a small model's time is norms, rotations and activations, each a kernel of its own
    that reads and writes everything; compiled they are a few. All layers of a class share their
    code, in all models. Rows and widths are symbols, so that micro-batches of any shape share it
    too: the first pass of each kind takes some ten seconds, and there are few kinds.

    Under autocast what goes from layer to layer is bfloat16 as well, as in a model of bfloat16
    weights: in float32 it would be most of the bytes moved. The weights stay as they are.

    Norms and activations are computed again in the backward pass, which takes a third off the
    memory and adds some percent of time; larger micro-batches more than make up for that.
    """
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, VARIANTS)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # A bound method, so that a copy of the model runs its own layers.
            layer.forward = MethodType(_routed(backend), layer)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Layers run as they are in here: compiling takes seconds, and so does importing a compiler."""
    token = _UNCOMPILED.set(True)
    try:
        yield
    finally:
        _UNCOMPILED.reset(token)


class LayerwiseCache(Cache):
    """A cache for passes that run compiled, which others with a cache do not."""

    def of_layer(self, layer: nn.Module) -> Any | None:
        """What a compiled layer gets in place of the cache; None for a layer to run as it is.

        It must not depend on the number of the layer, so that all layers share their code.
        """
        return None


def distinct_sizes() -> contextlib.AbstractContextManager[None]:
    """Sizes that happen to be equal in the first compiled pass are not taken to be so in all."""
    return shape_config.patch(use_duck_shape=False)  # pyright: ignore[reportAttributeAccessIssue]


def is_compiled(model: nn.Module) -> bool:
    layers = (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    return any("forward" in vars(layer) for layer in layers)


@cache
def _routed(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
        if caches:
            cache = caches[0]
            view = cache.of_layer(self) if isinstance(cache, LayerwiseCache) else None
            if view is None:
                return type(self).forward(self, hidden_states, *args, **kwargs)
            args = tuple(view if isinstance(x, Cache) else x for x in args)
            kwargs = {name: view if isinstance(x, Cache) else x for name, x in kwargs.items()}
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(kind))
        if _UNCOMPILED.get():
            return type(self).forward(self, hidden_states, *args, **kwargs)
        return _compiled(type(self), backend)(self, hidden_states, *args, **kwargs)

    return forward


@cache
def _compiled(layer: type[nn.Module], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    def sparing(graph: Any, inputs: Any, **options: Any) -> Any:
        # Here rather than above: it imports the compiler, which takes a second.
        compiler = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
        _compute_once(graph)
        with functorch_config.patch(activation_memory_budget=KEEP):
            return compiler(graph, inputs, **options)

    return torch.compile(layer.forward, dynamic=True, backend=sparing)


def _compute_once(graph: GraphModule) -> None:
    """One matrix product for those with the same input and weights, which sampling has.

    Torch does so where there are gradients, but not without.
    """
    first: dict[Any, Any] = {}
    for node in list(graph.graph.nodes):
        target = node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name.endswith("_") or name in IN_PLACE:
            first.clear()  # an input may have other numbers from here on
        if node.op != "call_function" or target is not F.linear or node.kwargs:
            continue
        same = first.setdefault(node.args, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    graph.recompile()
