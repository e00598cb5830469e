"""Distil block decisions into a model: rounds of best-of-k blocks and supervised fine-tuning.

Each round the model of the round before answers training prompts block by block
(`evaluate.blocks`), and is fine-tuned on what was kept. Decisions cost k times the tokens of a
response; a distilled model makes them for free, and the next round decides among better candidates.

`round-1.jsonl` is the data of a round and `round-1/` its SFT run. Both are resumed: the same call
resumes where it was stopped, and gives the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from marlhf.data import DataConfig
from marlhf.evaluate.best_of_n import find_task
from marlhf.evaluate.blocks import BlockOptions, decide_blocks, write_responses
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
from marlhf.evaluate.results import FrontierPoint
from marlhf.runs.layout import MODEL
from marlhf.train import sft
from marlhf.train.recipe import load_stage


@dataclass(frozen=True)
class DistilledRound:
    """What a round learnt from, and where its model is."""

    point: FrontierPoint  # of the responses it learnt from
    folder: Path


def distil(
    path: Path | str,
    recipe: Path | str,
    output_dir: Path | str,
    options: EvaluationOptions,
    blocks: BlockOptions,
    *,
    rounds: int = 3,
    overrides: list[str] | None = None,
    stage: str | None = None,
    notice: Callable[[str], None] = lambda words: None,
) -> list[DistilledRound]:
    """Run all rounds, or resume them. `recipe` has the settings of each round's SFT."""
    if rounds < 1:
        raise EvaluationError(f"--rounds must be at least 1; got {rounds}.")
    if len(blocks.ks) > 1:
        raise EvaluationError(f"Give one --k to distil; got {list(blocks.ks)}.")
    config = load_stage(recipe, "sft", overrides, stage).config
    first = find_task(path, options)
    output_dir, task = Path(output_dir), first
    done: list[DistilledRound] = []
    for number in range(1, rounds + 1):
        data, folder = output_dir / f"round-{number}.jsonl", output_dir / f"round-{number}"
        # Another seed each round: the same prompts, but not the same random numbers.
        task.seed = options.seed + number - 1
        results = decide_blocks(task, blocks, notice)
        # The same rows when resuming; with other settings SFT finds its data changed, and refuses.
        write_responses(results, data)
        point = results[0].point()
        notice(f"round {number} of {rounds}: mean score {point.score.text()} of {data}")
        fresh = DataConfig(
            path=str(data),
            parts={},
            max_prompt_tokens=config.data.max_prompt_tokens,
            too_long=config.data.too_long,
        )
        sft.train(replace(config, model=task.policy.model, data=fresh, output_dir=str(folder)))
        done.append(DistilledRound(point._replace(label=f"round {number}"), folder))
        policy = replace(first.policy, folder=folder, model=str(folder / MODEL))
        # The critic and other settings are still those of the run that was given.
        task = replace(first, policy=policy, fallback=first.fallback or first.policy)
    return done
