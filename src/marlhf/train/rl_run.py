"""What PPO and RLOO share around a step: models, prompts, sampling, updates, logs, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from marlhf.config.rl import Guards, RLConfig
from marlhf.core import masked_mean
from marlhf.rollout.engine import Rollout
from marlhf.runs.layout import CRITIC, RunError
from marlhf.runtime.checkpoint import generator_state, set_generator_state
from marlhf.runtime.loop import Clock, Loop, OpenRun, to_numbers
from marlhf.runtime.optim import Named, Update, apply_updates, make_optimizer
from marlhf.runtime.progress import warn
from marlhf.runtime.stage import Example, batch_rows, count_steps
from marlhf.train.experience import (
    Credit,
    Experience,
    RolloutScorer,
    batch_metrics,
    staleness_metrics,
)
from marlhf.train.held_out import HeldOutEvaluation
from marlhf.train.rl_models import Models, load_models, load_prompts
from marlhf.train.sampling import RolloutPrefetcher, sample_examples


class HasState(Protocol):
    """What a checkpoint keeps."""

    def state(self) -> Any: ...
    def load_state(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Learner:
    """Policy and critic with their optimizers."""

    models: Models
    optimizers: Mapping[str, torch.optim.Optimizer]
    num_mini_batches: int
    max_grad_norm: float
    shuffler: torch.Generator

    def update(
        self,
        passes: Sequence[Callable[[list[int]], dict[str, Tensor]]],
        experience: Experience,
        credit: Credit,
        learning_rates: Mapping[str, float],
        rows: list[int] | None = None,
        ready: Sequence[str] = (),
    ) -> dict[str, Tensor]:
        """All updates of the models with a learning rate that a batch of responses is used for.

        Each of `passes` goes over the batch once: it leaves the gradients of some rows, and returns
        their metrics. No model moves where the batch holds NaN or infinity. Only some `rows` are
        used, if given. Models that are `ready` have their gradients already, and move first, so
        that those are out of memory before others have theirs.
        """
        models = self.models
        trained = {role: getattr(models, role) for role in learning_rates}
        must_be_finite = [
            ("the scores", experience.scores),
            ("the reference's log-probs", experience.ref_logprobs),
            ("the critic's values", credit.values),
            ("the rewards", credit.rewards),
        ]

        def apply(roles: Sequence[str], finite: Named) -> dict[str, Tensor]:
            moves = [Update(trained[x], self.optimizers[x], learning_rates[x]) for x in roles]
            norms = apply_updates(moves, self.max_grad_norm, models.world, finite)
            return {f"rl/{x}_grad_norm": norm for x, norm in zip(roles, norms)}

        first = apply(ready, must_be_finite) if ready else {}
        others = [x for x in trained if x not in ready]
        updates: list[dict[str, Tensor]] = []
        for backward in passes:
            for part in self.mini_batches(rows or list(range(len(experience.scores)))):
                metrics = models.fit_memory(partial(backward, part), *trained.values())
                norms = apply(others, [*must_be_finite, *metrics.items()]) if others else {}
                updates.append(metrics | first | norms)
        if "policy" in learning_rates:
            models.engine.update_weights(models.policy)
        means = {name: torch.stack([u[name] for u in updates]).mean() for name in updates[0]}
        return means | {"rl/learning_rate": torch.tensor(learning_rates.get("policy", 0.0))}

    def mini_batches(self, rows: list[int]) -> list[list[int]]:
        """The rows of each update of one pass over a batch, shuffled where there are several."""
        if self.num_mini_batches == 1:
            return [rows]
        order = torch.tensor(rows)[torch.randperm(len(rows), generator=self.shuffler)]
        return [part.tolist() for part in order.chunk(self.num_mini_batches)]


class RLRun:
    """Models and loop of a run, resumed from its last checkpoint.

    `learning_rates` has the peak rates of what trains: the policy, and a critic where there is one.
    `checkpointed` has what only this method keeps in checkpoints.
    """

    def __init__(
        self,
        config: RLConfig,
        opened: OpenRun,
        held_out_credit: Callable[..., Credit],
        learning_rates: Mapping[str, float],
        checkpointed: Mapping[str, HasState] | None = None,
    ) -> None:
        run, world, objects = opened.folder, opened.world, opened.objects
        self.run, self.world, self.learning_rates, self.config = run, world, learning_rates, config
        if config.sampling.truncated:
            warn(
                "top_k and top_p draw from part of the distribution while log-probs are of all of "
                "it: the KL penalty and the ratio are then estimates from the wrong samples. The "
                "paper does this; top_k: 0 and top_p: 1 are exact."
            )
        self.models = load_models(config, objects, world, critic="critic" in learning_rates)
        self.examples, held_out = load_prompts(config, self.models, objects)
        self.num_steps = count_steps(config, len(self.examples))
        if sandbox_layers := self.models.reward.sandbox:
            run.state["sandbox"] = sandbox_layers
        trained = {role: getattr(self.models, role) for role in learning_rates}
        how = config.weight_decay, config.optimizer, config.adam_betas
        optimizers = {
            role: make_optimizer(model, learning_rates[role], *how)
            for role, model in trained.items()
        }
        self.loop = Loop(
            run,
            config,
            world,
            self.num_steps,
            models=trained,
            optimizers=optimizers,
            tokenizer=self.models.tokenizer,
            objects=objects,
            rows=(len(self.examples), len(held_out)),
            metric="score",
        )
        self.score = RolloutScorer(self.models, config)
        self.evaluation = HeldOutEvaluation(
            config, self.score, held_out[: config.eval_prompts], self.loop, held_out_credit
        )
        self.sampler = torch.Generator().manual_seed(config.seed)  # a seed for each response
        self.shuffler = torch.Generator().manual_seed(config.seed + 1)  # mini-batches, segments
        self.learner = Learner(
            self.models, optimizers, config.num_mini_batches, config.max_grad_norm, self.shuffler
        )
        self.kl = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        self.clock = Clock(world.device)
        self.watch_sampling = SamplingWatch(config.guards)
        self.watch_scores = ScoreWatch()
        self.checkpointed: dict[str, HasState] = {"probe": self.evaluation, **(checkpointed or {})}
        saved = self.loop.resume("sampler", "shuffler", "kl_coef", "probe")
        self.prefetcher: RolloutPrefetcher | None = None
        if self.models.ahead is not None:
            self.prefetcher = RolloutPrefetcher(self.models.ahead, self.models)
            self.checkpointed["in_flight"] = self.prefetcher
            self.loop.at_end(self.models.ahead.close)
        if saved is not None:
            set_generator_state(self.sampler, saved["sampler"])
            set_generator_state(self.shuffler, saved["shuffler"])
            self.kl.coef = saved["kl_coef"]
            for name, part in self.checkpointed.items():
                part.load_state(saved[name])

    def steps(self) -> Iterator[int]:
        """The steps that are left, with evaluations and checkpoints where they are due."""

        def evaluate() -> str:
            return self.evaluation(self.loop.step, self.kl.coef)

        for step in self.loop.steps(evaluate, self.save):
            self.clock = Clock(self.world.device)
            yield step

    def prompts(self, step: int) -> list[Example]:
        rows = batch_rows(step - 1, len(self.examples), self.config.batch_size, self.config.seed)
        return [self.examples[i] for i in rows]

    def batch(self, step: int) -> list[Example]:
        """The prompts of a step, each as often as it has responses."""
        return [e for e in self.prompts(step) for _ in range(self.config.responses_per_prompt)]

    def sample(self, step: int) -> tuple[list[Example], Rollout]:
        """The rows of a step's batch, and a response to each."""
        batch = self.batch(step)
        if self.prefetcher is None:
            seeds = self.response_seeds(len(batch))
            return sample_examples(batch, self.models, seeds, self.config.responses_per_prompt)
        if self.prefetcher.in_flight is None:
            self._begin(step, now=step)  # the first step: nothing was sampled ahead yet
        rollout = self.prefetcher.take(step)
        if step < self.num_steps:
            self._begin(step + 1, now=step)
        return batch, rollout

    def _begin(self, step: int, *, now: int) -> None:
        assert self.prefetcher is not None
        prompts = [e.prompt for e in self.batch(step)]
        self.prefetcher.begin(step, prompts, self.response_seeds(len(prompts)), now=now)

    def response_seeds(self, count: int) -> list[int]:
        return torch.randint(2**62, (count,), generator=self.sampler).tolist()

    def rates(self, step: int) -> dict[str, float]:
        """The learning rates of a step."""
        return {
            role: self.config.rate(step, self.num_steps, peak)
            for role, peak in self.learning_rates.items()
        }

    def log(
        self,
        experience: Experience,
        credit: Credit,
        metrics: Mapping[str, Tensor],
        more: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Log the metrics of a step that is done, check its log-probs, and adapt `kl_coef`."""
        config, age = self.config, self.prefetcher.age if self.prefetcher else 0
        tensors = dict(metrics) | batch_metrics(experience, credit, self.kl.coef)
        tensors |= staleness_metrics(
            experience, credit.segments, config.ratio, config.importance_cap, age
        )
        rewards = self.models.reward.latest
        if len(rewards) > 1:
            tensors |= {f"rewards/{name}": score for name, score in rewards.items()}
        if (disagreement := self.models.reward.disagreement) is not None:
            tensors["rl/disagreement"] = disagreement
        rows = len(experience.scores)
        numbers = to_numbers(tensors) | self.clock.times(rows) | dict(more or {})
        if age == 0:  # else log-probs of sampling are of older weights
            self.watch_sampling(self.loop.step, experience, numbers["rl/logprob_gap"])
        self.watch_scores(self.loop.step, rows, numbers)
        self.kl.update(numbers["rl/kl"], rows)
        self.loop.log(numbers, show=("rl/score", "rl/kl", "rl/length"))
        return numbers

    def save(self) -> None:
        self.loop.save(
            **({"in_flight": None} | {name: x.state() for name, x in self.checkpointed.items()}),
            sampler=generator_state(self.sampler),
            shuffler=generator_state(self.shuffler),
            kl_coef=self.kl.coef,
        )

    def close(self) -> Path:
        """Save what was trained, and end the run: the folder of the policy."""
        if "critic" in self.learning_rates:
            self.loop.keep_model(self.models.critic, CRITIC)
        root = self.run.path.parent
        next_step = f"marlhf report {root} -o {root / 'report.html'}"
        summary = self.evaluation.latest | {"steps": self.loop.step}
        return self.loop.close(self.models.policy, summary, next_step)


class KLController:
    """Raise the coefficient while the KL is above its target, lower it while below.

    Proportional control with the error held to 20% (Ziegler et al., 2019). Without a target the
    coefficient stays.

    >>> controller = KLController(0.1, target=6.0, horizon=100)
    >>> controller.update(kl=12.0, responses=50)
    >>> round(controller.coef, 4)
    0.11
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10000) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, responses: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * responses / self.horizon


class SamplingWatch:
    """Compares log-probs of sampling with those of training, which are of the same policy.

    Where they differ by more than rounding, the engine or the training pass computes another model
    than the one that is trained, and KL, ratios and advantages are of neither.
    """

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self.warned = False

    def __call__(self, step: int, experience: Experience, gap: float) -> None:
        # Where a step has several updates, the metric also has the policy's movement in it.
        if experience.old_logprobs is not None:
            difference = (experience.old_logprobs - experience.logprobs).abs()
            gap = float(masked_mean(difference, experience.mask))
        problem = (
            f"log-probs while sampling and while training differ by {gap:.2g} nats per token. Both "
            "are of one policy, and rounding explains about 0.05. Try engine: native where it is "
            "vllm, precision: float32, or compile: false."
        )
        limit = self.guards.max_logprob_gap
        if limit is not None and gap > limit:
            raise RunError(
                f"Stopped at step {step}: {problem} To train all the same, raise "
                f"guards.max_logprob_gap, which is {limit:g}."
            )
        if gap > self.guards.warn_logprob_gap and not self.warned:
            self.warned = True
            warn(f"step {step}: {problem}")


class ScoreWatch:
    """Warns once when two steps in a row had nothing to learn from: all scores were alike."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, step: int, rows: int, numbers: Mapping[str, float]) -> None:
        groups = numbers.get("rl/zero_std_groups") == 1
        alike = groups or (rows > 1 and numbers["rl/score_std"] < 1e-6)
        self.steps = self.steps + 1 if alike or self.steps >= 2 else 0
        if self.steps == 2:
            where = "to each prompt " if groups else ""
            warn(
                f"steps {step - 1} and {step}: all responses {where}have the same score, so there "
                "is nothing to learn from. Check the reward, or raise sampling.temperature."
            )
