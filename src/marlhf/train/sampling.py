"""Sampling responses by all ranks together, ahead of their step, or in conversations.

Each rank samples its share of a batch, and then has all of it. A conversation is one row: its
response has all that followed the prompt, and what the environment said is a hole in the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from marlhf.config.stage import Sampling
from marlhf.data.collate import SingleProcess
from marlhf.environments import Beginning
from marlhf.models.base import Model
from marlhf.rollout.engine import AsyncEngine, Engine, Rollout
from marlhf.runtime.distributed import World, gather_rollout
from marlhf.runtime.stage import Example
from marlhf.train.rl_models import Models


def sample_responses(
    prompts: list[list[int]], models: Models, seeds: list[int], limits: list[int] | None = None
) -> Rollout:
    """A response to each prompt. Each rank samples its share and then has all of them."""
    engine, sampling, world = models.engine, models.sampling, models.world
    if engine.serves_all_ranks:
        return engine.generate(prompts, sampling, seeds, limits)
    return sample_shared(engine, models.policy, prompts, sampling, seeds, limits, world)


def sample_shared(
    engine: Engine,
    policy: Model,
    prompts: list[list[int]],
    sampling: Sampling,
    seeds: list[int],
    limits: list[int] | None,
    world: World,
) -> Rollout:
    """A response to each prompt, from an engine on each rank."""
    share, rollout = world.share([len(p) for p in prompts]), None
    with world.gathered(policy):
        if share:
            rollout = engine.generate(
                [prompts[i] for i in share],
                sampling,
                [seeds[i] for i in share],
                None if limits is None else [limits[i] for i in share],
            )
    return gather_rollout(world, rollout, share, len(prompts))


def sample_examples(
    examples: list[Example],
    models: Models,
    seeds: list[int],
    group: int = 1,
    beginnings: Sequence[Beginning] = (),
) -> tuple[list[Example], Rollout]:
    """A response to each example; with an environment a conversation, and what was said in it.

    `group` is the number of samples of a prompt, which are neighbours. They have one seed for their
    environments, and begin in the same state. With `beginnings` of conversations, only what follows
    them is sampled.
    """
    if models.conversations is None:
        return examples, sample_responses([e.prompt for e in examples], models, seeds)
    world, conversations = models.world, models.conversations

    def play(rows: list[int], processes: SingleProcess) -> tuple[dict[int, Example], Rollout]:
        begun = [beginnings[i] for i in rows] if beginnings else []
        rollout, prompts, records = conversations.play(
            [examples[i].row for i in rows],
            [seeds[i] for i in rows],
            models.engine,
            models.sampling,
            [each.seed for each in begun] or [seeds[i - i % group] for i in rows],
            begun,
            processes,
        )
        played = {
            i: replace(examples[i], prompt=prompt, episode=record)
            for i, prompt, record in zip(rows, prompts, records)
        }
        return played, rollout

    if models.engine.serves_all_ranks:
        played, rollout = play(list(range(len(examples))), world)
        return list(played.values()), rollout
    share = world.share([len(e.prompt) for e in examples])
    played, rollout = dict[int, Example](), None
    with world.gathered(models.policy), world.raise_on_all_ranks():
        if share:
            played, rollout = play(share, SingleProcess())
    rollout = gather_rollout(world, rollout, share, len(examples))
    if world.size > 1:
        played = {i: e for part in world.gather_objects(played) for i, e in part.items()}
    return [played[i] for i in range(len(examples))], rollout


@dataclass(frozen=True)
class InFlight:
    """The responses of a step, sampled with the weights before the update of step `begun`."""

    step: int
    begun: int
    wait: Callable[[], Rollout]


class RolloutPrefetcher:
    """With `async_steps: 1`: the responses of the next step, sampled while this one trains.

    A step takes the responses that were sampled for it, lets the engine begin with those of the
    next step, and only then updates the policy. So responses come from weights that are one step
    old, those of the first step aside. A checkpoint keeps the responses in flight: a resumed run
    trains on the same ones, whose weights are gone.
    """

    def __init__(self, engine: AsyncEngine, models: Models) -> None:
        self.engine, self.sampling, self.world = engine, models.sampling, models.world
        self.serves_all_ranks = models.engine.serves_all_ranks
        self.in_flight: InFlight | None = None
        self.age = 0
        """Steps by which the policy has been trained since the weights that sampled."""

    def begin(self, step: int, prompts: list[list[int]], seeds: list[int], *, now: int) -> None:
        """Start to sample for a step with the weights of now, before the update of step `now`."""
        assert self.in_flight is None, "one batch at a time"
        self.in_flight = InFlight(step, now, self._begin(prompts, seeds))

    def _begin(self, prompts: list[list[int]], seeds: list[int]) -> Callable[[], Rollout]:
        """Each rank starts to sample its share; the function that is returned has all responses."""
        world = self.world
        if self.serves_all_ranks:
            return self.engine.begin(prompts, self.sampling, seeds)
        share, wait = world.share([len(p) for p in prompts]), None
        with world.raise_on_all_ranks():
            if share:
                mine = [prompts[i] for i in share], self.sampling, [seeds[i] for i in share]
                wait = self.engine.begin(*mine)

        def gather() -> Rollout:
            with world.raise_on_all_ranks():
                rollout = None if wait is None else wait()
            return gather_rollout(world, rollout, share, len(prompts))

        return gather

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
            torch.tensor(state["logprobs"], device=self.world.device),
            torch.tensor(state["ended"], device=self.world.device),
        )
        self.in_flight = InFlight(state["step"], state["begun"], lambda: rollout)
