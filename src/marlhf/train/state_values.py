"""Values without a critic, at the starts of macro actions: from continuations, or from the answer.

Axes: B rows, T response tokens, S states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from marlhf.core import Segments, thin_out
from marlhf.runtime.stage import Example
from marlhf.train.answer_values import answer_values, check_answers
from marlhf.train.continuations import State, monte_carlo_values, states_at
from marlhf.train.experience import Experience
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_run import RLRun


class StateValues:
    """Values of the states of a run. Rows that do not have what they need are refused at once."""

    def __init__(self, rl: RLRun, config: PPOConfig) -> None:
        self.rl = rl
        rl.score.reads_entropy |= config.boundaries is not None
        if config.values == "answer":
            check_answers([example.row for example in rl.examples], config)

    def __call__(
        self,
        examples: Sequence[Example],
        experience: Experience,
        segments: Segments,
        rewards: Tensor,
        config: PPOConfig,
    ) -> tuple[Segments, Tensor]:
        """The macro actions that have values, and the value of the state before each: [B, T]."""
        segments = chosen_boundaries(segments, experience, config)
        if config.values == "answer":
            options = {"experience": experience, "models": self.rl.models, "config": config}
            of_states = partial(answer_values, **options)
        else:
            of_states = partial(monte_carlo_values, rl=self.rl, config=config)
        count = config.num_samples
        return segments, values_at_starts(of_states, examples, experience, segments, rewards, count)


def values_at_starts(
    of_states: Callable[[list[State]], Tensor],
    examples: Sequence[Example],
    experience: Experience,
    segments: Segments,
    rewards: Tensor,
    num_samples: int,
) -> Tensor:
    """The value of the state at the start of each macro action, 0 elsewhere: [B, T].

    At the start of a response it only serves as a baseline. With several responses to a prompt it
    is the mean return of the others, as in RLOO, which costs nothing.
    """
    values, starts = torch.zeros_like(rewards), segments.starts
    if num_samples > 1:
        returns = rewards.sum(dim=1).view(-1, num_samples)
        others = (returns.sum(dim=1, keepdim=True) - returns) / (num_samples - 1)
        values[:, 0] = torch.where(segments.mask[:, 0], others.flatten(), 0.0)
        starts = starts.clone()
        starts[:, 0] = False
    if states := states_at(starts, examples, experience):
        values[starts] = of_states(states).to(values)  # both row by row
    return values


def chosen_boundaries(segments: Segments, experience: Experience, config: PPOConfig) -> Segments:
    """With `boundaries`, the macro actions that begin where the policy's entropy is highest."""
    if config.boundaries is None:
        return segments
    assert experience.entropy is not None
    return thin_out(segments, experience.entropy, config.boundaries)
