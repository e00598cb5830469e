"""Fit passes into memory: grow the token budget to what is free, halve passes on out-of-memory.

Losses and gradients are sums over micro-batches, so the number of passes changes nothing but
rounding. With `token_budget: auto` the first two steps measure what a token takes of a GPU's
memory. A run that meets the limit halves its largest pass and repeats the computation.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from marlhf.config.rl import RLConfig
from marlhf.config.stage import StageConfig
from marlhf.errors import MarlhfError
from marlhf.rollout.native import AUTO_TOKENS, free_bytes
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.progress import warn

T = TypeVar("T")

WATCHED_STEPS = 2
"""Steps that measure memory: the first allocates what the optimizers keep, and compiles."""
SHARE = 0.5
"""Of the memory that is free after them, what passes may take: other batches have other shapes, and
other runs may share the GPU."""
BUSY = 1 << 34
"""Tokens of a pass times the square of the hidden size."""
LEAST_BUSY, MOST_BUSY = 1 << 11, 1 << 16
BUDGET = "token_budget"
"""Where a run's state has what was found."""


class OutOfMemory(MarlhfError, RuntimeError):
    """The GPU's memory is too small for these settings; says which of them lower it."""


def fit_memory(world: World, compute: Callable[[], T], *trained: nn.Module) -> T:
    """The result of `compute`, which cuts its micro-batches by `world.batches`.

    Where memory runs out it is repeated with passes of half as many tokens at most, and larger ones
    are tried again later. Gradients that the failed pass left in `trained` are dropped, those
    from before it stay. With several processes the others would wait for this one, so the error is
    raised as it is.
    """
    fresh = [p for model in trained for p in model.parameters() if p.grad is None]
    while True:
        try:
            with _watched(world):
                result = compute()
            world.pass_limit.rise()
            return result
        except torch.OutOfMemoryError as error:
            if world.size > 1 or not world.pass_limit.lower():
                raise
            asked = first_line(error)
        # Outside of `except`, where the traceback would keep the tensors of the failed pass.
        for parameter in fresh:
            parameter.grad = None
        gc.collect()  # what the failed pass left in cycles of references
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        warn(
            f"out of memory. {asked} For now a pass has at most {world.pass_limit.tokens} tokens, "
            "which changes no result. Where no other program takes memory, set token_budget so."
        )


def busy_tokens(hidden: int) -> int:
    """Tokens of a pass that should keep a GPU busy: an estimate by the width of a model.

    An earlier version, with passes of twice the size, was 6% faster at 1.5B on an H200.

    >>> [busy_tokens(hidden) for hidden in (576, 896, 1536, 4096)]  # 135M, 0.5B, 1.5B, 8B
    [32768, 16384, 4096, 2048]
    """
    tokens = 1 << (BUSY // hidden**2).bit_length() - 1
    return min(max(tokens, LEAST_BUSY), MOST_BUSY)


def seek_token_budget(world: World, run: RunFolder, model: Any) -> None:
    """On a GPU, measure memory from here on, or take the budget that the run has found.

    Passes have no more tokens than keep it busy with this model.
    """
    if world.device.type == "cuda":
        world.pass_limit.tokens = busy_tokens(model.config.get_text_config().hidden_size)
    if world.size == 1 and world.device.type == "cuda":  # several would find different numbers
        world.pass_limit.auto_tokens = run.state.get(BUDGET)
        world.pass_limit.watching = world.pass_limit.auto_tokens is None


def settle_token_budget(least: int, world: World, run: RunFolder) -> None:
    """Turn what was measured into the tokens of a pass for the rest of the run, at least `least`.

    A power of two, so that a little more or less free memory gives the same passes.
    """
    limit = world.pass_limit
    if not limit.watching or not limit.bytes_per_token:
        return
    limit.watching = False
    fits = int(SHARE * free_bytes(world.device) / limit.bytes_per_token)
    limit.auto_tokens = max(least, 1 << int(math.log2(max(1, fits))))
    run.state[BUDGET] = limit.auto_tokens
    run.write_state()


@contextlib.contextmanager
def _watched(world: World) -> Iterator[None]:
    """Note how much memory the passes in here take for each of their tokens."""
    limit = world.pass_limit
    if not limit.watching:
        yield
        return
    torch.cuda.reset_peak_memory_stats(world.device)
    before = torch.cuda.memory_allocated(world.device)
    yield
    taken = torch.cuda.max_memory_allocated(world.device) - before
    if limit.passes > 1:  # gradients of the first pass are there in the others, and stay
        taken -= max(0, torch.cuda.memory_allocated(world.device) - before)
    per_token = taken / max(1, limit.most_tokens)
    limit.bytes_per_token = max(limit.bytes_per_token, per_token)


@contextlib.contextmanager
def explain_out_of_memory(config: StageConfig) -> Iterator[None]:
    """What was asked for, and the settings that lower it, in place of torch's own error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"Out of memory: {first_line(error)} {' '.join(_remedies(config))} The same command "
            "resumes from the last checkpoint, if there is one."
        ) from error


def first_line(error: torch.OutOfMemoryError) -> str:
    """What was asked for and how much there is, without torch's advice on its own settings.

    >>> first_line(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 "
    ...     "has a total capacity of 8.00 GiB of which 1.00 GiB is free. Including non-PyTorch"))
    'Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free.'
    """
    words = str(error).removeprefix("CUDA out of memory. ").partition(" Including non-PyTorch")[0]
    words = words.partition("\n")[0].strip().rstrip(".")
    return f"{words or 'torch does not say for what'}."


def _remedies(config: StageConfig) -> Iterator[str]:
    yield f"Lower token_budget ({config.token_budget}), the tokens of a pass."
    if isinstance(config, RLConfig):
        limits = f"sampling.max_new_tokens ({config.sampling.max_new_tokens})"
        tokens = config.rollout_tokens
        tokens = f"auto, at least {AUTO_TOKENS}" if tokens == "auto" else tokens
        yield f"While sampling, lower rollout_tokens ({tokens}) or {limits}."
    if config.gradient_checkpointing is not True:
        yield "gradient_checkpointing: true saves most of the activations."
    if config.lora is None:
        yield "lora: {r: 16} trains few weights, so that gradients and optimizer take little."
