"""A model's passes of fixed shape as CUDA graphs: one launch instead of a thousand.

The first pass of a shape runs as it is, which compiles and warms up what it needs; the second is
recorded; later ones are replayed. All graphs of a process share their memory, so that they need
as much as the largest and not as all together. Two rules follow, and are checked: between a
forward pass with gradients and its backward pass no other graph may run, and what a graph returns
is copied out of its memory before the next one runs. Gradients are no part of it: each is added to
a tensor that stays where it is, and is the parameter's `.grad`, soon after it is computed.
"""

from __future__ import annotations

import textwrap
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

MAX_GRAPHS = 24
"""Recorded for a model at most. Batches of more shapes than this run without a graph."""
GRADIENTS_SHARE = 1 / 32
"""Share of a GPU's memory that the gradients of recorded passes may take: they are kept from step
to step. Of a large model none is recorded, and none need be: launching is not what it waits for."""

PENDING_BYTES = 1 << 26
"""Gradients that wait until they are added to their sums, in one call."""
POOL_SHARE = 1 / 4
"""Share of a GPU's memory that recorded passes may hold before one more is recorded. What a pass
leaves to those after it is of no use to a larger one, so that many shapes could take much more than
the largest needs."""

Run = Callable[..., Tensor]
"""Tensors in, one tensor out."""


class GraphedPasses:
    """The passes of one model, by what they compute and the shapes they compute it on."""

    def __init__(self, model: nn.Module) -> None:
        self.checked = False
        """Whether packed passes were found to give the model's own numbers."""
        self._model = weakref.ref(model)
        self._weights = Weights(model)
        self._addresses: list[int] = []
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph | None] = {}  # None where that failed, or lacked room

    def __call__(self, name: Hashable, run: Run, inputs: Sequence[Tensor]) -> Tensor:
        """`run(*inputs)`, replayed where a pass of this name and shape has been recorded.

        `name` must say everything that `run` depends on besides its inputs and the weights.
        """
        model = self._model()
        assert model is not None
        self._check_weights()
        kind = inputs[0].device.type
        if kind != "cuda":
            return run(*inputs)
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self._weights)
        key = (name, learns, cast, tuple(x.shape for x in inputs))
        if _waiting_for_backward() or key not in self._seen:
            self._seen.add(key)
            return run(*inputs)
        if key not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                return run(*inputs)
            self._graphs[key] = None
            if self._has_room(inputs[0].device, learns):
                record = partial(_Graph, model, run, inputs, learns=learns, cast=cast)
                self._graphs[key] = _if_possible(record, type(model).__name__)
        graph = self._graphs[key]
        return run(*inputs) if graph is None else graph(inputs)

    def _has_room(self, device: torch.device, learns: bool) -> bool:
        """Whether one more pass may be recorded."""
        whole = torch.cuda.get_device_properties(device).total_memory
        gradients = sum(p.nbytes for p in set(self._weights) if learns and p.requires_grad)
        return gradients <= GRADIENTS_SHARE * whole and graph_bytes(device) <= POOL_SHARE * whole

    def _check_weights(self) -> None:
        """Graphs read weights where they were; after a move to other memory they start anew."""
        addresses = self._weights.addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self._graphs.clear()


class Weights:
    """The parameters of a model as they are now; those that modules share, several times.

    It remembers which module has a parameter of which name, which takes an eighth of the time of
    `parameters()`: a GPU waits for it before a pass is launched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(m._parameters, name) for m in model.modules() for name in m._parameters]

    def __iter__(self) -> Iterator[nn.Parameter]:
        found = (parameters[name] for parameters, name in self._places)
        return (parameter for parameter in found if parameter is not None)

    def addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self]


def _if_possible(record: Callable[[], _Graph], model: str) -> _Graph | None:
    try:
        return record()
    except RuntimeError as error:  # out of memory, or an operation that cannot be recorded
        cause = textwrap.shorten(str(error), 120)
    # Outside of `except`, where the traceback would keep the tensors of what failed.
    torch.cuda.empty_cache()
    warnings.warn(
        f"A pass of {model} could not be recorded as a CUDA graph ({cause}). It runs without one: "
        "the same numbers, slower.",
        stacklevel=2,
    )
    return None


class _Graph:
    """One recorded pass: forward, and backward where it learns."""

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        inputs: Sequence[Tensor],
        *,
        learns: bool,
        cast: torch.dtype | None,
    ) -> None:
        self.inputs = [x.clone() for x in inputs]
        names = dict(model.named_parameters()) if learns else {}
        self.trained = {name: p for name, p in names.items() if p.requires_grad}

        def compute() -> tuple[Tensor, list[nn.Parameter]]:
            # Autograd remembers the stream on which it first met a parameter, and the parameters
            # themselves it met on another one. So the graph is recorded on new parameters over
            # the same memory.
            leaves = {name: nn.Parameter(p.detach()) for name, p in self.trained.items()}
            device = self.inputs[0].device.type
            # Autocast's own cache of cast weights would outlive the pass.
            with torch.autocast(device, dtype=cast, enabled=cast is not None, cache_enabled=False):
                out = functional_call(
                    _Module(model, run), _under("model", leaves), tuple(self.inputs)
                )
            return out, list(leaves.values())

        torch.cuda.empty_cache()  # what the passes before kept is needed for the graph's own memory
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.set_grad_enabled(learns):
            out, leaves = compute()  # once more, for what only happens with new parameters
            if learns:
                torch.autograd.grad(out, leaves, torch.zeros_like(out), allow_unused=True)
            del out, leaves
        torch.cuda.current_stream().wait_stream(side)
        self.forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward, pool=_pool()), torch.set_grad_enabled(learns):
            out, leaves = compute()
        self.sums: list[tuple[nn.Parameter, Tensor]] = []  # of those that have a gradient
        pending: list[tuple[Tensor, Tensor]] = []  # sums, and gradients that belong to them
        if learns:
            self.grad_out = torch.zeros_like(out)
            for leaf, (name, p) in zip(leaves, self.trained.items()):
                leaf.register_post_accumulate_grad_hook(
                    self._add_to(p, _gradient_sum(model, name, p), pending)
                )
            self.backward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.backward, pool=_pool()):
                torch.autograd.backward(out, self.grad_out, inputs=leaves)
                _add_pending(pending)
            self.anchor = torch.zeros((), device=out.device, requires_grad=True)
        self.out = out.detach()
        self.learns = learns

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        torch._foreach_copy_(self.inputs, list(inputs))  # pyright: ignore[reportPrivateImportUsage]
        if self.learns:
            return _Replay.apply(self.anchor, self)
        self.forward.replay()
        return self.out.clone()

    def _add_to(
        self, parameter: nn.Parameter, total: Tensor, pending: list[tuple[Tensor, Tensor]]
    ) -> Callable[[Tensor], None]:
        """A hook that adds a leaf's new gradient to the parameter's sum, and frees it.

        Several at a time: a kernel for each takes longer to launch than to run.
        """

        def add(leaf: Tensor) -> None:
            assert leaf.grad is not None
            pending.append((total, leaf.grad))
            leaf.grad = None
            self.sums.append((parameter, total))
            if sum(grad.nbytes for _, grad in pending) >= PENDING_BYTES:
                _add_pending(pending)

        return add

    def add_gradients(self, grad_out: Tensor) -> None:
        self.grad_out.copy_(grad_out)
        others = [(p, total) for p, total in self.sums if p.grad is not total]
        if others:  # whose sums hold what was used already
            torch._foreach_zero_([total for _, total in others])  # pyright: ignore[reportPrivateImportUsage]
        self.backward.replay()
        for p, total in others:
            if p.grad is None:
                p.grad = total
            else:  # from a pass that was not replayed
                p.grad += total


def _add_pending(pending: list[tuple[Tensor, Tensor]]) -> None:
    if pending:
        totals, grads = zip(*pending)
        torch._foreach_add_(totals, grads)  # pyright: ignore[reportPrivateImportUsage]
        pending.clear()


class _Replay(torch.autograd.Function):
    """A replayed pass as autograd sees it. Gradients of weights go straight to `.grad`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph: _Graph) -> Tensor:
        graph.forward.replay()
        ctx.graph, ctx.done = graph, False
        _PENDING.append(weakref.ref(ctx))
        return graph.out.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        if ctx.done:
            raise RuntimeError("A replayed pass keeps nothing for a second backward pass.")
        ctx.done = True
        ctx.graph.add_gradients(grad)
        return torch.zeros_like(ctx.graph.anchor), None


_SUMS: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""Where recorded passes of a model add up the gradient of each parameter."""


def _gradient_sum(model: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
    """The tensor for one of them: that of earlier recordings, unless the parameter has changed."""

    def kind(x: Tensor) -> tuple[object, ...]:
        return x.shape, x.dtype, x.device

    sums = _SUMS.setdefault(model, {})
    if name not in sums or kind(sums[name]) != kind(parameter):
        sums[name] = torch.zeros_like(parameter, requires_grad=False)
    return sums[name]


_PENDING: list[weakref.ref[Any]] = []
"""Forward passes in the shared memory whose backward pass has not run."""


def _waiting_for_backward() -> bool:
    """Whether the shared memory holds what a backward pass will need."""
    passes = [(ref, ref()) for ref in _PENDING]
    _PENDING[:] = [ref for ref, ctx in passes if ctx is not None and not ctx.done]
    return bool(_PENDING)


class _Module(nn.Module):
    """A function of a model's weights as a module, which is what `functional_call` takes."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(*inputs)


def _under(prefix: str, tensors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def free_bytes(device: torch.device) -> int:
    """Free on the GPU, or held by torch without being in use."""
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle - graph_bytes(device)


def graph_bytes(device: torch.device) -> int:
    """Memory that recorded passes hold. Torch counts it neither as in use nor in its peaks."""
    if _pool.cache_info().currsize == 0:
        return 0
    segments = torch.cuda.memory_snapshot()
    place = device.index if device.index is not None else torch.cuda.current_device()
    ours = (s for s in segments if tuple(s["segment_pool_id"]) == _pool() and s["device"] == place)
    return sum(segment["total_size"] for segment in ours)


@cache
def _pool() -> Any:
    """The memory that all graphs share. A small graph that stays keeps it when others go."""
    handle = torch.cuda.graph_pool_handle()
    keeper = torch.cuda.CUDAGraph()
    with torch.cuda.graph(keeper, pool=handle):
        torch.zeros(1, device="cuda")
    _KEPT.append(keeper)
    return handle


_KEPT: list[torch.cuda.CUDAGraph] = []
