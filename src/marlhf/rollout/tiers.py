"""Long responses in slots that are not sized for the longest.

Slots in which the longest response would fit are few, and most responses never get there. So where
there are more rows than such slots, the same cache is first cut into more and shorter ones. What
outgrows them is set aside with its keys and values, in the host's memory, and goes on in longer
slots once the others are done. Nothing is computed twice, and responses stay the same.

Axes: B rows, R response tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from marlhf.models.sequences import receive
from marlhf.rollout.continuous import DecodeStep, Schedule
from marlhf.rollout.llama import LlamaDecoder

GROWTH = 4
"""How much longer the slots of the next tier are."""
SHORTEST = 256
"""Response tokens of the first tier, at least: shorter slots would be outgrown by too many."""
HOST_SHARE = 0.5
"""Of the host's free memory, the most that responses set aside may take."""


def tier_rooms(rows: int, slots: int, limit: int, row_bytes: int) -> list[int]:
    """Response tokens that slots have room for, tier by tier; the last is the limit itself.

    `slots` of them fit at the limit. `row_bytes` are the keys and values of one response at the
    limit. A single tier where every row has a slot, or the host could not take what is set aside.

    >>> tier_rooms(rows=256, slots=92, limit=4096, row_bytes=0)
    [1024, 4096]
    >>> tier_rooms(rows=64, slots=92, limit=4096, row_bytes=0)
    [4096]
    """
    rooms = [limit]
    while rows > slots and rooms[0] >= GROWTH * SHORTEST:
        rooms.insert(0, rooms[0] // GROWTH)
        slots *= GROWTH
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    while len(rooms) > 1 and rows * row_bytes * rooms[-2] / limit > HOST_SHARE * free:
        rooms.pop(-2)
    return rooms


class TierSchedule(Schedule):
    """The rows of one tier: responses that reach the end of their slot are set aside.

    Slots hold what they have while others step on, as in conversations.
    """

    def __init__(
        self,
        step: DecodeStep,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[list[int]],
        saved: Sequence[Tensor],
        seeds: Sequence[int],
        limits: Sequence[int],
        outgrow: Sequence[bool],
        budget: int,
        *,
        share_prefixes: bool,
    ) -> None:
        """`texts` are prompts with the responses so far, whose keys and values are `saved`.

        `outgrow`: whether a response may be longer than its limit of this tier.
        """
        super().__init__(step, prompts, seeds, limits, budget, share_prefixes=share_prefixes)
        assert step.holds
        assert isinstance(step.decoder, LlamaDecoder)
        self.texts, self.saved, self.outgrow, self.llama = texts, saved, outgrow, step.decoder
        self.set_aside: dict[int, Tensor] = {}

    def _fill(self, rows: list[int], slots: list[int]) -> None:
        if not self.saved:
            super()._fill(rows, slots)
            return
        [where] = self._to_device([slots])
        for row, cache_row in zip(rows, self._cache_rows(where).split(1)):
            self.llama.load(cache_row, self.saved[row])

    def _collect(self, running: list[bool]) -> None:
        done = self._ended(running)
        if not done:
            return
        [where] = self._to_device([[slot for slot, _ in done]])
        for (slot, row), cache_row in zip(done, self._cache_rows(where).split(1)):
            if self.outgrow[row] and self.age[slot] >= self.limits[row]:
                # The token that was sampled last has not been fed.
                held = len(self.texts[row]) + self.limits[row] - 1
                self.set_aside[row] = self.llama.save(cache_row, held)
        super()._collect(running)
        self.state.positions.index_fill_(0, where, 0)


def run_tiers(
    steps: Sequence[tuple[DecodeStep, int]],
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    limits: Sequence[int],
    budget: int,
    *,
    share_prefixes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `Schedule.run`, with a step and its room for each tier."""
    state, ends = steps[-1][0].state, steps[-1][0].ends
    shape, device = (len(prompts), state.length), state.device
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs, lengths = torch.zeros(shape, device=device), torch.zeros_like(tokens[:, 0])
    rows, saved = list(range(len(prompts))), list[Tensor]()
    texts: list[Sequence[int]] = list(prompts)
    before = 0  # tokens of every response that is left: it filled the last tier
    for step, room in steps:
        schedule = TierSchedule(
            step,
            [prompts[row] for row in rows],
            [list(text) for text in texts],
            saved,
            [seeds[row] for row in rows],
            [min(limits[row], room) - before for row in rows],
            [limits[row] > room for row in rows],
            budget,
            share_prefixes=share_prefixes,
        )
        new_tokens, new_logprobs, new_lengths = schedule.run()
        where, width = torch.tensor(rows, device=device), state.length - before
        tokens[where, before:] = new_tokens[:, :width]
        logprobs[where, before:] = new_logprobs[:, :width]
        lengths[where] = before + new_lengths
        full = schedule.set_aside
        if not full:
            break
        count, ended = room - before, ends.tolist()
        added, sizes = receive(new_tokens[:, :count], new_lengths)
        left = [i for i in sorted(full) if sizes[i] == count and added[i][-1] not in ended]
        texts = [[*texts[i], *added[i].tolist()] for i in left]
        saved, rows, before = [full[i] for i in left], [rows[i] for i in left], room
        if not rows:
            break
    return tokens, logprobs, lengths
