"""Values from the known answer: how probable the policy finds it, asked at once.

At the start of a macro action the response so far is followed by `answer_template`, and the
policy's probability of the right answer there is the value of the state, as the turns' rewards of
IGPO (arXiv 2510.14967) are its changes. Nothing is sampled: a pass without gradients reads each
response once, with the answer after every start (`models/branches.py`).

Axes: B rows, T response tokens, S states.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from marlhf.data import Row
from marlhf.data.encode import tokenize_after_text
from marlhf.errors import SettingError
from marlhf.models.base import Tokenizer, autocast
from marlhf.models.branches import Branch, branch_logprobs
from marlhf.models.forward import cast_dtype, pass_choice
from marlhf.models.sequences import send
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.progress import warn
from marlhf.train.continuations import State
from marlhf.train.experience import Experience, all_logprobs
from marlhf.train.ppo_config import ANSWER, PPOConfig
from marlhf.train.rl_models import Models

TOLERANCE = 0.1
"""How far the log-prob of an answer may be off in bfloat16, relative to its size or to 1. A wrong
mask is further off."""
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
        known = isinstance(answer, str | numbers.Real) and not isinstance(answer, bool)
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
    ids, lengths = experience.sequences.ids.tolist(), experience.sequences.total_lengths
    of_row: list[list[int]] = [[] for _ in ids]
    for number, state in enumerate(states):
        of_row[state.row].append(number)
    rows = [row[:length] for row, length in zip(ids, lengths)]
    whole = [n + sum(len(branches[i].tokens) for i in of) for n, of in zip(lengths, of_row)]

    def passes(chosen: Sequence[int]) -> Tensor | None:
        given = [[branches[i] for i in of_row[row]] for row in chosen]
        with autocast(models.world.device, models.precision):
            return branch_logprobs(
                models.policy, [rows[i] for i in chosen], given, models.sampling.scale
            )

    longest = max(range(len(rows)), key=whole.__getitem__)
    choice = pass_choice(models.policy)
    if 0 <= choice.branches_until < whole[longest]:
        own = of_row[longest]
        plain = _plain_logprobs([states[i] for i in own], [branches[i] for i in own], models)
        close = _agree(passes([longest]), plain, models)
        choice.branches_until = whole[longest] if close else NEVER
    if choice.branches_until == NEVER:
        return _plain_logprobs(states, branches, models)

    def all_passes() -> Tensor:
        total = torch.zeros(len(states), device=models.world.device)
        for micro in models.world.batches(whole, 2 * models.pass_tokens):
            own = torch.tensor([i for row in micro.rows for i in of_row[row]])
            found = passes(micro.rows)
            assert found is not None
            total[send(own, total.device)] += found * micro.weight
        return models.world.sum(total)

    return fit_memory(models.world, all_passes)


def _plain_logprobs(states: Sequence[State], branches: Sequence[Branch], models: Models) -> Tensor:
    """The same by a row for each state, [S]: for families whose masks are their own affair."""
    pairs = list(zip(states, branches))
    sequences = models.sequences(
        [[*state.prompt, *branch.tokens[: branch.first]] for state, branch in pairs],
        [branch.tokens[branch.first :] for _, branch in pairs],
    )
    return all_logprobs(models.policy, sequences, models).sum(dim=1)


def _agree(found: Tensor | None, plain: Tensor, models: Models) -> bool:
    """Whether one pass over a row and its branches gives the numbers of a pass for each."""
    if found is not None:
        with autocast(models.world.device, models.precision):
            exact = torch.finfo(cast_dtype(next(models.policy.parameters()))).bits >= 32
        error = (found - plain).abs() / plain.abs().clamp(min=1)
        if float(error.max()) <= (1e-3 if exact else TOLERANCE):
            return True
    warn(
        f"values: answer reads a response once for each macro action: a "
        f"{type(models.policy).__name__} cannot read several ends of a text at once here. Fewer "
        "boundaries make it cheaper."
    )
    return False
