"""The interface between training and sampling: an engine takes prompts and returns responses; and
conversations as they grow, whatever samples their turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from marlhf.config.stage import Sampling
from marlhf.core.segmenters import mix
from marlhf.data.collate import TokenRows, pad_right
from marlhf.errors import SettingError
from marlhf.models.sequences import send

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """What an engine returns, row by row in the order of the prompts.

    >>> Rollout([[5, 1]], torch.tensor([[-0.5, -0.1]]), torch.tensor([True])).responses
    [[5, 1]]
    """

    responses: list[list[int]]  # with the token that ended them, where one did
    logprobs: Tensor  # [B, R], at the sampling temperature, 0 at padding
    ended: Tensor  # [B] bool, False where the response, or its last turn, was cut off
    sampled: Tensor | None = None  # [B, R] bool, False on the world's tokens; None without a world


Reply: TypeAlias = Callable[[int, list[int]], list[int] | None]
"""The world's answer to a turn: from the row and the tokens of the turn just sampled, with the end
token if there was one, to the tokens that follow before the model's next turn. These may be none.
None where the conversation is over. Called from worker threads, turn after turn within a row."""


GOLDEN = -7046029254386353131
"""2 to the 64 over the golden ratio, as a signed number: the increment of SplitMix64."""


class Engine(Protocol):
    """Sampling behind one interface, so that training does not depend on what does it.

    >>> class Parrot:
    ...     serves_all_ranks = False
    ...     def generate(self, prompts, sampling, seeds, limits=None, reply=None):
    ...         assert reply is None, "a parrot does not converse"
    ...         nothing = torch.zeros(len(prompts), max(map(len, prompts)))
    ...         return Rollout([list(p) for p in prompts], nothing, nothing[:, 0] == 0)
    ...     def update_weights(self, model): ...
    >>> engine: Engine = Parrot()
    >>> engine.generate([[3, 4]], Sampling(), seeds=[0]).responses
    [[3, 4]]
    """

    serves_all_ranks: bool
    """Whether each rank gives it the whole batch and gets all responses, as from a server."""

    def generate(
        self,
        prompts: TokenRows,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        reply: Reply | None = None,
    ) -> Rollout:
        """One response per prompt; repeat a prompt, with another seed, for several.

        `limits` has the most tokens of each response, where `sampling.max_new_tokens` is too many
        for some: a text that continues a response leaves fewer than a prompt does.

        With `reply` a response is a conversation. `sampling.max_new_tokens` then limits a turn, and
        `limits`, which may be larger, a whole response with the world's tokens. A turn stops at an
        end token or at a limit; then `reply` is called, unless the response is full. A reply that
        leaves no room for another sampled token is dropped, and ends the conversation.

        A response depends on its prompt, the sampling, its seed, the weights and the replies, never
        on what else is in the batch, so neither memory settings nor the number of processes change
        it.
        """
        ...

    def update_weights(self, model: nn.Module) -> None:
        """Sample from these weights from now on. Nothing to do where they are shared."""
        ...


class SamplingRequest(NamedTuple):
    """What an engine is asked for: one response per prompt, each of at most `limits` tokens."""

    prompts: TokenRows
    sampling: Sampling
    seeds: Sequence[int]
    limits: Sequence[int]

    @classmethod
    def checked(
        cls,
        prompts: TokenRows,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        *,
        turns: bool = False,
    ) -> SamplingRequest:
        """The limits are those of `sampling`, which limits a turn where there are `turns`."""
        if not prompts:
            raise SettingError("There are no prompts to answer.")
        if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
            raise SettingError(
                f"The prompts {empty} have no tokens, so there is nothing to continue. "
                "Begin each with BOS, or with EOS where the tokenizer has no BOS."
            )
        if len(seeds) != len(prompts):
            raise SettingError(
                f"There are {len(prompts)} prompts but {len(seeds)} seeds; give one each."
            )
        if limits is None:
            limits = [sampling.max_new_tokens] * len(prompts)
        assert len(limits) == len(prompts)
        assert min(limits) > 0
        assert turns or max(limits) <= sampling.max_new_tokens
        return cls(prompts, sampling, seeds, limits)


class CheckedEngine(ABC):
    """An engine as the ones here are: what it samples from was checked."""

    @torch.no_grad()
    def generate(
        self,
        prompts: TokenRows,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        reply: Reply | None = None,
    ) -> Rollout:
        """Sample one response per prompt; repeat a prompt, with another seed, for several."""
        turns = reply is not None
        request = SamplingRequest.checked(prompts, sampling, seeds, limits, turns=turns)
        return self.respond(request, reply)

    @abstractmethod
    def respond(self, request: SamplingRequest, reply: Reply | None) -> Rollout:
        """The responses to a request, or its conversations."""


class AsyncEngine(Protocol):
    """Sampling while the policy trains, from a copy of its weights."""

    def begin(
        self, prompts: TokenRows, sampling: Sampling, seeds: Sequence[int]
    ) -> Callable[[], Rollout]:
        """Start to sample with the weights that the policy has now; one batch at a time.

        The function that is returned waits for the responses. They are what `Engine.generate`
        would return now, whatever becomes of the policy meanwhile.
        """
        ...

    def close(self) -> None:
        """Nothing more will be sampled."""
        ...


def draws(seeds: Sequence[int], length: int, device: torch.device | str = "cpu") -> Tensor:
    """Uniform numbers in [0, 1), a row of `length` for each seed: [B, R], float64.

    A hash of seed and position rather than a generator's next number, so that a row gets the same
    numbers on any device and in any batch.

    >>> bool((draws([3, 4], 5)[1] == draws([4], 5)[0]).all())
    True
    """
    rows = send(torch.tensor(seeds, dtype=torch.int64), device)
    columns = torch.arange(1, length + 1, device=device)
    mixed = mix(mix(rows)[:, None] + GOLDEN * columns)  # SplitMix64
    # The low 53 bits: `mix` shifts signed numbers, which copies the sign into the high ones.
    return (mixed & (2**53 - 1)).double() * 2.0**-53


MAX_WORKERS = 256
"""Replies, or requests, waited for at the same time. Most wait for something themselves."""


class MultiTurnResponses:
    """The responses of a batch: turns of the model, and what the world said in between.

    >>> talk = MultiTurnResponses([[5]], limits=[4], max_new_tokens=2)
    >>> talk.add_turn(0, [7, 1], [-0.5, -0.1]), talk.add_reply(0, [8]), talk.turn_limit(0)
    (True, True, 1)
    >>> talk.add_turn(0, [9], [-0.2])  # and full
    False
    >>> talk.texts, talk.sampled
    ([[5, 7, 1, 8, 9]], [[True, True, False, True]])
    """

    def __init__(self, prompts: TokenRows, limits: Sequence[int], max_new_tokens: int) -> None:
        self.prompts, self.limits, self.max_new_tokens = prompts, limits, max_new_tokens
        self.texts = [list(prompt) for prompt in prompts]  # with the responses so far
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.sampled: list[list[bool]] = [[] for _ in prompts]

    def used(self, row: int) -> int:
        """Tokens of a response so far."""
        return len(self.sampled[row])

    def turn_limit(self, row: int) -> int:
        """The most tokens of a row's next turn."""
        return min(self.max_new_tokens, self.limits[row] - self.used(row))

    def add_turn(self, row: int, tokens: list[int], logprobs: list[float]) -> bool:
        """Whether there is room for more, so that the world is to be asked."""
        self._add(row, tokens, logprobs, sampled=True)
        return self.used(row) < self.limits[row]

    def add_reply(self, row: int, reply: list[int] | None) -> bool:
        """Whether the conversation goes on. A reply that leaves no room for a turn ends it."""
        if reply is None or self.used(row) + len(reply) >= self.limits[row]:
            return False
        self._add(row, reply, [0.0] * len(reply), sampled=False)
        return True

    def rollout(self, end_tokens: Sequence[int], device: torch.device | str) -> Rollout:
        """Every conversation ends with a turn, so its last token tells how that ended."""
        responses = [text[len(p) :] for text, p in zip(self.texts, self.prompts)]
        ended = torch.tensor([response[-1] in end_tokens for response in responses])
        sampled, there = pad_right(self.sampled, 0)
        logprobs = torch.zeros(sampled.shape)
        logprobs[there] = torch.tensor([x for row in self.logprobs for x in row])
        on_device = (send(x, device) for x in (logprobs, ended, sampled.bool()))
        return Rollout(responses, *on_device)

    def _add(self, row: int, tokens: list[int], logprobs: list[float], *, sampled: bool) -> None:
        self.texts[row] += tokens
        self.logprobs[row] += logprobs
        self.sampled[row] += [sampled] * len(tokens)


def converse_in_rounds(
    request: SamplingRequest,
    sample_turns: Callable[[SamplingRequest, list[int]], Sequence[tuple[list[int], list[float]]]],
    ask: Callable[[dict[int, list[int]]], list[list[int] | None]],
) -> MultiTurnResponses:
    """All conversations turn by turn, each round once the slowest of the last one is done.

    `sample_turns` gives tokens and log-probs of the turns that follow some texts, from those and
    from the tokens of each response so far; `ask` the replies to the turns of some rows.
    """
    talk = MultiTurnResponses(request.prompts, request.limits, request.sampling.max_new_tokens)
    rows = list(range(len(talk.texts)))
    while rows:
        turns = request._replace(
            prompts=[talk.texts[row] for row in rows],
            seeds=[request.seeds[row] for row in rows],
            limits=[talk.turn_limit(row) for row in rows],
        )
        sampled = sample_turns(turns, [talk.used(row) for row in rows])
        asked = {
            row: tokens
            for row, (tokens, logprobs) in zip(rows, sampled, strict=True)
            if talk.add_turn(row, tokens, logprobs)
        }
        replies = ask(asked) if asked else []
        rows = [row for row, reply in zip(asked, replies) if talk.add_reply(row, reply)]
    return talk


def ask_all(reply: Reply, turns: dict[int, list[int]]) -> list[list[int] | None]:
    """The replies to the turns of some rows, all of which are asked for at once."""
    return in_threads(reply, turns.keys(), turns.values())


def in_threads(function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """`map` with a thread for each call, up to `MAX_WORKERS`; an error cancels what is left."""
    pool = ThreadPoolExecutor(MAX_WORKERS)
    try:
        return list(pool.map(function, *arguments))
    finally:
        pool.shutdown(cancel_futures=True)
