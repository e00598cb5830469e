"""Values without a critic: the mean return of responses continued from a state.

A state is a prompt with the first tokens of its response, up to the start of a macro action.
Several continuations are sampled from each, scored as whole responses, and charged the KL penalty
of their own tokens. Their mean is an unbiased estimate of the state's value.

Axes: B rows, T response tokens, S states, K continuations of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marlhf.config.rl import RLConfig
from marlhf.core import Segments
from marlhf.models.sequences import Sequences
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.stage import Example
from marlhf.train.experience import Experience, reference_logprobs, sample_responses
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models

Normalise = Callable[[Tensor], Tensor]
"""Raw scores to the scale that training uses."""


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


def states_of(
    examples: Sequence[Example], segments: Segments, experience: Experience
) -> list[State]:
    """Every start of a macro action, row by row."""
    responses = experience.sequences.responses.tolist()
    return [
        State(row, column, examples[row], responses[row][:column])
        for row, column in segments.starts.nonzero().tolist()
    ]


def count_continuations(segments: Segments, config: PPOConfig) -> int:
    """How many responses `monte_carlo_values` samples, each with a seed of its own."""
    return int(segments.starts.sum()) * config.continuations


@torch.no_grad()
def monte_carlo_values(
    examples: Sequence[Example],
    segments: Segments,
    experience: Experience,
    models: Models,
    config: PPOConfig,
    seeds: list[int],
    kl_coef: float,
    normalise: Normalise,
) -> Tensor:
    """The value of the state at the start of each macro action, 0 elsewhere: [B, T]."""
    states = states_of(examples, segments, experience)
    returns = continuation_returns(
        states, models, config, config.continuations, seeds, kl_coef, normalise
    )
    values = torch.zeros(segments.mask.shape, device=returns.device)
    values[segments.starts] = returns.mean(dim=1)  # both row by row
    return values


@torch.no_grad()
def continuation_returns(
    states: Sequence[State],
    models: Models,
    config: RLConfig,
    count: int,
    seeds: list[int],
    kl_coef: float,
    normalise: Normalise,
) -> Tensor:
    """The return of `count` continuations of each state, [S, K]: score less KL penalty."""
    repeated = [state for state in states for _ in range(count)]
    of_batch = models.reward.latest
    returns = _returns(repeated, models, config, seeds, kl_coef, normalise)
    models.reward.latest = of_batch  # the metrics are of the batch, not of what continued it
    return returns.view(len(states), count)


def _returns(
    states: list[State],
    models: Models,
    config: RLConfig,
    seeds: list[int],
    kl_coef: float,
    normalise: Normalise,
) -> Tensor:
    limits = [config.sampling.max_new_tokens - len(state.prefix) for state in states]
    prompts = [state.prompt for state in states]
    rollout = sample_responses(prompts, models, config.sampling, seeds, limits)
    whole = [[*state.prefix, *new] for state, new in zip(states, rollout.responses)]
    examples = [state.example for state in states]
    score = partial(models.reward, [e.prompt for e in examples], whole, [e.row for e in examples])
    raw_scores = fit_memory(models.world, score)
    sequences = Sequences.from_lists(
        prompts, rollout.responses, models.tokenizer.pad_token_id, models.world.device
    )
    by_reference = partial(reference_logprobs, sequences, models, config)
    scored = Experience(
        sequences,
        normalise(raw_scores),
        raw_scores,
        rollout.ended,
        rollout.logprobs,
        fit_memory(models.world, by_reference),
        None,
        eos_penalty=config.missing_eos_penalty * (~rollout.ended).float(),
    )
    return scored.token_rewards(config, kl_coef).sum(dim=1)
