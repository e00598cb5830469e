"""Responses that branch: trees of samples for RLOO and GRPO.

Whole responses are sampled first. At each further level every response is cut at a macro boundary,
and its beginning is continued in other ways; the native engine prefills each beginning once. What
is sampled from the same beginning are siblings, which are compared with each other
(`core.tree_advantages`).

The cut is the first macro boundary at or after a share of the mean length of the batch: one half
with two levels, thirds with three. The original continuation must be a fair sample beside the new
ones, so the cut may depend on what comes before it alone. Where a rule looks at the token that a
macro action starts on (words, surprise), the cut comes after that token, which all siblings share.

Level by level there are more branches, so more late tokens than early ones are sampled and trained:
late tokens weigh more in the loss.

Axes: B leaves, N sampled rows, T response tokens, L levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlhf.core import Responses, Segments, needs, segment, tree_advantages
from marlhf.models.sequences import send
from marlhf.rollout.engine import Rollout
from marlhf.runtime.stage import Example
from marlhf.spans.apply import explain_segmenter_errors
from marlhf.train.experience import Credit, Experience, all_entropy, all_logprobs
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import RLRun
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.sampling import sample_responses


@dataclass
class TreeRow:
    """One sampled response: its parent's tokens up to `begins`, and its own after that."""

    example: int
    response: list[int]
    logprobs: list[float]
    ended: bool
    begins: int
    cuts: list[int]  # where its path branched, one per level after the first


@dataclass(frozen=True)
class Tree:
    """How the leaves of a batch share tokens."""

    branches: tuple[int, ...]
    cuts: Tensor  # [B, L - 1], the first token of each level after the first
    # One entry per sampled row: a leaf that shows it, and where its own tokens begin.
    leaves: list[int]
    begins: list[int]

    def levels(self, width: int) -> Tensor:
        """The level that each token belongs to: [B, T]."""
        position = torch.arange(width, device=self.cuts.device)
        return (position >= self.cuts[:, :, None]).sum(dim=1)

    def split(self, segments: Segments) -> Segments:
        """Start a macro action at each branch: rules that draw lengths may have none there."""
        levels = self.levels(segments.mask.shape[1])
        branches = levels != levels.roll(1, dims=1)
        return Segments.from_starts(segments.starts | branches, segments.mask)

    def advantages(self, credit: Credit, config: RLOOConfig) -> Tensor:
        return tree_advantages(
            credit.rewards,
            self.branches,
            self.levels(credit.rewards.shape[1]),
            credit.segments,
            gamma=config.gamma,
            baseline=config.baseline,
            scale=config.scale_group,
        )

    def own_tokens(
        self, experience: Experience, credit: Credit, models: Models
    ) -> tuple[Experience, Credit]:
        """Each sampled token once: one row per sample, shared beginnings as part of its prompt."""
        sequences, device = experience.sequences, experience.sequences.ids.device
        ids = sequences.ids.tolist()
        prompts: list[list[int]] = []
        responses: list[list[int]] = []
        for leaf, begin in zip(self.leaves, self.begins):
            first = sequences.prompt_lengths[leaf] + begin
            prompts.append(ids[leaf][:first])
            responses.append(ids[leaf][first : sequences.total_lengths[leaf]])
        own = models.sequences(prompts, responses)
        rows = send(torch.tensor(self.leaves), device)
        begins = send(torch.tensor(self.begins), device)[:, None]
        columns = torch.where(own.mask, torch.arange(own.mask.shape[1], device=device) + begins, 0)

        def take(x: Tensor) -> Tensor:
            """[B, T] -> [N, own tokens]."""
            return torch.where(own.mask, x[rows].gather(1, columns), 0)

        macro_ids = take(credit.segments.ids)
        macro_ids = torch.where(own.mask, macro_ids - macro_ids[:, :1], 0)
        old_logprobs = experience.old_logprobs
        return replace(
            experience,
            sequences=own,
            normalised_scores=experience.scores[rows],
            raw_scores=experience.raw_scores[rows],
            ended=experience.ended[rows],
            logprobs=take(experience.logprobs),
            ref_logprobs=take(experience.ref_logprobs),
            old_logprobs=None if old_logprobs is None else take(old_logprobs),
            spans=None,
            eos_penalty=0.0,  # it is in the scores
            earned=None,  # and so is this in the rewards
        ), Credit(
            take(credit.rewards),
            Segments(macro_ids, own.mask),
            take(credit.values),
            take(credit.advantages),
            take(credit.returns),
        )


@torch.no_grad()
def grow_tree(examples: list[Example], config: RLOOConfig, rl: RLRun) -> tuple[Rollout, Tree]:
    """Sample a tree for each prompt: the response of every leaf, and what leaves share.

    A response that ends before a branch fills all leaves below it, so that every prompt has the
    same number of leaves, and their mean is an unbiased estimate.
    """
    assert config.tree is not None
    branches, models, longest = config.tree, rl.models, config.sampling.max_new_tokens
    first = [i for i in range(len(examples)) for _ in range(branches[0])]
    prompts = [examples[i].prompt for i in first]
    rollout = sample_responses(prompts, models, rl.response_seeds(len(first)))
    rows = [
        TreeRow(i, response, logprobs[: len(response)], ended, 0, [])
        for i, response, logprobs, ended in zip(
            first, rollout.responses, rollout.logprobs.tolist(), rollout.ended.tolist()
        )
    ]
    mean_length = sum(len(row.response) for row in rows) / len(rows)
    leaves = list(range(len(rows)))
    for level in range(1, len(branches)):
        target = math.ceil(level / len(branches) * mean_length)
        cuts = _find_cuts(rows, leaves, target, examples, config, rl)
        children: dict[int, list[int]] = {}
        parents: list[int] = []
        for row, cut in cuts.items():
            num_new = 0 if cut is None else branches[level] - 1
            new = range(len(rows) + len(parents), len(rows) + len(parents) + num_new)
            children[row] = [row, *new] if new else [row] * branches[level]
            parents += [row] * num_new
            # Past the end where it does not branch: later levels then have no tokens.
            rows[row].cuts.append(longest if cut is None else cut)
        rows += _continue(rows, parents, examples, models, rl.response_seeds(len(parents)))
        leaves = [child for row in leaves for child in children[row]]
    shown = {row: leaf for leaf, row in reversed(list(enumerate(leaves)))}
    at_leaves, device = [rows[row] for row in leaves], models.world.device
    cuts_of_leaves = torch.tensor([row.cuts for row in at_leaves], dtype=torch.int64)
    ended = torch.tensor([row.ended for row in at_leaves])
    begins, of_row = [row.begins for row in rows], [shown[i] for i in range(len(rows))]
    tree = Tree(branches, send(cuts_of_leaves, device), of_row, begins)
    responses = [row.response for row in at_leaves]
    return Rollout(responses, _padded(at_leaves, device), send(ended, device)), tree


def _padded(rows: list[TreeRow], device: torch.device) -> Tensor:
    """Log-probs, [N, T], 0 at padding."""
    width = max(len(row.response) for row in rows)
    logprobs = [row.logprobs + [0.0] * (width - len(row.response)) for row in rows]
    return send(torch.tensor(logprobs, dtype=torch.float32), device)


def _find_cuts(
    rows: list[TreeRow],
    leaves: list[int],
    target: int,
    examples: list[Example],
    config: RLOOConfig,
    rl: RLRun,
) -> dict[int, int | None]:
    """Where each row at a leaf branches: None where no boundary comes after the target."""
    after = 0 if getattr(config.segmenter, "looks_at", "token") == "prefix" else 1
    numbers = list(dict.fromkeys(leaves))
    chosen = [rows[i] for i in numbers]
    starts = _macro_starts(chosen, examples, config, rl).tolist()
    cuts: dict[int, int | None] = {}
    for number, row, of_row in zip(numbers, chosen, starts):
        least = max(target, row.cuts[-1] + 1 if row.cuts else 1)
        places = range(least, len(row.response) - after)
        cuts[number] = next((place + after for place in places if of_row[place]), None)
    return cuts


def _macro_starts(
    rows: list[TreeRow], examples: list[Example], config: RLOOConfig, rl: RLRun
) -> Tensor:
    """Where the config's rule starts macro actions: [N, T]."""
    models, rule, device = rl.models, config.segmenter, rl.models.world.device
    responses = [row.response for row in rows]
    parse = models.parsing and models.parsing.begin(responses)
    sequences = models.sequences([examples[row.example].prompt for row in rows], responses)
    ref_logprobs = None  # which cost a pass at each level
    if needs(rule, "ref_logprobs", unless_said=True):
        ref_logprobs = all_logprobs(models.reference, sequences, models)
    seeds = torch.randint(2**62, (len(rows),), generator=rl.shuffler)
    seen = Responses(
        sequences.responses,
        sequences.mask,
        ref_logprobs=ref_logprobs,
        spans=send(parse(), device) if parse else None,
        vocabulary=models.vocabulary,
        seeds=send(seeds, device),
        logprobs=_padded(rows, device),
        entropy=all_entropy(sequences, models) if needs(rule, "entropy") else None,
    )
    with explain_segmenter_errors(rule):  # it may be the user's own code
        return segment(rule, seen).starts  # not `split_last`: that a token is the last shows late


def _continue(
    rows: list[TreeRow],
    parents: list[int],
    examples: list[Example],
    models: Models,
    seeds: list[int],
) -> list[TreeRow]:
    """A new continuation of each parent's beginning, up to its last cut."""
    cuts = [rows[parent].cuts[-1] for parent in parents]
    beginnings = [rows[parent].response[:cut] for parent, cut in zip(parents, cuts)]
    of_example = [rows[parent].example for parent in parents]
    prompts = [[*examples[i].prompt, *begun] for i, begun in zip(of_example, beginnings)]
    limits = [models.sampling.max_new_tokens - cut for cut in cuts]
    rollout = sample_responses(prompts, models, seeds, limits)
    logprobs, ended = rollout.logprobs.tolist(), rollout.ended.tolist()
    return [
        TreeRow(
            of_example[i],
            beginnings[i] + new,
            rows[parent].logprobs[: cuts[i]] + logprobs[i][: len(new)],
            ended[i],
            cuts[i],
            list(rows[parent].cuts),
        )
        for i, (parent, new) in enumerate(zip(parents, rollout.responses))
    ]
