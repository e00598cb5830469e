"""Labelling: pairs of responses that a policy writes now, as data for a reward model or for DPO.

Sampling and scoring are those of online DPO; nothing is trained. A reward, a judge or people say
which response is better. The rows lie in `pairs.jsonl` of the run folder. With people the stage
ends with a sentence while votes are missing, and finishes when it is run again with them.
"""

from __future__ import annotations

import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlhf.data import decode
from marlhf.data.rows import is_blank
from marlhf.judge.annotate import Store, preferences
from marlhf.judge.annotate.pick import POOL, VOTES, write_pool
from marlhf.runs.atomic import read_jsonl, write_jsonl
from marlhf.runs.layout import PAIRS, RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import OpenRun, in_run_folder
from marlhf.runtime.progress import say
from marlhf.runtime.stage import Example, GivenObjects, batch_rows, count_steps, record_outcome
from marlhf.train.dpo_config import LabelConfig
from marlhf.train.online_dpo import open_judge
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.sampling import sample_examples

SAMPLED = "sampled.jsonl"
"""A line per batch, with what becomes of each prompt: what a stop leaves is not sampled again."""


@in_run_folder("label")
def train(config: LabelConfig, opened: OpenRun) -> Path:
    """Sample and label, or go on with it; returns the file of pairs."""
    run, world, objects = opened.folder, opened.world, opened.objects
    file = run.path / SAMPLED
    done = world.broadcast(len(read_jsonl(file).rows) if file.is_file() else 0)
    with record_outcome(run) as interrupts:
        total = _sample(config, objects, world, run, done, interrupts.check)
        world.wait()  # rank 0 has written the last batch
        lines = read_jsonl(file).rows[:total]
        rows = [row for line in lines for row in line["rows"]]
        if config.votes:
            rows = _voted(config, run, rows, world)
        if not rows:
            raise RunError(
                "There are no pairs: the responses to each prompt score alike, are equal, blank or "
                "cut off. Raise sampling.temperature, sampling.max_new_tokens or num_samples."
            )
        if world.main:
            write_jsonl(run.path / PAIRS, rows)
        world.wait()
        prompts = sum(line["prompts"] for line in lines)
        run.finish("finished", {"steps": total, "label/pairs": len(rows), "label/prompts": prompts})
    say(f"{run.path.name}: {len(rows)} pairs of {prompts} prompts in {run.path / PAIRS}")
    return run.path / PAIRS


def _sample(
    config: LabelConfig, objects: GivenObjects, world: World, run: RunFolder, done: int, check: Any
) -> int:
    """Sample and label the batches that are left; returns how many there are in all."""
    if config.num_steps is not None and done >= config.num_steps:
        return config.num_steps
    judge = open_judge(config, objects, world, run.path)
    models = load_models(config, objects, world, critic=False)
    if judge is not None:
        judge.tokenizer = models.tokenizer
        models.reward.parts.append(("judge", judge, 1.0))
    examples, _ = load_prompts(config, models, objects)
    total = count_steps(config, len(examples))
    # By name as well: each round labels other prompts.
    seed = config.seed + zlib.crc32(run.path.name.encode())
    for step in range(done + 1, total + 1):
        check(f"after batch {step - 1} of {total}")
        numbers = batch_rows(step - 1, len(examples), config.batch_size, seed)
        batch = [examples[i] for i in numbers for _ in range(config.num_samples)]
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        seeds = torch.randint(2**62, (len(batch),), generator=generator).tolist()
        batch, rollout = sample_examples(batch, models, seeds, config.num_samples)
        scores = None
        if not config.votes:
            prompts = [e.prompt for e in batch]
            scores = models.reward(prompts, rollout.responses, [e.row for e in batch])
            scores = scores if scores.ndim == 1 else scores.sum(dim=1)
        rows = _pairs(batch, rollout.responses, rollout.ended, scores, models, config.num_samples)
        run.append(SAMPLED, {"rows": rows, "prompts": len(numbers)})
        share = len(rows) / len(numbers)
        run.log("train", step, {"label/pairs": float(len(rows)), "label/share": share})
        say(f"{run.path.name} {step}/{total}  {len(rows)} pairs of {len(numbers)} prompts")
    return total


def _pairs(
    batch: list[Example],
    responses: list[list[int]],
    ended: Tensor,
    scores: Tensor | None,
    models: Models,
    num_samples: int,
) -> list[dict[str, Any]]:
    """A row for each prompt with two responses that differ: best and worst, or the first two."""
    rows: list[dict[str, Any]] = []
    values = [0.0] * len(batch) if scores is None else scores.tolist()
    for first in range(0, len(batch), num_samples):
        texts = {
            i: decode(models.tokenizer, responses[i])
            for i in range(first, first + num_samples)
            if ended[i]
        }
        texts = {i: text for i, text in texts.items() if not is_blank(text)}
        by_text = {text: i for i, text in reversed(texts.items())}  # of equal texts the first
        ranked = sorted(by_text.values(), key=lambda i: (-values[i], i))
        if len(ranked) < 2 or (scores is not None and values[ranked[0]] == values[ranked[-1]]):
            continue
        best, worst = ranked[0], ranked[-1 if scores is not None else 1]
        row = {"prompt": batch[first].row.prompt, "chosen": texts[best], "rejected": texts[worst]}
        rows.append(row | ({} if scores is None else {"scores": [values[best], values[worst]]}))
    return rows


def _voted(
    config: LabelConfig, run: RunFolder, rows: list[dict[str, Any]], world: World
) -> list[dict[str, Any]]:
    """The pairs as people labelled them; a sentence while there are too few votes."""
    found: tuple[list[dict[str, Any]], int] = [], 0
    with world.raise_on_all_ranks():
        if world.main:
            if not (run.path / POOL[0]).is_file():
                write_pool(run.path, [(r["prompt"], r["chosen"], r["rejected"]) for r in rows])
            if (run.path / VOTES).is_file():
                with closing(Store(run.path / VOTES)) as store:
                    found = preferences(store)
            if found[1] < min(config.votes, len(rows)):
                raise RunError(
                    f"{len(rows)} pairs wait for votes: {found[1]} of {config.votes} have one. Run "
                    f"`marlhf annotate {run.path}`, or with `--pick active --reward REWARD` to "
                    "vote where it matters; then run the same command again."
                )
    return world.broadcast(found)[0]
