"""The process reward model: from steps with labels, the probability that a step is good.

Labels are in the data, or come from continuations (`labels_from`). A policy then writes responses,
and from the end of every step but the last it continues them several times. A verifier judges what
comes of it, and the label of a step is the share that goes well (Math-Shepherd, arXiv 2312.08935).
Rows are kept in `labelled_steps.jsonl` in the run's folder, in the columns that this stage reads,
and a resumed run takes those that are there.

Axes: B rows, S steps of a row, N steps of all rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence

from marlhf.data import Encoded, Row, fit_prompts, load_data
from marlhf.data.collate import Micro
from marlhf.data.encode import decode
from marlhf.data.rows import response_text
from marlhf.models.facts import STEP_SEPARATOR, model_facts
from marlhf.models.forward import token_scores
from marlhf.models.load import end_tokens, load_tokenizer
from marlhf.models.sequences import send
from marlhf.reward import Rewards, import_function
from marlhf.reward.process import StepEnds, cut_steps
from marlhf.rollout.native import NativeEngine
from marlhf.runs.atomic import append_jsonl, read_jsonl
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.runtime.model_loader import load_sources, load_trained_scalar
from marlhf.runtime.optim import check_finite
from marlhf.runtime.progress import Steps, say, warn
from marlhf.runtime.sources import WholeModel
from marlhf.runtime.stage import Example, GivenObjects
from marlhf.train.rl_models import SharedFunction
from marlhf.train.sampling import sample_shared
from marlhf.train.supervised import Passes, SupervisedRun
from marlhf.train.supervised_config import PRMConfig

MAX_HELD_OUT = 1024
"""Held-out responses that an evaluation looks at, at most."""
LABELLED = "labelled_steps.jsonl"
CHUNK = 512
"""Responses that are labelled at once, divided by the continuations of a step and one: what a
killed run may have to sample again."""


@in_run_folder("prm")
def train(config: PRMConfig, run: OpenRun) -> Path:
    """Train, or resume training; returns the folder of the model."""
    world = run.world
    with world.raise_on_all_ranks():
        rows = _rows(config, run.objects)
    if config.labels_from is not None:
        rows = label_steps(*rows, config, world, run.folder)
    with world.raise_on_all_ranks():
        train_rows, eval_rows = (responses_of(part, config.step_separator) for part in rows)
    objects = replace(run.objects, train_rows=train_rows, eval_rows=eval_rows)
    stage = SupervisedRun(config, replace(run, objects=objects), load_trained_scalar, "reward")
    stage.model.config.pad_token_id = stage.tokenizer.pad_token_id
    setattr(stage.model.config, STEP_SEPARATOR, config.step_separator)
    ends = StepEnds(stage.tokenizer, config.step_separator)
    with world.raise_on_all_ranks():
        check_ends(ends, stage.examples + stage.held_out)
    passes = stage.place()
    measure = partial(evaluate, passes, ends, stage.held_out[:MAX_HELD_OUT])
    with stage.begin(measure, metric="accuracy") as loop:
        for step in stage.steps():
            rows = [stage.examples[i] for i in stage.row_numbers(step)]
            compute = partial(backward, passes, ends, rows)
            (loss, right), numbers = stage.update(step, compute, ["prm/loss", "prm/accuracy"])
            metrics = {"prm/loss": float(loss), "prm/accuracy": float(right)}
            metrics |= {f"prm/{k}": x for k, x in numbers.items()}
            loop.log(metrics, show=("prm/loss", "prm/accuracy"))
        return stage.close(f"marlhf ppo, with process_model: {run.folder.model}")


def _rows(config: PRMConfig, objects: GivenObjects) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, as they are given."""
    if objects.train_rows is not None:
        return objects.train_rows, objects.eval_rows or []
    loaded = load_data(config.data, "reward", needs=config.columns)
    say(f"data: {loaded.counts}")
    return loaded.train, loaded.eval


def responses_of(rows: Sequence[Row], separator: str) -> list[Row]:
    """Rows with their steps joined to one response; without those that would be cut otherwise."""
    joined: list[Row] = []
    for row in rows:
        steps = row.columns["completions"]
        text = separator.join(steps)
        if len(cut_steps(text, separator)) == len(steps):
            message = {"role": "assistant", "content": text}
            chosen = text if isinstance(row.prompt, str) else [message]
            joined.append(replace(row, chosen=chosen))
    if rows and not joined:
        raise RunError(
            f"Every row has a step with the separator {separator!r} inside, where the model would "
            "cut it in two. Set step_separator to what stands between the steps alone."
        )
    if len(joined) < len(rows):
        warn(
            f"{len(rows) - len(joined)} of {len(rows)} rows have a step with the separator "
            f"{separator!r} inside and are left out. Set step_separator to what stands between "
            "the steps alone."
        )
    return joined


def check_ends(ends: StepEnds, examples: Sequence[Example]) -> None:
    """Refuse tokens in which the steps of the text are not found again."""
    for example, found in zip(examples, ends([e.chosen for e in examples])):
        wanted = len(example.row.columns["labels"])
        if len(found) != wanted:
            assert example.row.chosen is not None
            raise RunError(
                f"A response has {wanted} steps, but {len(found)} in tokens: the tokenizer or its "
                f"chat template changes {ends.separator.decode()!r}. Set another step_separator."
                f"\n  {response_text(example.row.chosen)[:200]!r}"
            )


def micro_batches(
    passes: Passes, ends: StepEnds, rows: list[Example], token_budget: int
) -> Iterator[tuple[Micro, Tensor]]:
    """Micro-batches with the logit that each of their steps is good, row after row: [N]."""
    for micro in passes.world.batches([len(e.prompt) + e.longest for e in rows], token_budget):
        prompts, responses = zip(*((rows[i].prompt, rows[i].chosen) for i in micro.rows))
        with passes.autocast():
            scores = token_scores(passes.model, passes.sequences([*prompts], [*responses]))
        width, of_row = scores.shape[1], enumerate(ends(responses))
        flat = [row * width + end for row, own in of_row for end in own]
        yield micro, scores.flatten()[send(torch.tensor(flat), scores.device)]


def labels_of(rows: Sequence[Example], device: torch.device) -> Tensor:
    """The label of each step, row after row: [N]."""
    flat = [float(label) for example in rows for label in example.row.columns["labels"]]
    return send(torch.tensor(flat), device)


def backward(passes: Passes, ends: StepEnds, rows: list[Example]) -> tuple[Tensor, Tensor]:
    """Gradients of the batch's mean loss over steps; the loss, and the share judged rightly."""
    world = passes.world
    count = sum(len(e.row.columns["labels"]) for e in rows)
    total, right = torch.zeros(2, device=world.device)
    for micro, logits in micro_batches(passes, ends, rows, passes.pass_tokens):
        labels = labels_of([rows[i] for i in micro.rows], world.device)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / count
        loss = loss * micro.weight
        loss.backward()
        total += loss.detach()
        right += ((logits >= 0) == (labels >= 0.5)).sum() / count * micro.weight
    return world.sum(total), world.sum(right)


@torch.no_grad()
def evaluate(passes: Passes, ends: StepEnds, rows: list[Example]) -> dict[str, float]:
    """How well the model judges the steps of held-out responses; NaN when there are none."""
    names = ("loss", "accuracy", "balanced_accuracy", "first_error", "error_free")
    if not rows:
        return {f"eval/{name}": float("nan") for name in names}
    device = passes.world.device
    labels = pad_sequence([labels_of([e], device) for e in rows], True, -1.0)  # [B, S]
    logits = torch.zeros_like(labels)
    for micro, found in micro_batches(passes, ends, rows, 2 * passes.pass_tokens):
        own = torch.zeros_like(labels[micro.rows])
        own[labels[micro.rows] >= 0] = found * micro.weight
        logits[micro.rows] += own
    logits = passes.world.sum(logits)
    check_finite([("the held-out scores", logits)])
    return {f"eval/{name}": value for name, value in zip(names, judge(logits, labels))}


def judge(logits: Tensor, labels: Tensor) -> tuple[float, float, float, float, float]:
    """Loss, accuracy, balanced accuracy, share of first errors found, of right responses passed.

    Of [B, S] with labels below 0 where a row has no more steps. A step is good from .5 on. The
    first error is found where the first step judged wrong is the first wrong one.

    >>> logits, labels = torch.tensor([[9.0, -9.0], [9.0, -9.0]]), torch.tensor([[1.0, 0], [1, 1]])
    >>> [round(x, 2) for x in judge(logits, labels)[1:]]
    [0.75, 0.83, 1.0, 0.0]
    """
    real = labels >= 0
    good, passed = labels >= 0.5, logits >= 0
    loss = binary_cross_entropy_with_logits(logits[real], labels[real])
    right = (good == passed).double()
    recalls = torch.stack([right[real & good].mean(), right[real & ~good].mean()])
    wrong, rejected = real & ~good, real & ~passed
    has_error = wrong.any(dim=1)
    same = wrong.int().argmax(dim=1) == rejected.int().argmax(dim=1)  # the first of each row
    found = (same & rejected.any(dim=1))[has_error].double().mean()
    clean = (~rejected.any(dim=1))[~has_error].double().mean()
    measures = (loss, right[real].mean(), recalls.mean(), found, clean)
    return tuple(map(float, measures))  # pyright: ignore[reportReturnType]


def label_steps(
    train: Sequence[Row], held_out: Sequence[Row], config: PRMConfig, world: World, run: RunFolder
) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows with labelled steps, sampling those that are not there yet."""
    assert config.labels_from is not None
    count = config.labels_from.responses
    with world.raise_on_all_ranks():
        remote, data = config.trust_remote_code, config.data
        tokenizer = load_tokenizer(config.labels_from.policy, trust_remote_code=remote)
        fit = [
            fit_prompts(rows, tokenizer, data.max_prompt_tokens, data.too_long)[0]
            for rows in (train, held_out)
        ]
    tasks = [fit[0][i % len(fit[0])] for i in range(count)] + fit[1][: max(1, count // 10)]
    file = run.path / LABELLED
    done = world.broadcast(len(read_jsonl(file).rows))
    if done < len(tasks):
        labeller = Labeller(tasks, config, world)
        with Steps("labels", len(tasks), done) as bar:
            size = max(1, CHUNK // (1 + config.labels_from.continuations))
            for start in range(done, len(tasks), size):
                lines = labeller(range(start, min(start + size, len(tasks))))
                with world.raise_on_all_ranks():
                    if world.main:
                        append_jsonl(file, lines)
                bar.advance(start + len(lines), {})
    world.wait()
    rows = [
        Row(line["prompt"], columns={name: line[name] for name in ("completions", "labels")})
        for line in read_jsonl(file).rows
    ]
    return rows[:count], rows[count:]


SampledBatch = tuple[list[list[int]], list[list[int]], list[Row], list[list[int]], list[int]]
"""Prompts, responses, rows, ends of steps, seeds."""


class Labeller:
    """A policy that writes and continues responses, and what verifies them."""

    def __init__(self, tasks: Sequence[Encoded], config: PRMConfig, world: World) -> None:
        assert config.labels_from is not None
        self.tasks, self.settings, self.world = tasks, config.labels_from, world
        path, remote = config.labels_from.policy, config.trust_remote_code
        with world.raise_on_all_ranks():
            tokenizer = self.tokenizer = load_tokenizer(path, trust_remote_code=remote)
            facts = model_facts(path, trust_remote_code=remote, setting="labels_from.policy")
            source = WholeModel(facts, "language", seed=config.seed)
            self.policy = load_sources({"policy": source}, set(), config, world)["policy"]
            ends, pad = end_tokens(self.policy, tokenizer), tokenizer.pad_token_id
            self.engine = NativeEngine(self.policy, ends, pad, precision=config.precision)
            functions = [
                SharedFunction(import_function(name, self.settings.code), tokenizer, world)
                for name in self.settings.reward_funcs
            ]
            self.verify = Rewards([(each.name, each, 1.0) for each in functions])
            self.verify.check([task.row for task in tasks])
        self.separator = config.step_separator
        self.ends = StepEnds(tokenizer, self.separator)
        generator = torch.Generator().manual_seed(config.seed)
        self.seeds = torch.randint(2**62, (len(tasks),), generator=generator).tolist()

    @torch.no_grad()
    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Sample the responses with these numbers, and label their steps."""
        prompts = [self.tasks[i].prompt_ids for i in numbers]
        rows = [self.tasks[i].row for i in numbers]
        seeds = [self.seeds[i] for i in numbers]
        responses = self._sample(prompts, seeds)
        label = self._by_continuations if self.settings.continuations else self._by_steps
        labels = label((prompts, responses, rows, self.ends(responses), seeds))
        texts = [decode(self.tokenizer, response) for response in responses]
        steps = [cut_steps(text, self.separator) for text in texts]
        each = zip(rows, steps, labels)
        return [{"prompt": r.prompt, "completions": s, "labels": x} for r, s, x in each]

    def _by_continuations(self, batch: SampledBatch) -> list[list[float]]:
        """The share of continuations of each step that go well; of the last, the response."""
        prompts, responses, rows, ends, seeds = batch
        count, limit = self.settings.continuations, self.settings.sampling.max_new_tokens
        # The row of each continuation, what it continues, and its seed.
        states = [
            (row, responses[row][: end + 1], seeds[row] + 1 + place * count + number)
            for row, own in enumerate(ends)
            for place, end in enumerate(own[:-1])
            for number in range(count)
        ]
        texts = [[*prompts[row], *before] for row, before, _ in states]
        # A token may have two steps.
        left = [max(1, limit - len(before)) for _, before, _ in states]
        after = self._sample(texts, [seed for *_, seed in states], left) if states else []
        whole = responses + [[*before, *new] for (_, before, _), new in zip(states, after)]
        of_row = [*range(len(rows)), *(row for row, *_ in states)]
        scores = self.verify([prompts[i] for i in of_row], whole, [rows[i] for i in of_row])
        right = ((scores.sum(dim=1) if scores.ndim == 2 else scores) > 0.5).float()
        shares = right[len(rows) :].view(-1, count).mean(dim=1)
        ahead = iter(((shares > 0).float() if self.settings.hard else shares).tolist())
        final = right[: len(rows)].tolist()
        return [[*islice(ahead, len(own) - 1), last] for own, last in zip(ends, final)]

    def _by_steps(self, batch: SampledBatch) -> list[list[float]]:
        """What the verifier gives within each step."""
        prompts, responses, rows, ends, _ = batch
        rewards = self.verify(prompts, responses, rows)
        if rewards.ndim == 1:
            raise RunError(
                "labels_from with continuations: 0 takes the labels from reward_funcs that return "
                "one number per line, and these return one per response. Set continuations."
            )
        sums = rewards.cumsum(dim=1)
        at_ends = [[0.0, *sums[row, own].tolist()] for row, own in enumerate(ends)]
        return [[min(max(b - a, 0.0), 1.0) for a, b in pairwise(x)] for x in at_ends]

    def _sample(
        self, prompts: list[list[int]], seeds: list[int], limits: list[int] | None = None
    ) -> list[list[int]]:
        sampling = self.settings.sampling
        rollout = sample_shared(
            self.engine, self.policy, prompts, sampling, seeds, limits, self.world
        )
        return rollout.responses
