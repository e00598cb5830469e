"""Responses of the starting policy with the rewards of their tokens, kept on disk for the critic;
and updates of the critic that regress on the return of every state.

The returns are those of lambda 1: rewards that really came, with no value of a critic in them. They
stay right targets when the critic changes, and nearly right ones while the policy changes slowly.

They lie in `critic_samples/` beside the run, in a folder that is named after all that decides them.
Runs that differ only in how they learn, as those of a sweep do, share them. One process samples at
a time; another that wants the same ones waits for it, and samples itself if it is killed.

Axes: N stored rows, B rows of a file or an update, T response tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from marlhf.core import Segments, ppo_value_loss, segment
from marlhf.fields import settings_with
from marlhf.models.sequences import Sequences, send
from marlhf.reward import RewardFunction
from marlhf.runs.atomic import FolderInUse, explain_disk_errors, lock_folder, write_bytes
from marlhf.runs.layout import digest_of
from marlhf.runtime.optim import Update, apply_updates, check_finite
from marlhf.runtime.progress import say, warn
from marlhf.spans.apply import explain_segmenter_errors
from marlhf.train.experience import Experience, all_entropy, all_values, count_terms, micro_batches
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import RLRun
from marlhf.train.sampling import sample_examples

SAMPLES = "critic_samples"
CHUNK = 512
"""Responses of a file: what a killed run may have to sample again."""
FINITE = ("logprobs", "ref_logprobs", "rewards")
WAIT = 1.0
"""Seconds between two looks at what another process has sampled."""
LEARNING = {
    *("segmenter", "split_last", "sigma", "pooling", "value_level", "rho", "lam", "lam_alpha"),
    *("positive_lm_coef", "positive_score", "lam_value", "gamma", "credit", "credit_candidates"),
    *("whiten", "ratio", "clip", "dual_clip", "value_clip", "importance_cap", "batch_size"),
    *("num_mini_batches", "num_ppo_epochs", "num_epochs", "num_steps", "learning_rate"),
    *("schedule", "warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "kl_target"),
    *("kl_horizon", "critic_model", "critic_learning_rate", "critic_warmup_steps"),
    *("critic_pretraining", "critic_replay", "critic_updates", "eval_every", "gold_model"),
    "gradient_checkpointing",
}
"""Settings that decide what is learnt from samples, and none of the starting policy's samples."""

Shape = Callable[..., tuple[Tensor, Segments]]
"""`shape_and_segment`, and below `lambda_one_returns`, of ppo.py, which imports this file."""
Returns = Callable[[Tensor, Segments, PPOConfig], Tensor]


class CriticSamples:
    """The files of a run's samples, those that are there and those yet to be made."""

    def __init__(self, rl: RLRun, config: PPOConfig, shape: Shape, returns_of: Returns) -> None:
        assert config.critic_pretraining is not None
        self.rl, self.config, self.shape, self.returns_of = rl, config, shape, returns_of
        self.count = config.critic_pretraining.responses
        key = rl.models.world.broadcast(samples_key(rl, config))
        self.folder = rl.run.path.absolute().parent / SAMPLES / key
        generator = torch.Generator().manual_seed(config.seed + 2)
        order = torch.randperm(len(rl.examples), generator=generator).tolist()
        self.index = [order[i % len(order)] for i in range(self.count)]
        """The prompt of each response: all prompts in turn."""
        self.seeds = torch.randint(2**62, (self.count,), generator=generator).tolist()

    @property
    def held_out(self) -> list[int]:
        """The responses to every tenth prompt."""
        return [i for i in range(self.count) if i % len(self.rl.examples) % 10 == 0]

    @property
    def files(self) -> list[Path]:
        return [self.folder / f"{n:05d}.safetensors" for n in range(-(-self.count // CHUNK))]

    def rows_of(self, number: int) -> range:
        """The responses of a file."""
        return range(number * CHUNK, min(self.count, (number + 1) * CHUNK))

    def load(self) -> ValueTargets:
        """All samples as targets of the critic, sampling first those that are missing."""
        self.sample()
        parts = [self._targets(n, load_file(file)) for n, file in enumerate(self.files)]
        return ValueTargets.join(parts)

    def sample(self) -> None:
        """Sample what is missing, and wait for what another process is sampling."""
        world, announced = self.rl.models.world, False
        with world.raise_on_all_ranks():
            if world.main:
                self._prepare()
        while missing := world.broadcast(self._missing()):
            with self._lock() as is_ours:
                if world.broadcast(is_ours):
                    self._sample(world.broadcast(self._missing()))
                    continue
            if not announced:
                announced = True
                say(f"another run samples what the critic learns from, in {self.folder}; waiting")
            self.rl.loop.check(f"while another run sampled {len(missing)} files of {self.folder}")
            time.sleep(WAIT)

    def _prepare(self) -> None:
        """Make the folder, and remove what is damaged: a kill leaves no half file, disks may."""
        with explain_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in filter(Path.is_file, self.files):
                try:
                    load_file(file)
                except SafetensorError as error:
                    warn(f"{file} is damaged ({error}); its responses are sampled again.")
                    file.unlink()

    def _missing(self) -> list[int]:
        return [number for number, file in enumerate(self.files) if not file.is_file()]

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Whether this process, on rank 0, is the one to sample now."""
        descriptor: int | None = None
        if self.rl.models.world.main:
            try:
                descriptor = lock_folder(self.folder)
            except FolderInUse:
                yield False
                return
        try:
            yield True
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _sample(self, missing: Sequence[int]) -> None:
        there = sum(len(self.rows_of(n)) for n in range(len(self.files)) if n not in missing)
        before = f", {there} of which are there already" if there else ""
        say(f"critic: {self.count} responses of the starting policy to learn from{before}")
        with self.rl.loop.other_steps("critic samples", self.count, there) as bar:
            for number in missing:
                numbers = self._make(number)
                there += len(self.rows_of(number))
                bar.advance(there, numbers)
                self.rl.loop.check(f"with {there} of {self.count} critic samples on disk")

    @torch.no_grad()
    def _make(self, number: int) -> dict[str, float]:
        """Sample and score the responses of a file, and write it."""
        rl, rows = self.rl, self.rows_of(number)
        examples = [rl.examples[self.index[i]] for i in rows]
        seeds = [self.seeds[i] for i in rows]
        examples, rollout = sample_examples(examples, rl.models, seeds, 1)
        experience = rl.score(examples, rollout)
        rewards, _ = self.shape(experience, rl.models, self.config, rl.kl.coef, _generator())
        sequences = experience.sequences
        tensors = {
            "ids": sequences.ids.int(),
            "prompt_lengths": torch.tensor(sequences.prompt_lengths, dtype=torch.int32),
            "lengths": torch.tensor(sequences.lengths, dtype=torch.int32),
            "mask": experience.mask,
            "logprobs": experience.logprobs,
            "ref_logprobs": experience.ref_logprobs,
            "rewards": rewards,
        }
        check_finite(
            [(f"the {name} of responses for the critic", tensors[name]) for name in FINITE]
        )
        with rl.models.world.raise_on_all_ranks():
            if rl.models.world.main:
                data = save({name: x.cpu().contiguous() for name, x in tensors.items()})
                write_bytes(self.files[number], data)
        return {"return": float(rewards.sum(dim=1).mean())}

    @torch.no_grad()
    def _targets(self, number: int, part: Mapping[str, Tensor]) -> ValueTargets:
        """What the critic learns from a file, by this run's own macro actions."""
        models = self.rl.models
        device, pad = models.world.device, models.tokenizer.pad_token_id
        prompts, responses = list[list[int]](), list[list[int]]()
        ends = zip(part["prompt_lengths"].tolist(), part["lengths"].tolist())
        for row, (first, count) in zip(part["ids"].tolist(), ends):
            prompts.append(row[:first])
            responses.append(row[first : first + count])
        sequences = Sequences.from_lists(prompts, responses, pad, device, sampled=part["mask"])
        on_device = {name: send(x, device) for name, x in part.items()}
        nothing = torch.zeros(len(prompts), device=device)
        spans = send(models.parsing.begin(responses)(), device) if models.parsing else None
        experience = Experience(
            sequences,
            nothing,
            nothing,
            nothing.bool(),
            on_device["logprobs"],
            on_device["ref_logprobs"],
            None,
            spans,
            entropy=all_entropy(sequences, models) if self.rl.score.reads_entropy else None,
            values=all_values(sequences, models) if self.rl.score.reads_values else None,
        )
        with explain_segmenter_errors(self.config.segmenter):
            segments = segment(
                self.config.segmenter,
                experience.responses(models.vocabulary, _generator(number)),
                split_last=self.config.split_last,
            )
        returns = self.returns_of(on_device["rewards"], segments, self.config)
        return ValueTargets.of(prompts, experience, segments, returns)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples_key(rl: RLRun, config: PPOConfig) -> str:
    """Changes with everything that decides the samples and their rewards."""
    left_out = LEARNING.union(settings_with(type(config), "may_change"))
    flat = rl.run.flat
    settings = {k: v for k, v in sorted(flat.items()) if k.split(".")[0] not in left_out}
    inputs = {k: v for k, v in sorted(rl.run.state["inputs"].items()) if k != "critic_model"}
    count = config.critic_pretraining and config.critic_pretraining.responses
    # A scale of scores that this run measured, where `normalize_scores` has it.
    what: list[Any] = [settings, inputs, count, CHUNK, rl.score.mean, rl.score.std]
    scorers = [scorer for _, scorer, _ in rl.models.reward.parts]
    functions = [scorer.function for scorer in scorers if isinstance(scorer, RewardFunction)]
    what.append([_source(function) for function in functions])
    unnamed = sum(":" in name for name in config.reward_funcs) < len(functions)
    if unnamed or config.environment:  # code that no digest here would see change: not shared
        what.append(str(rl.run.path.absolute()))
    return digest_of(what, 16)


def _source(function: Any) -> str:
    """A digest of the file that a reward function is written in."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()
    except (OSError, TypeError):
        return repr(type(function))


@dataclass(frozen=True)
class ValueTargets:
    """Rows to regress on, on the host."""

    prompts: list[list[int]]
    responses: list[list[int]]
    mask: Tensor  # [N, T] bool, True on tokens that were sampled
    ids: Tensor  # [N, T] int32, the macro action of each token
    returns: Tensor  # [N, T], of lambda 1

    @classmethod
    def of(
        cls,
        prompts: list[list[int]],
        experience: Experience,
        segments: Segments,
        returns: Tensor,  # [B, T]
    ) -> ValueTargets:
        """Those of a batch."""
        host = [x.cpu() for x in (segments.mask, segments.ids.int(), returns.float())]
        return cls(prompts, experience.response_tokens(), *host)

    @classmethod
    def join(cls, parts: Sequence[ValueTargets]) -> ValueTargets:
        """All rows of several."""
        width = max(part.mask.shape[1] for part in parts)

        def padded(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, width - x.shape[1]))

        return cls(
            list(chain.from_iterable(part.prompts for part in parts)),
            list(chain.from_iterable(part.responses for part in parts)),
            torch.cat([padded(part.mask) for part in parts]),
            torch.cat([padded(part.ids) for part in parts]),
            torch.cat([padded(part.returns) for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: Sequence[int], models: Models) -> tuple[Sequences, Segments, Tensor]:
        """Some rows on the device, without the padding that only the others needed."""
        prompts, responses = [self.prompts[i] for i in index], [self.responses[i] for i in index]
        where, width = torch.tensor(index), max(map(len, responses))
        mask, ids, returns = (x[where, :width] for x in (self.mask, self.ids, self.returns))
        pad, device = models.tokenizer.pad_token_id, models.world.device
        sequences = Sequences.from_lists(prompts, responses, pad, device, sampled=mask)
        segments = Segments(send(ids.long(), device), sequences.mask)
        return sequences, segments, send(returns.contiguous(), device)


def regress(
    targets: ValueTargets,
    index: Sequence[int],
    models: Models,
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    config: PPOConfig,
) -> float:
    """One update of the critic towards the returns of some rows, by squared error: the loss."""
    sequences, segments, returns = targets.rows(index, models)
    counts = count_terms(segments)

    def backward() -> Tensor:
        total = torch.zeros((), device=returns.device)
        for micro in micro_batches(sequences, models.pass_tokens, models.world):
            values, own = models.values(micro.sequences), micro.segments(segments)
            loss = ppo_value_loss(
                values,
                values.detach(),
                micro.take(returns),
                own.mask,
                clip=None,
                level=config.value_level,
                sigma=config.sigma,
                segments=own,
                num_tokens=counts[config.value_level],
            )
            (loss * micro.weight).backward()
            total += loss.detach() * micro.weight
        return total

    loss = models.world.sum(models.fit_memory(backward, models.critic))
    finite = [("the returns", returns), ("the critic's loss", loss)]
    update = Update(models.critic, optimizer, learning_rate)
    apply_updates([update], config.max_grad_norm, models.world, finite)
    return float(loss)
