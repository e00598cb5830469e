"""The reward model: from pairs of responses, one number that says which people prefer.

With `members` an ensemble: heads over one trunk, or with `lora` an adapter and a head each. Each
member is trained on pairs drawn anew (a bootstrap). With `length_head` two heads, of which one
takes up what length explains and is dropped in the end (ODIN, arXiv 2402.07319). `retrain` trains
one again with votes of people, and `compare` tells what they changed.

Axes: B pairs, b pairs of a micro-batch, K heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from marlhf.config.build import build, raise_problems
from marlhf.core import reward_loss
from marlhf.data import DataError, Text, load_data, prompt_key
from marlhf.data.rows import response_text
from marlhf.errors import SettingError
from marlhf.intervals import Interval, interval, mean
from marlhf.judge.local import RewardJudge
from marlhf.judge.pairs import Pair, Response
from marlhf.models.base import Model
from marlhf.models.facts import STEP_SEPARATOR, model_facts
from marlhf.models.forward import final_scores
from marlhf.models.heads import members_of, set_heads
from marlhf.reward.model import accuracy, correlation, pair_metrics
from marlhf.runs.layout import RunError, read_config, read_state
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.runtime.memory import explain_out_of_memory
from marlhf.runtime.model_loader import load_trained_scalar
from marlhf.runtime.optim import check_finite
from marlhf.runtime.stage import Example, GivenObjects
from marlhf.train.supervised import Passes, SupervisedRun
from marlhf.train.supervised_config import RewardConfig

MAX_HELD_OUT = 1024
"""Held-out pairs that an evaluation looks at, at most."""


@in_run_folder("reward")
def train(config: RewardConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the model."""
    stage = SupervisedRun(config, run, load_with_heads, "reward")
    stage.model.config.pad_token_id = stage.tokenizer.pad_token_id
    vars(stage.model.config).pop(STEP_SEPARATOR, None)  # where it starts from a process model
    passes = stage.place()
    labels = Labels.of(stage.examples, config.label_smoothing)
    counts = draw_counts(len(stage.examples), config.members, config.seed)
    held_out = stage.held_out[:MAX_HELD_OUT]
    measure = partial(evaluate, passes, held_out, Labels.of(held_out), config.length_head)
    with stage.begin(measure, metric="accuracy") as loop:
        for step in stage.steps():
            numbers_of_rows = stage.row_numbers(step)
            rows = [stage.examples[i] for i in numbers_of_rows]
            objective = Objective(
                labels.take(numbers_of_rows),
                counts[:, numbers_of_rows],
                config.centering,
                config.length_head,
            )
            compute = partial(backward, passes, rows, objective)
            (loss, margins), numbers = stage.update(step, compute, ["reward/loss", "reward/margin"])
            metrics = {
                "reward/loss": float(loss),
                "reward/accuracy": accuracy(margins),
                "reward/margin": float(margins.mean()),
            } | {f"reward/{k}": x for k, x in numbers.items()}
            loop.log(metrics, show=("reward/loss", "reward/accuracy"))
        if config.length_head:
            set_heads(stage.model, 1, config.seed, fresh=False)  # the first one: quality
        return stage.close(f"marlhf ppo, with reward_model: {run.folder.model}")


def load_with_heads(config: RewardConfig, objects: GivenObjects, world: World) -> Model:
    """The model that training starts from, with as many heads or adapters as it trains."""
    origin = config.model if objects.model is None else objects.model
    adapted = config.lora is not None or objects.peft_config is not None
    facts = model_facts(origin, trust_remote_code=config.trust_remote_code, setting="model")
    if facts.members > 1 and not (adapted and config.members == facts.members):
        raise _other_members(config.model, facts.members, "and lora")
    model = load_trained_scalar(config, objects, world, config.members if adapted else 1)
    heads = 2 if config.length_head else 1 if adapted else config.members
    for member in members_of(model):
        if member.score.out_features not in (1, heads):
            raise _other_members(config.model, member.score.out_features, "and no lora")
        set_heads(member, heads, config.seed, fresh=not facts.is_scalar)
    return model


def _other_members(name: str, members: int, way: str) -> RunError:
    return RunError(
        f"{name} is an ensemble of {members} members. To train it further set members: {members} "
        f"{way}; or start from the language model."
    )


def draw_counts(num_pairs: int, members: int, seed: int) -> Tensor:
    """How often each member has drawn each pair: [K, N].

    A member draws as many pairs as there are, with replacement, by its own seed, `seed + m`. A
    single member has each pair once.
    """
    if members == 1:
        return torch.ones(1, num_pairs, dtype=torch.int64)
    counts = torch.empty(members, num_pairs, dtype=torch.int64)
    for member in range(members):
        generator = torch.Generator().manual_seed(seed + member)
        drawn = torch.randint(num_pairs, (num_pairs,), generator=generator)
        counts[member] = torch.bincount(drawn, minlength=num_pairs)
    return counts


@dataclass(frozen=True)
class Labels:
    """What is known of pairs beside their texts."""

    margin: Tensor  # [B], by how much the chosen response should be ahead
    flipped: Tensor  # [B], how likely the label is the wrong way round; 0.5 for ties
    lengths: Tensor  # [2, B], tokens of the chosen and of the rejected responses

    @classmethod
    def of(cls, examples: Sequence[Example], label_smoothing: float = 0.0) -> Labels:
        ties = [_tie(e, number) for number, e in enumerate(examples, start=1)]
        flipped = [0.5 if tie else label_smoothing for tie in ties]
        lengths = [[len(e.chosen) for e in examples], [len(e.rejected) for e in examples]]
        margin = [_margin(e, number) for number, e in enumerate(examples, start=1)]
        return cls(*(torch.tensor(x, dtype=torch.float32) for x in (margin, flipped, lengths)))

    def take(self, rows: Sequence[int]) -> Labels:
        index = torch.tensor(rows)
        return Labels(self.margin[index], self.flipped[index], self.lengths[:, index])


def _margin(example: Example, number: int) -> float:
    value = example.row.columns.get("margin")
    if value in (None, ""):
        return 0.0
    try:  # in a CSV file numbers are text
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise _bad_label(
            example,
            number,
            "margin",
            "a number, by which the chosen response's score should be ahead",
        )
    return margin


TIES = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _tie(example: Example, number: int) -> bool:
    value = example.row.columns.get("tie")
    if value in (None, ""):
        return False
    tie = TIES.get(str(value).lower())  # in a CSV file false is text, too
    if tie is None:
        raise _bad_label(example, number, "tie", "true where people found both alike, or false")
    return tie


def _bad_label(example: Example, number: int, name: str, meaning: str) -> DataError:
    return DataError(
        f"{example.row.position or f'row {number}'}: `{name}` is {example.row.columns[name]!r}. It "
        f"must be {meaning}. Rename a column that means something else."
    )


SMALL_COVARIANCE = 1 / 32
"""With the length, in its standard deviations: below this its square is penalised."""


@dataclass(frozen=True)
class Objective:
    """What the scores of a batch are trained for."""

    labels: Labels
    counts: Tensor  # [K, B], how often each member has drawn a pair
    center_coef: float = 0.0
    length_head: bool = False

    def __call__(self, scores: Tensor, rows: Sequence[int]) -> Tensor:
        """The loss of some rows of the batch, [2, b, K], as a part of the batch's mean."""
        labels, device, size = self.labels.take(rows), scores.device, self.counts.shape[1]
        if self.length_head:
            scores = scores.sum(dim=2, keepdim=True)  # together they explain the preferences
        losses = scores.new_zeros(())
        for (chosen, rejected), counts in zip(scores.unbind(2), self.counts[:, list(rows)]):
            index = torch.arange(len(rows)).repeat_interleave(counts)
            margin, flipped = labels.margin[index].to(device), labels.flipped[index].to(device)
            index = index.to(device)
            losses = losses + reward_loss(
                chosen[index],
                rejected[index],
                margin=margin,
                label_smoothing=flipped,
                center_coef=self.center_coef,
                num_pairs=size,
            )
        return losses / len(self.counts)

    def split(self, parts: int) -> list[Objective]:
        """Those of members that are trained one after another."""
        return [replace(self, counts=counts) for counts in self.counts.chunk(parts)]

    def length_penalty(self, scores: Tensor) -> Tensor:
        """ODIN: length explains the second head's scores and not the first one's: [2, B, 2].

        ODIN takes |correlation| of the quality head. Its gradient grows as the scores get smaller,
        and its sign is chance once the correlation is small: with margins as real pairs have, that
        noise hides the preferences. A covariance, squared near 0, pulls at most as hard as they do.
        """
        lengths = self.labels.lengths.to(scores.device).flatten().float()
        quality, length = (head.flatten() for head in scores.unbind(2))
        standard = (lengths - lengths.mean()) / lengths.std().clamp(min=1e-8)
        covariance = (quality * standard).mean()
        follows = smooth_l1_loss(covariance, torch.zeros_like(covariance), beta=SMALL_COVARIANCE)
        return follows - correlation(length, lengths)


def backward(passes: Passes, rows: list[Example], objective: Objective) -> tuple[Tensor, Tensor]:
    """Gradients of the batch's mean loss, micro-batch by micro-batch: the loss, and margins [B].

    A correlation with length is one of the whole batch. Its gradients by the scores are computed
    first, from a pass without gradients, so that micro-batches and ranks still add up exactly.
    """
    world, model = passes.world, passes.model
    total = torch.zeros((), device=world.device)
    margins = torch.zeros(len(rows), device=world.device)
    by_scores: Tensor | None = None
    if objective.length_head:
        whole = score_pairs(passes, rows).requires_grad_()
        penalty = objective.length_penalty(whole)
        (by_scores,) = torch.autograd.grad(penalty, whole)
        orthogonal = heads_overlap(model.score)
        if world.main:  # gradients are summed over ranks
            orthogonal.backward()
            total += (penalty + orthogonal).detach()
    members = members_of(model)
    for micro, pairs in passes.pairs(rows):
        share = micro.weight / len(members)
        # One after another, so that memory holds the activations of one. They share no weights, so
        # each has the gradients that it would have alone.
        for member, own in zip(members, objective.split(len(members))):
            with passes.autocast():
                scores = final_scores(member, pairs).view(2, len(micro.rows), -1)
            loss = own(scores, micro.rows)
            total += loss.detach() * share
            if by_scores is not None:
                loss = loss + (scores * by_scores[:, micro.rows]).sum()
            (loss * micro.weight).backward()
            chosen, rejected = rewards_of(scores.detach(), objective.length_head)
            margins[micro.rows] += (chosen - rejected) * share
    return world.sum(total), world.sum(margins)


def heads_overlap(head: nn.Linear) -> Tensor:
    """ODIN: how far from orthogonal the two heads are, |cos|."""
    quality, length = head.weight
    return torch.cosine_similarity(quality, length, dim=0).abs()


def rewards_of(scores: Tensor, length_head: bool) -> Tensor:
    """What pairs are ranked by: the quality head, or the mean of the members, [2, b]."""
    return scores[..., 0] if length_head else scores.mean(dim=2)


@torch.no_grad()
def score_pairs(passes: Passes, rows: list[Example]) -> Tensor:
    """All heads' scores of the chosen and the rejected responses, on all ranks: [2, B, K]."""
    heads = sum(member.score.out_features for member in members_of(passes.model))
    scores = torch.zeros(2, len(rows), heads, device=passes.world.device)
    for micro, pairs in passes.pairs(rows):
        with passes.autocast():
            part = final_scores(passes.model, pairs).view(2, len(micro.rows), heads)
        scores[:, micro.rows] += part * micro.weight
    return passes.world.sum(scores)


@torch.no_grad()
def evaluate(
    passes: Passes, rows: list[Example], labels: Labels, length_head: bool = False
) -> dict[str, float]:
    """Accuracy, loss and the like on held-out pairs; NaN when there are none."""
    if not rows:
        return {"eval/accuracy": float("nan"), "eval/loss": float("nan")}
    scores = score_pairs(passes, rows)
    check_finite([("the held-out scores", scores)])
    chosen, rejected = rewards_of(scores, length_head)
    margin, flipped, lengths = (x.to(scores.device) for x in vars(labels).values())
    loss: Any = reward_loss(chosen, rejected, margin=margin, label_smoothing=flipped)
    measured = pair_metrics(chosen, rejected, lengths, flipped == 0)
    metrics = {
        "eval/accuracy": measured.pop("accuracy", float("nan")),
        "eval/loss": float(loss),
        "eval/margin": float((chosen - rejected).mean()),
    } | {f"eval/{name}": value for name, value in measured.items()}
    if not length_head and scores.shape[2] > 1:
        metrics["eval/disagreement"] = float(scores.std(dim=2, correction=0).mean())
    return metrics


def retrain(run: Path, pairs: Path) -> Path:
    """Train a finished reward run again, from where it began, with more pairs: the new run."""
    if read_state(run).get("stage") != "reward":
        raise SettingError(f"{run} is no run of `marlhf reward`. Give the folder of one.")
    if not pairs.is_file() or not pairs.stat().st_size:
        raise SettingError(
            f"There are no pairs in {pairs}: nobody has voted for one side yet. Run "
            "`marlhf annotate` on it first."
        )
    config = _config(run)
    data = replace(config.data, more=(*config.data.more, str(pairs)))
    folder = run.with_name(f"{run.name}-voted")
    with explain_out_of_memory(config):
        train(replace(config, data=data, output_dir=str(folder)))
    return folder


def _config(run: Path) -> RewardConfig:
    problems: list[str] = []
    config = build(RewardConfig, read_config(run), str(run), problems)
    raise_problems(problems)
    return config


def compare(before: Path, after: Path, device: str = "auto") -> tuple[float, float, Interval]:
    """Accuracy of two reward runs on the held-out pairs of the first, and the difference.

    Both score the same pairs, so the difference is taken pair by pair. Each prompt counts once,
    however many pairs it has.
    """
    config = _config(before)
    rows = load_data(config.data, "reward", needs=config.columns).eval
    if not rows:
        raise SettingError(f"{before} holds out no pairs (data.eval_size), so nothing is compared.")
    asked = [Pair(row.prompt, _response(row.chosen), _response(row.rejected)) for row in rows]
    right = [
        [(m > 0) + (m == 0) / 2 for m in RewardJudge(str(run), device).margins(asked)]
        for run in (before, after)
    ]
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for row, *both in zip(rows, *right):
        by_prompt.setdefault(prompt_key(row), []).append((both[0], both[1]))
    old, new = ([mean([x[i] for x in pairs]) for pairs in by_prompt.values()] for i in (0, 1))
    return mean(old), mean(new), interval([b - a for a, b in zip(old, new)])


def _response(given: Text | None) -> Response:
    assert given is not None, "rows without are left out"
    return Response(response_text(given))
