"""Values without a critic: the mean return of responses continued from a state.

A state is a prompt with the first tokens of its response, up to the start of a macro action.
Several continuations are sampled from each, scored as whole responses, and charged the KL penalty
of their own tokens. Their mean is an unbiased estimate of the state's value.

Axes: B rows, T response tokens, S states, K continuations of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf.config.rl import KLEstimator
from marlhf.core import Segments, shape_rewards
from marlhf.environments import Beginning
from marlhf.runtime.stage import Example
from marlhf.train.experience import (
    Experience,
    RolloutScorer,
    sample_examples,
    sample_responses,
)
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_run import RLRun


@dataclass(frozen=True)
class State:
    """A response up to the start of a macro action."""

    row: int  # of the batch
    column: int  # of the macro action's first token
    example: Example
    prefix: list[int]

    @property
    def prompt(self) -> list[int]:
        """What is continued."""
        return [*self.example.prompt, *self.prefix]

    @property
    def turns(self) -> list[list[int]]:
        """With an environment, the model's turns so far."""
        turns = self.example.episode.turns if self.example.episode else []
        return [self.prefix[t.start : t.stop] for t in turns if t.stop <= self.column]


def states_of(
    examples: Sequence[Example], segments: Segments, experience: Experience
) -> list[State]:
    """Every start of a macro action, row by row."""
    return states_at(segments.starts, examples, experience)


def states_at(starts: Tensor, examples: Sequence[Example], experience: Experience) -> list[State]:
    """The states before some tokens, [B, T], row by row."""
    responses = experience.sequences.responses.tolist()
    return [
        State(row, column, examples[row], responses[row][:column])
        for row, column in starts.nonzero().tolist()
    ]


def monte_carlo_values(states: list[State], rl: RLRun, config: PPOConfig) -> Tensor:
    """The mean return of continuations of each state, [S]."""
    count = config.continuations
    seeds = rl.response_seeds(len(states) * count)
    kl_coef = rl.kl.coef if config.continuation_kl else 0.0
    returns = continuation_returns(states, rl.score, count, seeds, kl_coef, config.kl_estimator)
    return returns.mean(dim=1)


@torch.no_grad()
def continuation_returns(
    states: Sequence[State],
    score: RolloutScorer,
    count: int,
    seeds: list[int],
    kl_coef: float,
    kl: KLEstimator,
    starts: Sequence[int] = (),
) -> Tensor:
    """The return of `count` continuations of each state, [S, K]: score less KL penalty.

    With an environment, `starts` has the seed from which each state's was reset. The episode is
    replayed up to the state, and the environment keeps its seed.
    """
    models, repeated = score.models, [state for state in states for _ in range(count)]
    examples, of_batch = [state.example for state in repeated], models.reward.latest
    if models.conversations is None:
        limits = [models.sampling.max_new_tokens - len(state.prefix) for state in repeated]
        rollout = sample_responses([state.prompt for state in repeated], models, seeds, limits)
    else:
        begun = [Beginning(seed, s.turns, s.prefix) for seed, s in zip(starts, states)]
        begun = [each for each in begun for _ in range(count)]
        examples, rollout = sample_examples(examples, models, seeds, beginnings=begun)
    # Without a penalty the reference need not read every prefix and continuation.
    prefixes = [state.prefix for state in repeated]
    scored = score(examples, rollout, prefixes, reference=kl_coef != 0)
    models.reward.latest = of_batch  # the metrics are of the batch, not of what continued it
    rewards = shape_rewards(
        scored.token_scores, scored.logprobs, scored.ref_logprobs, scored.mask, kl_coef, kl=kl
    )
    return rewards.sum(dim=1).view(len(states), count)
