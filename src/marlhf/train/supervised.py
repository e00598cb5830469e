"""What SFT, reward modelling and DPO share around a step: model, rows, loop and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlhf.config.stage import Precision
from marlhf.data.collate import Micro
from marlhf.models.base import Model, autocast
from marlhf.models.load import check_vocabulary, load_tokenizer
from marlhf.models.sequences import Sequences
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import Loop, OpenRun
from marlhf.runtime.memory import fit_memory
from marlhf.runtime.optim import Update, apply_updates, make_optimizer
from marlhf.runtime.stage import Example, batch_rows, check_positions, count_steps, load_examples


@dataclass(frozen=True)
class Passes:
    """A model, and what its passes over rows need."""

    model: Model
    pad_id: int
    pass_tokens: int
    precision: Precision
    world: World

    def autocast(self) -> torch.autocast:
        return autocast(self.world.device, self.precision)

    def sequences(self, prompts: list[list[int]], responses: list[list[int]]) -> Sequences:
        return Sequences.from_lists(prompts, responses, self.pad_id, self.world.device)

    def pairs(self, rows: list[Example]) -> Iterator[tuple[Micro, Sequences]]:
        """Micro-batches of pairs, all chosen responses and then all rejected ones.

        Half the budget for each, as both are in one pass.
        """
        longest = [len(e.prompt) + e.longest for e in rows]
        for micro in self.world.batches(longest, max(1, self.pass_tokens // 2)) if rows else ():
            chosen = [rows[i] for i in micro.rows]
            prompts = [e.prompt for e in chosen]
            responses = [e.chosen for e in chosen] + [e.rejected for e in chosen]
            yield micro, self.sequences(prompts + prompts, responses)


class SupervisedRun:
    """Model and rows of a stage that learns from given responses; with `begin` its loop."""

    def __init__(
        self, config: Any, opened: OpenRun, load_model: Callable[..., Model], part: str
    ) -> None:
        self.config, self.run, self.world = config, opened.folder, opened.world
        self.objects = opened.objects
        with self.world.raise_on_all_ranks():
            given, remote = self.objects.tokenizer or config.model, config.trust_remote_code
            self.tokenizer = load_tokenizer(given, trust_remote_code=remote, setting="model")
            self.model = load_model(config, self.objects, self.world)
            check_vocabulary(self.model, self.tokenizer, config.model)
            self.examples, self.held_out = load_examples(
                config.data,
                part,
                self.tokenizer,
                self.objects,
                name=Path(config.output_dir).name,
                needs=("chosen", *config.columns),
                max_response_tokens=config.max_response_tokens,
            )
            check_positions(self.model, self.examples + self.held_out)
        self.num_steps = count_steps(config, len(self.examples))

    def place(self, **options: bool) -> Passes:
        """The model on its device, and its optimizer."""
        config, pad_id = self.config, self.tokenizer.pad_token_id
        self.model = self.world.place(
            self.model, config.precision, compiled=config.compile, **options
        )
        self.optimizer = make_optimizer(
            self.model,
            config.learning_rate,
            config.weight_decay,
            config.optimizer,
            config.adam_betas,
        )
        return Passes(self.model, pad_id, config.pass_tokens, config.precision, self.world)

    def begin(self, evaluate: Callable[[], dict[str, float]], metric: str) -> Loop:
        """The loop, resumed from its last checkpoint."""
        self.evaluate = lambda: fit_memory(self.world, evaluate)
        self.loop = Loop(
            self.run,
            self.config,
            self.world,
            self.num_steps,
            models={"model": self.model},
            optimizers={"model": self.optimizer},
            tokenizer=self.tokenizer,
            objects=self.objects,
            rows=(len(self.examples), len(self.held_out)),
            metric=metric,
        )
        self.loop.resume()
        return self.loop

    def steps(self) -> Iterator[int]:
        """The steps that are left, with evaluations and checkpoints where they are due."""
        return self.loop.steps(lambda: self.loop.evaluated(self.evaluate()), self.loop.save)

    def row_numbers(self, step: int) -> list[int]:
        return batch_rows(step - 1, len(self.examples), self.config.batch_size, self.config.seed)

    def update(
        self, step: int, backward: Callable[[], Sequence[Tensor]], names: Sequence[str]
    ) -> tuple[Sequence[Tensor], dict[str, float]]:
        """One update by the gradients of `backward`: its results, and gradient norm and rate.

        The results have names, for the error where one is not finite; then nothing is updated.
        """
        results = fit_memory(self.world, backward, self.model)
        rate = self.config.rate(step, self.num_steps)
        update, limit = Update(self.model, self.optimizer, rate), self.config.max_grad_norm
        [norm] = apply_updates([update], limit, self.world, list(zip(names, results)))
        return results, {"grad_norm": float(norm), "learning_rate": rate}

    def close(self, next_step: str) -> Path:
        final = self.loop.final_metrics(self.evaluate)
        return self.loop.close(self.model, {**final, "steps": self.loop.step}, next_step)
