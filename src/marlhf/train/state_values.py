"""Values without a critic, at the starts of macro actions: from continuations, or from the answer.

A state is a prompt with the first tokens of its response, up to the start of a macro action.

From continuations: several are sampled from each state, scored as whole responses, and charged the
KL penalty of their own tokens. Their mean is an unbiased estimate of the state's value.

From the answer: the response so far is followed by `answer_template`, and the policy's probability
of the right answer there is the value of the state, as the turns' rewards of IGPO (arXiv
2510.14967) are its changes. Nothing is sampled: a pass without gradients reads each response once,
with the answer after every start (`models/forward.py`).

Axes: B rows, T response tokens, S states, K continuations of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real

import torch
from torch import Tensor

from marlhf.config.rl import KLEstimator
from marlhf.core import Segments, shape_rewards, thin_out
from marlhf.data import Row
from marlhf.data.encode import tokenize_after_text
from marlhf.environments import Beginning
from marlhf.errors import SettingError
from marlhf.models.base import Tokenizer, autocast
from marlhf.models.compile import uncompiled
from marlhf.models.forward import Branch, branch_logprobs, pass_choice, plain_token_stats
from marlhf.models.sequences import Sequences, send
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.progress import warn
from marlhf.runtime.stage import Example
from marlhf.train.experience import Experience, RolloutScorer, all_logprobs
from marlhf.train.ppo_config import ANSWER, PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import RLRun
from marlhf.train.sampling import sample_examples, sample_responses


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
    examples: Sequence[Example],
    segments: Segments,
    experience: Experience,
    starts: Tensor | None = None,
) -> list[State]:
    """Every start of a macro action, or some of these `starts`, [B, T], row by row."""
    starts = segments.starts if starts is None else starts
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
    if states := states_of(examples, segments, experience, starts):
        values[starts] = of_states(states).to(values)  # both row by row
    return values


def chosen_boundaries(segments: Segments, experience: Experience, config: PPOConfig) -> Segments:
    """With `boundaries`, the macro actions that begin where the policy's entropy is highest."""
    if config.boundaries is None:
        return segments
    assert experience.entropy is not None
    return thin_out(segments, experience.entropy, config.boundaries)


TOLERANCE = 0.1
"""How far the log-prob of an answer may be off where weights are not float32, relative to its size
or to 1."""
NEVER = -1
"""For `PassChoice.branches_until`: this model takes plain passes."""


def answer_values(
    states: Sequence[State], experience: Experience, models: Models, config: PPOConfig
) -> Tensor:
    """The probability of the right answer in each state, [S]."""
    branches = answer_branches(states, models.tokenizer, config)
    logprobs = answer_logprobs(states, branches, experience, models)
    if config.answer_value == "token_prob":
        logprobs = logprobs / torch.tensor([len(b.tokens) - b.first for b in branches]).to(logprobs)
    return logprobs.exp()


def check_answers(rows: Iterable[Row], config: PPOConfig) -> None:
    """Refuse rows that do not say what the right answer is."""
    for number, row in enumerate(rows, start=1):
        answer, where = row.columns.get(config.answer_column), row.position or f"row {number}"
        known = isinstance(answer, str | Real) and not isinstance(answer, bool)
        if not known or not str(answer).strip():
            wrong = "no such column" if answer is None else f"{answer!r:.60}, no text or number"
            raise SettingError(
                "values: answer reads the right answer from the column "
                f"{config.answer_column!r}, but {where} has {wrong}. Name another by "
                "answer_column, rename yours by data.columns, or take values: monte_carlo."
            )


def answer_branches(
    states: Sequence[State], tokenizer: Tokenizer, config: PPOConfig
) -> list[Branch]:
    """What follows each state: the template, and the answer, which is scored with what follows it.

    Tokens are those of the whole text: an answer that merges with a space before it, as " 7" does
    in some vocabularies, is scored with the space. Where a line has just ended, the line breaks
    that the template begins with are left out.
    """
    before, _, after = config.answer_template.partition(ANSWER)
    texts = [
        (opening, f"{opening}{str(s.example.row.columns[config.answer_column]).strip()}{after}")
        for s in states
        for opening in [before.lstrip("\n") if _ends_line(tokenizer, s.prompt[-1]) else before]
    ]
    distinct = list(dict.fromkeys(text for pair in texts for text in pair if text))
    tokens = {"": [], **dict(zip(distinct, tokenize_after_text(tokenizer, distinct)))}
    found: list[Branch] = []
    for state, (opening, whole) in zip(states, texts):
        pairs = zip(tokens[opening], tokens[whole])
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens[opening]))
        first = min(same, len(tokens[whole]) - 1)
        found.append(Branch(len(state.prompt), tokens[whole], first))
    return found


def _ends_line(tokenizer: Tokenizer, token: int) -> bool:
    return str(tokenizer.decode([token])).endswith("\n")


def answer_logprobs(
    states: Sequence[State], branches: Sequence[Branch], experience: Experience, models: Models
) -> Tensor:
    """The log-prob of each state's answer, [S]."""
    of_row: dict[int, list[int]] = {}
    for number, state in enumerate(states):
        of_row.setdefault(state.row, []).append(number)
    ids, lengths = experience.sequences.ids.tolist(), experience.sequences.total_lengths
    rows = [ids[row][: lengths[row]] for row in of_row]
    numbers = list(of_row.values())
    given = [[branches[i] for i in own] for own in numbers]
    whole = [len(row) + sum(len(b.tokens) for b in own) for row, own in zip(rows, given)]

    longest = max(range(len(rows)), key=whole.__getitem__)
    choice = pass_choice(models.policy)
    if 0 <= choice.branches_until < whole[longest]:
        own = [states[i] for i in numbers[longest]]
        shared = _may_branch(own, given[longest], rows[longest], models)
        choice.branches_until = whole[longest] if shared else NEVER
    if choice.branches_until == NEVER:
        return all_logprobs(models.policy, _alone(states, branches, models), models).sum(dim=1)

    def all_passes() -> Tensor:
        total = torch.zeros(len(states), device=models.world.device)
        for micro in models.world.batches(whole, 2 * models.pass_tokens):
            of = torch.tensor([i for row in micro.rows for i in numbers[row]])
            texts, ends = [rows[i] for i in micro.rows], [given[i] for i in micro.rows]
            with autocast(models.world.device, models.precision):
                found = branch_logprobs(models.policy, texts, ends, models.sampling.scale)
            assert found is not None
            total[send(of, total.device)] += found * micro.weight
        return models.world.sum(total)

    return fit_memory(models.world, all_passes)


def _alone(states: Sequence[State], branches: Sequence[Branch], models: Models) -> Sequences:
    """A row for each state, with its answer as the response."""
    pairs = list(zip(states, branches))
    return models.sequences(
        [[*state.prompt, *branch.tokens[: branch.first]] for state, branch in pairs],
        [branch.tokens[branch.first :] for _, branch in pairs],
    )


@torch.no_grad()
def _may_branch(
    states: Sequence[State], branches: Sequence[Branch], row: list[int], models: Models
) -> bool:
    """Whether one pass over a row and its branches gives the numbers of a pass for each state.

    It does not where a family makes its own masks, as for windows that are shorter than the row.
    """
    policy, scale = models.policy, models.sampling.scale
    exact = all(p.dtype.itemsize >= 4 for p in policy.parameters())
    with autocast(models.world.device, "float32" if exact else models.precision), uncompiled():
        found = branch_logprobs(policy, [row], [branches], scale)
        if found is not None:
            stats = plain_token_stats(policy, _alone(states, branches, models), scale)
            plain = stats.logprobs.sum(dim=1)
            error = (found - plain).abs() / plain.abs().clamp(min=1)
            if float(error.max()) <= (1e-3 if exact else TOLERANCE):
                return True
    warn(
        "values: answer reads a response once for each macro action, since a "
        f"{type(policy).__name__} does not read several ends of a text at once here. Fewer "
        "boundaries make it cheaper."
    )
    return False
