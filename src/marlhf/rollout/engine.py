"""The interface between training and sampling: an engine takes prompts and returns responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from marlhf.config.model import Sampling
from marlhf.core.segmenters import mix
from marlhf.models.sequences import send


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
        prompts: Sequence[Sequence[int]],
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


class AsyncEngine(Protocol):
    """Sampling while the policy trains, from a copy of its weights."""

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
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
