"""Continuous batching: which response is in which slot, and what one step does to all of them.

Axes: B rows, S slots, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf.data.collate import pad_right, token_budget_batches
from marlhf.rollout.engine import Sampling
from marlhf.rollout.kernels import fused, triton_kernels
from marlhf.rollout.sample import draw
from marlhf.rollout.slots import Decoder

CHECK_EVERY = 4
"""Steps between asking a GPU which responses have ended. The question goes out one step before the
answer is waited for, so that the device always has work. A CPU is asked after every step."""
EVEN = 16
"""Keys are looked at in such numbers, so that a row's sums are added up in the same order whatever
the length of the others."""
REFILL = 4
"""Slots are refilled when one in this many is free: a prefill of few prompts costs like one of
more."""
FEWEST = 2
"""A single row is another kind of product for a CPU, and its last bits differ from those that the
same row gets among others."""
SMALLEST = 16
"""Fewer slots than this are not a step of their own size on a GPU, where they cost the same."""


@dataclass(frozen=True)
class State:
    """Where each slot is, on the device, in tensors that stay where they are."""

    uniform: Tensor  # [S, R + 1], float64; slots at rest read and write the last column
    tokens: Tensor  # [S], the next to feed
    positions: Tensor  # [S], its place in prompt and response
    steps: Tensor  # [S], response tokens so far
    running: Tensor  # [S], bool
    out_tokens: Tensor  # [S, R + 1]
    out_logprobs: Tensor  # [S, R + 1]

    @classmethod
    def empty(cls, slots: int, length: int, device: torch.device) -> State:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(slots, length + 1, dtype=torch.float64),
            zeros(slots),
            zeros(slots),
            zeros(slots),
            zeros(slots, dtype=torch.bool),
            zeros(slots, length + 1),
            zeros(slots, length + 1, dtype=torch.float32),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())

    @property
    def slots(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return self.uniform.shape[1] - 1

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def first(self, slots: int) -> State:
        """A view of the first slots."""
        if slots == self.slots:
            return self
        return State(*(tensor[:slots] for tensor in self.tensors))

    def begin(self, slots: Tensor, tokens: Tensor, positions: Tensor, uniform: Tensor) -> None:
        self.tokens[slots] = tokens
        self.positions[slots] = positions
        self.steps[slots] = 0
        self.running[slots] = True
        self.uniform[slots, : self.length] = uniform

    def move(self, source: Tensor, target: Tensor) -> None:
        for tensor in self.tensors:
            tensor[target] = tensor[source]
        self.running[source] = False
        self.positions[source] = 0


class Stepper:
    """One token in each of the first slots; on a GPU as a graph, recorded once a number of slots.

    The first step of its kind runs without a graph, which is also what warms everything up.
    """

    def __init__(
        self, decoder: Decoder, state: State, sampling: Sampling, ends: Tensor, *, graphs: bool
    ) -> None:
        self.decoder, self.state, self.sampling, self.ends = decoder, state, sampling, ends
        self.use_graphs = graphs
        self.warm: set[int] = set()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, slots: int, reach: int) -> None:
        """Step the first `slots`; none of them is at a position as far as `reach`."""
        if not self.use_graphs or slots not in self.warm:
            self.warm.add(slots)
            self._step(slots, reach)
            return
        if slots not in self.graphs:
            self.graphs[slots] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[slots]):
                self._step(slots, None)
        self.graphs[slots].replay()

    def _step(self, slots: int, reach: int | None) -> None:
        rows = self.state.first(slots)
        logits = self.decoder.step(rows.tokens, rows.positions, reach)
        sample(logits, self.sampling, rows, self.ends)


def sample(logits: Tensor, sampling: Sampling, state: State, ends: Tensor) -> None:
    """Draw each slot's next token, keep it, and see which responses end by it."""
    if fused(logits) and sampling.temperature > 0 and not sampling.truncated:
        triton_kernels.sample(logits, state, ends, sampling.temperature)
        return
    running, steps, positions = state.running, state.steps, state.positions
    uniform = state.uniform.gather(1, steps[:, None]).squeeze(1)
    token, logprob = draw(logits, sampling, uniform)
    column = torch.where(running, steps, state.length)[:, None]
    state.out_tokens.scatter_(1, column, token[:, None])
    state.out_logprobs.scatter_(1, column, logprob[:, None])
    state.tokens.copy_(token)
    steps += running
    running &= (steps < state.length) & (token[:, None] != ends).all(dim=1)
    positions += 1
    positions *= running  # at rest a slot sees one key, so its attention costs nothing


class Schedule:
    """The rows of one call on their way through the slots.

    What is done when depends on lengths alone, never on how fast the device answers: the same
    seeds give the same rollout.
    """

    def __init__(
        self, step: Stepper, prompts: Sequence[Sequence[int]], uniform: Tensor, budget: int
    ) -> None:
        self.step, self.state, self.decoder = step, step.state, step.decoder
        self.prompts, self.uniform, self.budget = prompts, uniform, budget
        self.gpu = self.state.device.type == "cuda"
        # Prompts of like length go together, the longest first.
        self.waiting = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        self.held: list[int | None] = [None] * self._size(len(prompts))  # the row of each slot
        self.age = [0] * len(self.held)  # steps since a slot was filled
        shape, device = (len(prompts), self.state.length), self.state.device
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, device=device)

    def run(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs, [B, R]; junk after the end."""
        self._fill()
        while any(row is not None for row in self.held):
            self._harvest(self._advance())
            self._fill()
            self._shrink()
        return self.tokens, self.logprobs

    def _fill(self) -> None:
        """Put waiting prompts into free slots, unless there are too few of those to bother."""
        free = [slot for slot, row in enumerate(self.held) if row is None]
        if not self.waiting or len(free) < max(1, len(self.held) // REFILL):
            return
        count = min(len(free), len(self.waiting))
        rows = [self.waiting.pop() for _ in range(count)]
        slots = free[:count]
        for slot, row in zip(slots, rows):
            self.held[slot], self.age[slot] = row, 0
        lengths = [len(self.prompts[row]) - 1 for row in rows]
        for batch in token_budget_batches(lengths, self.budget):
            beginnings = [self.prompts[rows[i]][:-1] for i in batch if lengths[i]]
            if beginnings:
                ids, _ = pad_right(beginnings, 0)
                if not self.gpu:  # but no further than responses will go
                    more = min(-ids.shape[1] % EVEN, self.state.length)
                    ids = torch.nn.functional.pad(ids, (0, more))
                where = [slots[i] for i in batch if lengths[i]]
                self.decoder.prefill(self._send(ids), self._send(where))
        last = [self.prompts[row][-1] for row in rows]
        uniform = self.uniform[self._send(rows)]
        self.state.begin(self._send(slots), self._send(last), self._send(lengths), uniform)

    def _advance(self) -> list[bool]:
        """A few steps; then which slots are still running, as of one step before the last."""
        held = [slot for slot, row in enumerate(self.held) if row is not None]
        left = self.state.length - min(self.age[slot] for slot in held)
        count = min(CHECK_EVERY, left) if self.gpu else 1
        running: Tensor = self.state.running
        event = torch.cuda.Event() if self.gpu else None
        for i in range(count):
            reach = max(len(self.prompts[self.held[slot] or 0]) + self.age[slot] for slot in held)
            self.step(len(self.held), reach + -reach % EVEN)
            for slot in held:
                self.age[slot] += 1
            if i == max(count - 2, 0):
                running = self.state.running[: len(self.held)]
                if event is not None:
                    pinned = torch.empty(len(self.held), dtype=torch.bool, pin_memory=True)
                    running = pinned.copy_(running, non_blocking=True)
                    event.record()
        if event is not None:
            event.synchronize()
        return running.tolist()

    def _harvest(self, running: list[bool]) -> None:
        """Keep what has ended and free its slots."""
        length = self.state.length
        done = [
            (slot, row)
            for slot, row in enumerate(self.held)
            if row is not None and (not running[slot] or self.age[slot] >= length)
        ]
        if not done:
            return
        slots, rows = (self._send(list(column)) for column in zip(*done))
        self.tokens[rows] = self.state.out_tokens[slots, :length]
        self.logprobs[rows] = self.state.out_logprobs[slots, :length]
        for slot, _ in done:
            self.held[slot] = None

    def _shrink(self) -> None:
        """With nothing waiting, step fewer slots once half of them are free."""
        live = [slot for slot, row in enumerate(self.held) if row is not None]
        size = self._size(len(live))
        if self.waiting or not live or size > len(self.held) // 2:
            return
        source = [slot for slot in live if slot >= size]
        target = [slot for slot in range(size) if self.held[slot] is None][: len(source)]
        if source:
            where = self._send(source), self._send(target)
            self.decoder.move(*where)
            self.state.move(*where)
            for old, new in zip(source, target):
                self.held[new], self.age[new] = self.held[old], self.age[old]
        self.held, self.age = self.held[:size], self.age[:size]

    def _size(self, rows: int) -> int:
        """Slots to step for so many rows: few different numbers on a GPU, each has its graph."""
        size = max(SMALLEST, 1 << (rows - 1).bit_length()) if self.gpu else max(FEWEST, rows)
        return min(size, self.state.slots)

    def _send(self, values: Tensor | list[int]) -> Tensor:
        return torch.as_tensor(values).to(self.state.device, non_blocking=True)
