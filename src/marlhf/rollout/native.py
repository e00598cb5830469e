"""Sampling with the policy itself, near the speed of the hardware, with nothing to install.

Responses live in slots (`slots.py`), and a slot whose response has ended takes the next prompt
(`continuous.py`), so a batch costs what its mean length says and not its longest. Prompts are
prefilled but for their last token, which is the first that a slot feeds: all sampling then happens
in one place, the step. On a GPU that is one graph.

Memory: the key-value cache of `token_budget` tokens and, where weights are float32 and computed
with in bfloat16, two bytes a weight. Both are kept between calls, unless the cache is large.

A sharded model has to be gathered around `generate`: processes end their responses at different
steps, so no layer may wait for the others then.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from marlhf.errors import SettingError
from marlhf.models.base import Model, Precision, autocast
from marlhf.rollout.continuous import FEWEST, Schedule, State, Stepper
from marlhf.rollout.engine import Rollout, Sampling, draws
from marlhf.rollout.llama import LlamaDecoder
from marlhf.rollout.plain import PlainEngine, check_prompts, to_rollout
from marlhf.rollout.slots import Decoder, ModuleDecoder, mismatch, sharded, takes

ROUND = 64
"""Slots and positions are rounded up to this many, so that batches of like size share a cache."""
PREFILL = 1 << 16
"""The most tokens in one prefill, whatever the budget: more do not make it faster."""
KEEP = 0.05
"""A cache above this share of the GPU's memory is not kept from one call to the next."""

Kind: TypeAlias = Callable[[Model, int, int, torch.dtype | None], Decoder]
"""A decoder for a model with some slots of some capacity, whose cache has a type."""


class NativeEngine:
    """Continuous batching over a static cache.

    >>> from marlhf.models.tiny import tiny_model
    >>> engine = NativeEngine(tiny_model(), end_tokens=[1], pad_id=0)
    >>> rollout = engine.generate([[5, 6], [7]], Sampling(max_new_tokens=4), seeds=[0, 1])
    >>> len(rollout.responses)
    2
    """

    def __init__(
        self,
        model: Model,
        end_tokens: Sequence[int],
        pad_id: int,
        *,
        token_budget: int = 1 << 17,
        precision: Precision = "auto",
    ) -> None:
        if {"cache_params", "state"} & takes(model):
            raise SettingError(
                f"A {type(model).__name__} keeps a state where others keep keys and values, and "
                "the native engine does not know how. Take a model with attention."
            )
        self.model = model
        self.end_tokens = list(end_tokens)
        self.token_budget = token_budget
        self.precision: Precision = precision
        self.plain = PlainEngine(
            model, end_tokens, pad_id, token_budget=token_budget, precision=precision
        )
        self.kind: Kind | None = None  # None before the first call, and where no decoder works
        self.chosen = False
        self.room: Room | None = None

    def update_weights(self, model: nn.Module) -> None:
        assert model is self.model, "the native engine samples from the policy itself"

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> Rollout:
        """Sample one response a prompt; repeat a prompt, with another seed, for several."""
        check_prompts(prompts, seeds)
        with self._sampling():
            if not self.chosen:
                self.kind, self.chosen = self._choose(), True
            if self.kind is None:
                return self.plain.generate(prompts, sampling, seeds)
            tokens, logprobs = self._run(self.kind, prompts, sampling, seeds)
            return to_rollout(tokens, logprobs, self.end_tokens)

    def _run(
        self,
        kind: Kind,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs, [B, R]; junk after the end."""
        device, length = self.model.device, sampling.max_new_tokens
        room = self._room(kind, len(prompts), max(map(len, prompts)) + length)
        with room.decoder.ready():
            uniform = draws(seeds, length, device)
            budget = min(self.token_budget, PREFILL)
            found = Schedule(room.stepper(sampling), prompts, uniform, budget).run()
        tokens, logprobs = (x.clone() for x in found)  # out of inference mode
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            if room.decoder.cache_bytes > KEEP * memory:
                self.room = None
        return tokens, logprobs

    def _room(self, kind: Kind, rows: int, length: int) -> Room:
        """Slots for rows of at most some length: those of the last call if they will do."""
        length += -length % ROUND
        rows += -rows % ROUND if self.model.device.type == "cuda" else 0
        room, weights = self.room, [p.data_ptr() for p in self.model.parameters()]
        if (
            room is not None
            and length <= room.capacity <= 2 * length
            and room.slots >= min(rows, self.token_budget // room.capacity)
            and room.weights == weights
        ):
            return room
        self.room = room = None  # its memory first
        slots = max(FEWEST, min(rows, self.token_budget // length))
        decoder = kind(self.model, slots, length, self._cache_dtype())
        ends = torch.tensor(self.end_tokens, device=self.model.device)
        graphs = self.model.device.type == "cuda" and not sharded(self.model)
        self.room = Room(decoder, slots, length, weights, ends, graphs)
        return self.room

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """The model as sampling needs it, and afterwards as it was."""
        training = self.model.training
        self.model.eval()  # gradient checkpointing would leave out the cache
        try:
            with autocast(self.model.device, self.precision):
                yield
        finally:
            self.model.train(training)

    def _cache_dtype(self) -> torch.dtype | None:
        """What autocast computes attention in; None for whatever the model does."""
        device = self.model.device.type
        enabled = torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if enabled else None

    def _choose(self) -> Kind | None:
        """The fastest decoder that gives what the model gives without a cache.

        Families differ in more ways than can be listed; trying finds all that matter.
        """
        dtype, cause = self._cache_dtype(), ""
        kinds = [LlamaDecoder, ModuleDecoder] if LlamaDecoder.fits(self.model) else [ModuleDecoder]
        for kind in kinds:
            try:
                wrong, allowed = mismatch(kind, self.model, dtype), 1e-3 if dtype is None else 0.1
                if dtype is not None and 0.1 < wrong < 0.5:  # the model's own rounding, perhaps
                    with torch.autocast(self.model.device.type, enabled=False):
                        wrong, allowed = mismatch(kind, self.model, None), 1e-3
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a family does that slots do not know
                cause = f"{type(error).__name__}: {error}"
                continue
            if wrong <= allowed:
                return kind
            cause = f"logits were off by {wrong:.1%}"
        warnings.warn(
            f"The native engine cannot take over the attention of a {type(self.model).__name__} "
            f"({cause}). It samples by a plain loop, which is right but slower.",
            stacklevel=5,
        )
        return None


class Room:
    """A decoder with its cache, and the steps recorded over it."""

    def __init__(
        self,
        decoder: Decoder,
        slots: int,
        capacity: int,
        weights: list[int],
        ends: Tensor,
        graphs: bool,
    ) -> None:
        self.decoder, self.slots, self.capacity = decoder, slots, capacity
        self.weights, self.ends, self.graphs = weights, ends, graphs
        self.steppers: dict[Sampling, Stepper] = {}

    def stepper(self, sampling: Sampling) -> Stepper:
        if sampling not in self.steppers:
            state = State.empty(self.slots, sampling.max_new_tokens, self.ends.device)
            self.steppers[sampling] = Stepper(
                self.decoder, state, sampling, self.ends, graphs=self.graphs
            )
        return self.steppers[sampling]
