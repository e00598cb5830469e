"""Continuous batching of conversations: slots that wait for the world keep what they hold.

A turn is to a slot what a response is without a world: it is begun, sampled and collected in the
same way, with the text so far as its prompt. Only that text is held already, so that no more than
the end of the last turn and the reply to it are prefilled. Axes: B rows, N new tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from marlhf.data.collate import pad_right, token_budget_batches
from marlhf.models.sequences import receive, send
from marlhf.rollout.continuous import KEY_MULTIPLE, DecodeStep, Schedule
from marlhf.rollout.engine import MAX_WORKERS, MultiTurnResponses, Reply, Rollout, SamplingRequest

GATHER_SECONDS = 0.02
"""How long to wait for all replies while nothing else is to be done: some ten steps of a GPU."""
SCORES = 1 << 25
"""New tokens times the keys that they may see, in one pass: the size of a mask."""


class ConversationSchedule(Schedule):
    """The conversations of one call on their way through the slots.

    Replies come whenever the world has them, so on a GPU what is batched together depends on time.
    With `fixed_order` it depends on lengths alone: slots go on at the same steps however long
    replies take, and are waited for there. On a CPU that is always so, since the last bits of a
    product may depend on its number of rows.
    """

    def __init__(
        self,
        step: DecodeStep,
        request: SamplingRequest,
        reply: Reply,
        budget: int,
        *,
        share_prefixes: bool = True,
        fixed_order: bool | None = None,
    ) -> None:
        prompts, sampling, _, limits = request
        self.conversations = MultiTurnResponses(prompts, limits, sampling.max_new_tokens)
        limits = [self.conversations.turn_limit(row) for row in range(len(prompts))]
        of_turns = request._replace(limits=limits)
        super().__init__(step, of_turns, budget, share_prefixes=share_prefixes)
        assert step.holds
        self.reply, self.texts = reply, self.conversations.texts
        self.turn_limits = limits  # the list that is `self.limits`: of the current turns
        self.replies: dict[int, Future[list[int] | None]] = {}  # of paused rows, some still to come
        self.paused = self.replies.keys()
        self.lost = 0  # rounds of steps that paused slots could have taken part in
        deterministic = torch.are_deterministic_algorithms_enabled()
        self.fixed_order = (not self.gpu or deterministic) if fixed_order is None else fixed_order

    @property
    def most_tokens(self) -> int:
        """Of all turns of a conversation, and the world's."""
        return max(self.conversations.limits)

    def run(self) -> None:
        self.pool = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="reply")
        try:
            super().run()
        finally:
            self.pool.shutdown(cancel_futures=True)  # those that have begun are waited for
            self.state.running.zero_()  # where an exception ended it all
            self.state.positions.zero_()

    def rollout(self, end_tokens: Sequence[int]) -> Rollout:
        return self.conversations.rollout(end_tokens, self.state.device)

    def _proceed(self) -> None:
        if self._unfinished():
            super()._proceed()
        if rows := self._answered():
            self._go_on(rows)

    def _collect(self, running: list[bool]) -> None:
        """Note the turns that have ended, and ask the world for what follows."""
        done = self._ended(running)
        if not done:
            return
        slots, rows = zip(*done)
        limits = [self.turn_limits[row] for row in rows]
        turns = receive(*self.state.responses(*self._to_device([slots, limits])))
        full: list[int] = []
        for (slot, row), tokens, logprobs, length in zip(done, *turns):
            turn = tokens[:length].tolist()
            self.age[slot] = 0
            if self.conversations.add_turn(row, turn, logprobs[:length].tolist()):
                self.replies[row] = self.pool.submit(self.reply, row, turn)
            else:
                full.append(slot)
        self._free(full)

    def _answered(self) -> list[int]:
        """Paused rows to go on with now, in order; none if it is better to wait for more.

        To extend few texts costs the other slots as much time as to extend many, about a round of
        steps. So it is done once as many rounds were lost to paused slots as it costs others.
        """
        if not self.paused:
            return []
        others = len(self._unfinished())
        self.lost += len(self._ready())
        if self.lost < others:
            return []
        self.lost = 0
        if not others and not self.fixed_order:
            wait(self.replies.values(), timeout=GATHER_SECONDS)
            wait(self.replies.values(), return_when=FIRST_COMPLETED)
        return sorted(self._ready())

    def _ready(self) -> list[int]:
        """In a fixed order those count whose reply has been asked for: it will be waited for."""
        return [row for row, reply in self.replies.items() if self.fixed_order or reply.done()]

    def _go_on(self, rows: list[int]) -> None:
        """Extend the texts of rows that have a reply, and sample their next turns."""
        slot_of = {row: slot for slot, row in enumerate(self.rows) if row is not None}
        over: list[int] = []
        held: dict[int, int] = {}  # row -> tokens of its text that the slot holds
        for row in rows:
            # The token that was sampled last has not been fed.
            before, reply = len(self.texts[row]) - 1, self.replies.pop(row).result()
            if self.conversations.add_reply(row, reply):
                held[row] = before
                self.turn_limits[row] = self.conversations.turn_limit(row)
            else:
                over.append(slot_of[row])
        self._free(over)
        slots = [slot_of[row] for row in held]
        self._extend(held, slots)
        if held:
            self._begin(list(held), slots)

    def _extend(self, held: dict[int, int], slots: list[int]) -> None:
        """Keys and values of all tokens of some texts but the last."""
        texts = [self.texts[row] for row in held]
        new = [text[start:-1] for text, start in zip(texts, held.values())]
        reach = max(map(len, texts), default=1)
        budget = max(1, min(self.budget, SCORES // reach))
        for batch in token_budget_batches([len(tokens) for tokens in new], budget):
            batch = [i for i in batch if new[i]]  # a reply may be empty
            if not batch:
                continue
            ids = pad_right([new[i] for i in batch], 0)[0]
            if ids.shape[1] == 1:  # a single row again, and a GPU would compile for it anew
                ids = torch.nn.functional.pad(ids, (0, 1))
            lengths = [len(texts[i]) for i in batch]
            starts = torch.tensor([length - 1 - len(new[i]) for length, i in zip(lengths, batch)])
            # Padding is written behind a text, where the next steps write over it. None of it goes
            # beyond the longest text, whose next token has a place in the cache and the model.
            columns = torch.arange(ids.shape[1])
            positions = (starts[:, None] + columns).clamp(max=max(lengths) - 1)
            reach = max(lengths) + -max(lengths) % KEY_MULTIPLE
            [cache_rows] = self._to_device([[slots[i] for i in batch]])
            if self.decoder.indexed:
                cache_rows = self.state.cache_rows[cache_rows]
            device = self.state.device
            self.decoder.extend(send(ids, device), cache_rows, send(positions, device), reach)

    def _free(self, slots: list[int]) -> None:
        """Slots without a row go to position 0, where their attention costs nothing."""
        for slot in slots:
            self.rows[slot] = None
        if slots:
            [where] = self._to_device([slots])
            self.state.positions.index_fill_(0, where, 0)
