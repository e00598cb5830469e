"""Continuous batching: which response is in which slot, and what one step does to all of them.

Axes: B rows, S slots, R response tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marlhf.data.collate import TokenRows, pad_right, token_budget_batches
from marlhf.kernels import fused, has_triton
from marlhf.kernels.sampling import draw
from marlhf.models.sequences import send
from marlhf.rollout.engine import Rollout, Sampling, SamplingRequest, draws
from marlhf.rollout.plain import to_rollout
from marlhf.rollout.slots import PREFILL_TOKENS, Decoder
from marlhf.rollout.state import DecodeState

triton_sampling: Any = None
if has_triton():
    from marlhf.kernels import triton_sampling

CHECK_EVERY = 4
"""Steps between reading from a GPU which responses have ended. A CPU is read after every step."""
KEY_MULTIPLE = 16
"""On a CPU the number of keys is rounded up to this. Sums over them are then added in the same
order whatever the length of the other rows, so a row's last bits do not depend on its batch."""
REFILL_SHARE = 4
"""Slots are refilled once one in this many is free: prefilling few prompts costs as much as
prefilling more."""
MAX_PADDING = 1.1
"""Tokens of a large prefill to those of its prompts."""
MIN_SLOTS = 2
"""On a CPU a single row is a matrix-vector product, whose last bits differ from those that the same
row gets in a matrix product. So there are never fewer than two."""
MIN_GRAPH_SLOTS = 16
"""The smallest CUDA graph: with fewer slots a step takes just as long."""
MIN_PARTED_SLOTS = 128
"""From this power of two on there is a graph for three quarters of it, too."""
EARLY = 32
"""Tokens that tell most prompts apart."""


class DecodeStep:
    """One token in each of the first slots; on a GPU a CUDA graph for each number of slots.

    The first step with some number of slots runs without a graph: Triton compiles and cuBLAS
    allocates then, which must not happen while a graph is recorded.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: DecodeState,
        sampling: Sampling,
        ends: Tensor,  # the tokens that end a response
        *,
        graphs: bool,
        holds: bool = False,  # whether idle slots keep what they hold
    ) -> None:
        self.decoder, self.state, self.sampling, self.ends = decoder, state, sampling, ends
        self.holds = holds
        self.use_graphs = graphs
        self.warm: set[int] = set()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, slots: int, reach: int) -> None:
        """Step the first `slots`, all of which are at positions below `reach`."""
        if not self.use_graphs or slots not in self.warm:
            self.warm.add(slots)
            self._step(reach, slots)
            return
        if slots not in self.graphs:
            self.graphs[slots] = torch.cuda.CUDAGraph()
            # Threads with replies may use the GPU meanwhile, which is no part of the graph.
            mode = "thread_local" if self.holds else "global"
            with torch.cuda.graph(self.graphs[slots], capture_error_mode=mode):
                # A graph has fixed shapes, so it may attend to all keys.
                self._step(None, slots)
        self.graphs[slots].replay()

    def _step(self, reach: int | None, slots: int) -> None:
        state = self.state.first(slots)
        rows = state.cache_rows if self.decoder.indexed else None
        logits = self.decoder.step(state.tokens, state.positions, reach, rows)
        sample(logits, self.sampling, state, self.ends, holds=self.holds)


def sample(
    logits: Tensor,
    sampling: Sampling,
    state: DecodeState,
    ends: Tensor,
    *,
    holds: bool = False,
) -> None:
    """Draw each slot's next token, record it, and stop the responses that it ends.

    Every step writes a key and a value for each slot. Where a slot `holds` a conversation whose
    turn has ended, it stays at the position of the token just drawn, which is not held yet. Else an
    idle slot goes to position 0.
    """
    if fused(logits) and sampling.temperature > 0 and not sampling.truncated:
        triton_sampling.sample(
            *(logits, state.uniform, state.tokens, state.positions, state.steps, state.running),
            *(state.out_tokens, state.out_logprobs, ends, sampling.temperature, holds),
        )
        return
    running, steps, positions = state.running, state.steps, state.positions
    uniform = state.uniform.gather(1, steps[:, None]).squeeze(1)
    token, logprob = draw(logits, sampling, uniform)
    column = steps.masked_fill(~running, state.length)[:, None]  # idle slots: the dummy column
    state.out_tokens.scatter_(1, column, token[:, None])
    state.out_logprobs.scatter_(1, column, logprob[:, None])
    state.tokens.copy_(token)
    steps += running
    if holds:
        positions += running
    unfinished = token != ends if len(ends) == 1 else (token[:, None] != ends).all(dim=1)
    running &= (steps < state.length) & unfinished
    if not holds:
        positions += 1
        positions *= running  # an idle slot attends to one key, so its attention costs nothing


class Schedule:
    """The rows of one call on their way through the slots.

    What happens when depends on lengths alone, never on how fast the device answers, so the same
    seeds give the same rollout.
    """

    def __init__(
        self,
        step: DecodeStep,
        request: SamplingRequest,
        budget: int,
        *,
        share_prefixes: bool = True,
    ) -> None:
        self.step, self.state, self.decoder = step, step.state, step.decoder
        prompts, _, self.seeds, self.limits = request
        self.prompts = prompts
        self.texts = prompts  # what a slot continues: in conversations also the turns so far
        self.paused: Collection[int] = ()  # rows in slots whose turn is over
        self.budget = budget
        self.gpu = self.state.device.type == "cuda"
        # Without sharing every row is a family of its own.
        self.family = prefix_families(prompts) if share_prefixes else list(range(len(prompts)))
        # Taken from the end: the longest prompts first, those of similar length together, and
        # equal ones next to each other, so that they meet in the slots.
        self.waiting = sorted(range(len(prompts)), key=lambda r: (len(prompts[r]), self.family[r]))
        self.rows: list[int | None] = [None] * self._num_slots(len(prompts))  # in each slot
        self.age = [0] * len(self.rows)  # steps since a slot was filled
        shape, device = (len(prompts), self.state.length), self.state.device
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.lengths = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        torch.arange(self.state.slots, out=self.state.cache_rows)

    @property
    def most_tokens(self) -> int:
        """Of any response."""
        return self.state.length

    @functools.cached_property
    def uniform(self) -> Tensor:
        """Random numbers, [B, R]: made when first wanted, after the first prefill was launched."""
        return draws(self.seeds, self.most_tokens, self.state.device)

    def run(self) -> None:
        self._refill()
        while any(row is not None for row in self.rows):
            self._proceed()
            self._refill()
            self._shrink()

    def rollout(self, end_tokens: Sequence[int]) -> Rollout:
        # Clones: tensors made in inference mode may not be saved for a backward pass.
        tokens, logprobs = self.tokens.clone(), self.logprobs.clone()
        return to_rollout(tokens, logprobs, self.lengths.clone(), end_tokens)

    def _proceed(self) -> None:
        self._collect(self._advance())

    def _refill(self) -> None:
        """Put waiting prompts into free slots, unless too few are free."""
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        if not self.waiting or len(free) < max(1, len(self.rows) // REFILL_SHARE):
            return
        count = min(len(free), len(self.waiting))
        rows = [self.waiting.pop() for _ in range(count)]
        slots = free[:count]
        new, copies = self._find_copies(rows, slots)
        self._prefill([rows[i] for i in new], [slots[i] for i in new])
        self._copy_prefixes(copies)
        for slot, row in zip(slots, rows):
            self.rows[slot], self.age[slot] = row, 0
        self._begin(rows, slots)

    def _begin(self, rows: list[int], slots: list[int]) -> None:
        """Sample from slots that hold all of their rows' texts but the last token.

        The first step feeds that one, so that every token is sampled in the same place.
        """
        last = [self.texts[row][-1] for row in rows]
        positions = [len(self.texts[row]) - 1 for row in rows]
        before = [len(self.texts[row]) - len(self.prompts[row]) for row in rows]
        limits = [self.limits[row] for row in rows]
        lists = [rows, slots, last, positions, before, limits]
        new_rows, new_slots, new_tokens, new_positions, *counts = self._to_device(lists)
        uniform = self.uniform[new_rows]
        self.state.begin(new_slots, new_tokens, new_positions, uniform, *counts)

    def _find_copies(
        self, rows: list[int], slots: list[int]
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Which of the rows to prefill, and (source slot, target slot, positions) of the others.

        A slot in use still holds its whole prompt: only slots without a row are overwritten, at
        position 0. Rows come longest first, so the slot found first for a family serves all after
        it.
        """
        source: dict[int, tuple[int, int]] = {}  # family -> its longest prompt's length and slot
        for slot, row in enumerate(self.rows):
            if row is not None:
                held = (len(self.prompts[row]), slot)
                source[self.family[row]] = max(held, source.get(self.family[row], held))
        new: list[int] = []
        copies: list[tuple[int, int, int]] = []
        for i, (row, slot) in enumerate(zip(rows, slots)):
            family, length = self.family[row], len(self.prompts[row])
            if family in source and source[family][0] >= length:
                copies.append((source[family][1], slot, length - 1))
            else:
                new.append(i)
                source[family] = length, slot
        return new, copies

    def _copy_prefixes(self, copies: list[tuple[int, int, int]]) -> None:
        """Keys and values of prompts that another slot holds already, in one copy.

        Positions beyond a row's own prompt are copied along where a longer row needs them: they
        are overwritten before attention reaches them.
        """
        length = max((positions for _, _, positions in copies), default=0)
        if length:
            sources, targets, _ = self._to_device(list(zip(*copies)))
            self.decoder.move(sources, targets, length)

    def _prefill(self, rows: list[int], slots: list[int]) -> None:
        """Keys and values of all prompt tokens but the last."""
        lengths = [len(self.prompts[row]) - 1 for row in rows]
        for batch in self._prefill_batches(lengths):
            batch = [i for i in batch if lengths[i]]
            if not batch:
                continue
            # The last token of a shorter prompt comes along: the first step writes over it.
            ids = pad_right([self.prompts[rows[i]] for i in batch], 0)[0][:, :-1]
            if not self.gpu:
                # Rounded up for the sake of equal bits, but the cache has room only for as many
                # more positions as a response may have tokens.
                more = min(-ids.shape[1] % KEY_MULTIPLE, self.most_tokens)
                ids = torch.nn.functional.pad(ids, (0, more))
            [slots_on_device] = self._to_device([[slots[i] for i in batch]])
            self.decoder.prefill(send(ids, self.state.device), slots_on_device)

    def _prefill_batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Rows to prefill together; fewer of them where many would be mostly padding."""
        batches = token_budget_batches(lengths, self.budget)
        for batch in batches:
            rows = [lengths[i] for i in batch]
            if self.budget > PREFILL_TOKENS and len(rows) * max(rows) > MAX_PADDING * sum(rows):
                for part in token_budget_batches(rows, PREFILL_TOKENS):
                    yield [batch[i] for i in part]
            else:
                yield batch

    def _advance(self) -> list[bool]:
        """A few steps; then which slots were still running one step before the last.

        On a GPU the flags are copied asynchronously before the last step is queued, and waited for
        after it: the device then always has work. A response that ended in the last step is
        noticed at the next call.
        """
        left = {slot: self.limits[row] - self.age[slot] for slot, row in self._unfinished()}
        count = min(CHECK_EVERY, max(left.values())) if self.gpu else 1
        running: Tensor = self.state.running
        event = torch.cuda.Event() if self.gpu else None
        # Paused slots take part in a step, and without any key to see they would store a NaN.
        reach = self._reach(slot for slot, row in enumerate(self.rows) if row is not None)
        reach += count - 1
        reach += -reach % KEY_MULTIPLE
        for slot in left:
            self.age[slot] += count
        for i in range(count):
            self.step(len(self.rows), reach)
            if i == max(count - 2, 0):
                running = self.state.running[: len(self.rows)]
                if event is not None:
                    pinned = torch.empty(len(self.rows), dtype=torch.bool, pin_memory=True)
                    running = pinned.copy_(running, non_blocking=True)
                    event.record()
        if event is not None:
            event.synchronize()
        return running.tolist()

    def _unfinished(self) -> list[tuple[int, int]]:
        """Slots that are not known to be idle, with their rows."""
        return [
            (slot, row)
            for slot, row in enumerate(self.rows)
            if row is not None and row not in self.paused
        ]

    def _reach(self, slots: Iterable[int]) -> int:
        """Where the longest of some responses has come to, with its prompt."""
        return max(len(self.texts[self.rows[slot] or 0]) + self.age[slot] for slot in slots)

    def _ended(self, running: list[bool]) -> list[tuple[int, int]]:
        """Slots and rows of those that `_advance` found to have ended, or that are full."""
        return [
            (slot, row)
            for slot, row in self._unfinished()
            if not running[slot] or self.age[slot] >= self.limits[row]
        ]

    def _collect(self, running: list[bool]) -> None:
        """Copy out the responses that have ended and free their slots."""
        done = self._ended(running)
        if not done:
            return
        done_slots, done_rows = zip(*done)
        limits = [self.limits[row] for row in done_rows]
        slots, rows, limits = self._to_device([done_slots, done_rows, limits])
        tokens, logprobs, lengths = self.state.responses(slots, limits)
        self.tokens[rows], self.logprobs[rows], self.lengths[rows] = tokens, logprobs, lengths
        for slot, _ in done:
            self.rows[slot] = None

    def _shrink(self) -> None:
        """With nothing waiting, step fewer slots once enough of them are free.

        A step covers the first slots only, so the responses beyond them are moved down. Where keys
        and values are moved along, half of the slots must be free.
        """
        live = [slot for slot, row in enumerate(self.rows) if row is not None]
        size = self._num_slots(len(live))
        most = len(self.rows) - 1 if self.decoder.indexed else len(self.rows) // 2
        if self.waiting or not live or size > most:
            return
        if self.decoder.indexed:
            order = [*live, *(slot for slot, row in enumerate(self.rows) if row is None)]
            self.state.reorder(*self._to_device([order]))
            self.rows = [self.rows[slot] for slot in order]
            self.age = [self.age[slot] for slot in order]
        elif source := [slot for slot in live if slot >= size]:
            target = [slot for slot in range(size) if self.rows[slot] is None][: len(source)]
            old_slots, new_slots = self._to_device([source, target])
            self.decoder.move(old_slots, new_slots, self._reach(live))
            self.state.move(old_slots, new_slots)
            for old, new in zip(source, target):
                self.rows[new], self.age[new] = self.rows[old], self.age[old]
        self.rows, self.age = self.rows[:size], self.age[:size]

    def _num_slots(self, rows: int) -> int:
        """Slots to step for so many rows. Few numbers on a GPU, where each needs a graph."""
        size = max(MIN_SLOTS, rows)
        if self.gpu:
            size = max(MIN_GRAPH_SLOTS, 1 << (rows - 1).bit_length())
            part = size // 4 * 3
            if self.decoder.indexed and size >= MIN_PARTED_SLOTS and rows <= part:
                size = part
        return min(size, self.state.slots)

    def _to_device(self, lists: TokenRows) -> tuple[Tensor, ...]:
        """Lists of one length as tensors, in one copy that does not wait for the device."""
        # By numpy, which takes a fifth of torch's time for lists.
        array = np.array(lists, dtype=np.int64)
        return send(torch.from_numpy(array), self.state.device).unbind()


def prefix_families(prompts: TokenRows) -> list[int]:
    """A number for each row; of two rows with the same number, one prompt begins with the other.

    The cache of the longer one then serves both. Samples of one prompt are a family, and so are
    the beginnings of one response. Compared is all but the last token, which is not prefilled. A
    family is numbered by its first row in the order of the prompts.

    >>> prefix_families([[1, 2, 9], [4, 5], [1, 2, 3], [1, 2, 3, 7, 8]])
    [0, 1, 0, 0]
    """
    # Most prompts differ early, which a GPU need not wait long for.
    beginnings: dict[tuple[int, ...], list[int]] = {}
    compared = min(EARLY, *(len(prompt) - 1 for prompt in prompts)) if prompts else 0
    for row, prompt in enumerate(prompts):
        beginnings.setdefault(tuple(prompt[:compared]), []).append(row)
    number = list(range(len(prompts)))
    for rows in beginnings.values():
        if len(rows) > 1:
            for family in _families(rows, prompts):
                first = min(family)
                for row in family:
                    number[row] = first
    return number


def _families(rows: list[int], prompts: TokenRows) -> list[list[int]]:
    if all(prompts[row] == prompts[rows[0]] for row in rows[1:]):  # samples of one prompt
        return [rows]
    prefixes = {row: tuple(prompts[row][:-1]) for row in rows}
    # In lexicographic order a prompt comes right before those that begin with it.
    order = sorted(rows, key=prefixes.__getitem__, reverse=True)
    families: list[list[int]] = []
    for row, longer in zip(order, [None, *order]):
        prefix = prefixes[row]
        if longer is None or prefixes[longer][: len(prefix)] != prefix:
            families.append([])
        families[-1].append(row)
    return families
