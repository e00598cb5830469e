"""Labels of steps, for a process reward model: from continuations, or from a verifier of steps.

A policy writes responses, and from the end of every step but the last it continues them several
times. A verifier judges what comes of it, and the label of a step is the share that goes well
(Math-Shepherd, arXiv 2312.08935). Rows are kept in `labelled_steps.jsonl` in the run's folder, in
the columns that process reward modelling reads, and a resumed run takes those that are there.

Axes: B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch

from marlhf.data import Encoded, Row, fit_prompts
from marlhf.data.encode import decode
from marlhf.models.load import end_tokens, load_tokenizer
from marlhf.reward import Rewards, import_function
from marlhf.reward.steps import StepEnds, cut_steps
from marlhf.rollout.native import NativeEngine
from marlhf.runs.atomic import append_jsonl, read_jsonl
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.model_loader import WholeModel, load_sources
from marlhf.runtime.progress import Steps
from marlhf.train.experience import sample_shared
from marlhf.train.rl_models import SharedFunction
from marlhf.train.supervised_config import PRMConfig

LABELLED = "labelled_steps.jsonl"
CHUNK = 512
"""Responses that are labelled at once, divided by the continuations of a step and one: what a
killed run may have to sample again."""


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


class Labeller:
    """A policy that writes and continues responses, and what verifies them."""

    def __init__(self, tasks: Sequence[Encoded], config: PRMConfig, world: World) -> None:
        assert config.labels_from is not None
        self.tasks, self.settings, self.world = tasks, config.labels_from, world
        path, remote = config.labels_from.policy, config.trust_remote_code
        with world.raise_on_all_ranks():
            tokenizer = self.tokenizer = load_tokenizer(path, trust_remote_code=remote)
            source = WholeModel(path, "language", seed=config.seed, setting="labels_from.policy")
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
        responses = self._sample(prompts, [self.seeds[i] for i in numbers])
        ends = self.ends(responses)
        label = self._by_continuations if self.settings.continuations else self._by_steps
        labels = label(prompts, responses, rows, ends, [self.seeds[i] for i in numbers])
        texts = [decode(self.tokenizer, response) for response in responses]
        steps = [cut_steps(text, self.separator) for text in texts]
        each = zip(rows, steps, labels)
        return [{"prompt": r.prompt, "completions": s, "labels": x} for r, s, x in each]

    def _by_continuations(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        rows: list[Row],
        ends: list[list[int]],
        seeds: list[int],
    ) -> list[list[float]]:
        count, limit = self.settings.continuations, self.settings.sampling.max_new_tokens
        # The row of each continuation, what it continues, and its seed.
        states = [
            (row, responses[row][: end + 1], seeds[row] + 1 + place * count + number)
            for row, own in enumerate(ends)
            for place, end in enumerate(own[:-1])
            for number in range(count)
        ]
        texts = [[*prompts[row], *before] for row, before, _ in states]
        left = [
            max(1, limit - len(before)) for _, before, _ in states
        ]  # a token may have two steps
        after = self._sample(texts, [seed for *_, seed in states], left) if states else []
        whole = responses + [[*before, *new] for (_, before, _), new in zip(states, after)]
        of_row = [*range(len(rows)), *(row for row, *_ in states)]
        scores = self.verify([prompts[i] for i in of_row], whole, [rows[i] for i in of_row])
        right = ((scores.sum(dim=1) if scores.ndim == 2 else scores) > 0.5).float()
        shares = right[len(rows) :].view(-1, count).mean(dim=1)
        ahead = iter(((shares > 0).float() if self.settings.hard else shares).tolist())
        final = right[: len(rows)].tolist()
        return [[*islice(ahead, len(own) - 1), last] for own, last in zip(ends, final)]

    def _by_steps(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        rows: list[Row],
        ends: list[list[int]],
        seeds: list[int],
    ) -> list[list[float]]:
        """What the verifier gives within each step."""
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
