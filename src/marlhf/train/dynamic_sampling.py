"""Which responses an update of RLOO and GRPO learns from.

DAPO's dynamic sampling: where all responses to a prompt have the same score there is nothing to
compare, so other prompts take their place. And down-sampling: of a batch, only the responses with
the largest advantages are trained.

Axes: B rows, prompt by prompt; G groups, the responses to one prompt; T response tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from marlhf.models.sequences import send
from marlhf.train.experience import Credit, Experience, sample_examples
from marlhf.train.rl_run import RLRun
from marlhf.train.rloo_config import RLOOConfig

T = TypeVar("T")


def equal_groups(experience: Experience, config: RLOOConfig) -> list[int]:
    """Prompts whose responses all have the same score, before penalties for length."""
    scores = experience.raw_scores.view(-1, config.num_samples)
    return (scores == scores[:, :1]).all(dim=1).nonzero().flatten().tolist()


def replace_equal_groups(
    experience: Experience, rl: RLRun, config: RLOOConfig
) -> tuple[Experience, dict[str, Tensor]]:
    """With `dynamic_sampling`: other prompts in the place of those with nothing to compare.

    Prompts and seeds come from the run's own generator, whose state is in checkpoints.
    """
    if not config.dynamic_sampling:
        return experience, {}
    replaced, size = 0, config.num_samples
    for _ in range(config.dynamic_sampling):
        groups = equal_groups(experience, config)
        if not groups:
            break
        drawn = torch.randint(len(rl.examples), (len(groups),), generator=rl.sampler).tolist()
        examples = [rl.examples[i] for i in drawn for _ in range(size)]
        seeds = rl.response_seeds(len(examples))
        reward = rl.models.reward
        of_batch = reward.latest
        new = rl.score(*sample_examples(examples, rl.models, seeds, size))
        rows = [group * size + i for group in groups for i in range(size)]
        if (experience.earned is None) != (new.earned is None):  # one has rewards with places
            experience, new = with_places(experience), with_places(new)
        experience = replace_rows(experience, new, rows)
        reward.latest = of_batch  # means over the prompts that were drawn without looking
        replaced += len(groups)
    share = replaced * size / len(experience.scores)
    return experience, {"rl/replaced_prompts": torch.tensor(share)}


def with_places(experience: Experience) -> Experience:
    """The same scores, all of them earned at the end if none has a place."""
    if experience.earned is not None:
        return experience
    return dataclasses.replace(experience, earned=torch.zeros_like(experience.ref_logprobs))


def rows_to_train(experience: Experience, credit: Credit, config: RLOOConfig) -> list[int] | None:
    """The rows of a batch that the update uses; None for all."""
    if config.update_share == 1 and not config.dynamic_sampling:
        return None
    rows = list(range(len(experience.scores)))
    if config.dynamic_sampling:
        equal = set(equal_groups(experience, config))
        # All of them where there is nothing to compare at all: the KL penalty still counts.
        rows = [row for row in rows if row // config.num_samples not in equal] or rows
    sizes = credit.advantages.abs().amax(dim=1)[send(torch.tensor(rows), credit.advantages.device)]
    count = max(1, math.ceil(config.update_share * len(rows)))
    largest = sizes.argsort(descending=True, stable=True)[:count].tolist()
    return sorted(rows[i] for i in largest)


def replace_rows(old: T, new: T, rows: list[int]) -> T:
    """`old` with `rows` of everything that has rows taken from `new`; widths are padded with 0."""
    if isinstance(old, Tensor):
        assert isinstance(new, Tensor)
        if not old.ndim:
            return old
        width = max(old.shape[1:2], new.shape[1:2])

        def widened(x: Tensor) -> Tensor:
            return pad(x, (0, 0) * (x.ndim - 2) + (0, width[0] - x.shape[1])) if width else x

        return widened(old).index_copy(0, send(torch.tensor(rows), old.device), widened(new))
    assert (old is None) == (new is None), "a batch has what the others have"
    if isinstance(old, (tuple, list)):  # one entry per row
        changed: list[Any] = list(old)
        for row, value in zip(rows, cast(Any, new)):
            changed[row] = value
        return cast(T, type(old)(changed))
    if dataclasses.is_dataclass(old) and not isinstance(old, type):
        fields = [field.name for field in dataclasses.fields(old)]
        parts = {x: replace_rows(getattr(old, x), getattr(new, x), rows) for x in fields}
        return dataclasses.replace(old, **parts)
    return old
