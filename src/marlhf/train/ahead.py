"""With `async_steps: 1`: the responses of the next step, sampled while this one trains.

A step takes the responses that were sampled for it, lets the engine begin with those of the next
step, and only then updates the policy. So responses come from weights that are one step old, those
of the first step aside. A checkpoint keeps the responses in flight: a resumed run trains on the
same ones, whose weights are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marlhf.config.sampling import Sampling
from marlhf.rollout.engine import AsyncEngine, Rollout
from marlhf.runtime.distributed import World, gather_rollout


@dataclass(frozen=True)
class InFlight:
    """The responses of a step, sampled with the weights before the update of step `begun`."""

    step: int
    begun: int
    wait: Callable[[], Rollout]


class SharedAhead:
    """An engine on each rank, which samples its share; then every rank has all responses."""

    def __init__(self, engine: AsyncEngine, world: World) -> None:
        self.engine, self.world = engine, world

    def begin(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> Callable[[], Rollout]:
        world, share = self.world, self.world.share([len(p) for p in prompts])
        wait: Callable[[], Rollout] | None = None
        with world.raise_on_all_ranks():
            if share:
                mine = [prompts[i] for i in share], sampling, [seeds[i] for i in share]
                wait = self.engine.begin(*mine)

        def gather() -> Rollout:
            with world.raise_on_all_ranks():
                rollout = None if wait is None else wait()
            return gather_rollout(world, rollout, share, len(prompts))

        return gather

    def close(self) -> None:
        self.engine.close()


class SampledAhead:
    """One batch in flight at a time, and how old the last one that was taken is."""

    def __init__(self, engine: AsyncEngine, sampling: Sampling, device: torch.device) -> None:
        self.engine, self.sampling, self.device = engine, sampling, device
        self.in_flight: InFlight | None = None
        self.age = 0
        """Steps by which the policy has been trained since the weights that sampled."""

    def begin(self, step: int, prompts: list[list[int]], seeds: list[int], *, now: int) -> None:
        """Start to sample for a step with the weights of now, before the update of step `now`."""
        assert self.in_flight is None, "one batch at a time"
        self.in_flight = InFlight(step, now, self.engine.begin(prompts, self.sampling, seeds))

    def take(self, step: int) -> Rollout:
        """The responses that were sampled for a step."""
        assert self.in_flight is not None
        assert self.in_flight.step == step
        rollout, self.age = self.in_flight.wait(), step - self.in_flight.begun
        self.in_flight = None
        return rollout

    def state(self) -> dict[str, Any] | None:
        """The batch in flight, waited for, in plain numbers: JSON keeps every bit of a float."""
        if self.in_flight is None:
            return None
        step, begun, rollout = self.in_flight.step, self.in_flight.begun, self.in_flight.wait()
        self.in_flight = InFlight(step, begun, lambda: rollout)
        return {
            "step": step,
            "begun": begun,
            "responses": rollout.responses,
            "logprobs": rollout.logprobs.tolist(),
            "ended": rollout.ended.tolist(),
        }

    def load_state(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        rollout = Rollout(
            state["responses"],
            torch.tensor(state["logprobs"], device=self.device),
            torch.tensor(state["ended"], device=self.device),
        )
        self.in_flight = InFlight(state["step"], state["begun"], lambda: rollout)
