"""What PPO and RLOO set up alike: models, prompts, the loop, and what checkpoints keep of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from marlhf.config.rl import RLConfig
from marlhf.errors import SettingError
from marlhf.rollout.engine import Rollout
from marlhf.runs.layout import CRITIC
from marlhf.runs.write import RunFolder
from marlhf.runtime.checkpoint import generator_state, set_generator_state
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import Loop
from marlhf.runtime.objects import GivenObjects
from marlhf.runtime.optim import make_optimizer
from marlhf.runtime.stage import Example, batch_rows, count_steps, seed_run
from marlhf.train.ahead import SampledAhead
from marlhf.train.experience import Credit, sample_responses
from marlhf.train.held_out import HeldOutEvaluation
from marlhf.train.rl_models import load_models, load_prompts


class RLRun:
    """Models and loop of a run, resumed from its last checkpoint.

    `learning_rates` has the peak rates of what trains: the policy, and a critic where there is one.
    """

    def __init__(
        self,
        config: RLConfig,
        run: RunFolder,
        world: World,
        objects: GivenObjects,
        held_out_credit: Callable[..., Credit],
        learning_rates: Mapping[str, float],
    ) -> None:
        self.config, self.run, self.learning_rates = config, run, learning_rates
        seed_run(config)
        self.models = load_models(config, objects, world, critic="critic" in learning_rates)
        self.examples, held_out = load_prompts(config, self.models, objects)
        if sandbox_layers := self.models.reward.sandbox:
            run.state["sandbox"] = sandbox_layers
        by_role = {"policy": self.models.policy, "critic": self.models.critic}
        self.trained = {role: by_role[role] for role in learning_rates}
        self.optimizers = {
            role: make_optimizer(model, learning_rates[role], config.weight_decay)
            for role, model in self.trained.items()
        }
        self.num_steps = count_steps(config, len(self.examples))
        self.loop = Loop(
            run,
            config,
            world,
            self.num_steps,
            models=self.trained,
            optimizers=self.optimizers,
            tokenizer=self.models.tokenizer,
            objects=objects,
            rows=(len(self.examples), len(held_out)),
            metric="score",
        )
        self.evaluation = HeldOutEvaluation(
            config, self.models, held_out, self.loop, held_out_credit
        )
        self.sampler = torch.Generator().manual_seed(config.seed)  # a seed for each response
        self.shuffler = torch.Generator().manual_seed(config.seed + 1)  # mini-batches, segments
        self.kl = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        self.saved = self.loop.resume("sampler", "shuffler", "kl_coef", "probe") or {}
        """The checkpoint's state, for what only one method has."""
        self.ahead: SampledAhead | None = None
        if engine := self.models.ahead:
            self.ahead = SampledAhead(engine, config.sampling, world.device)
            self.loop.at_end(engine.close)
        if saved := self.saved:
            set_generator_state(self.sampler, saved["sampler"])
            set_generator_state(self.shuffler, saved["shuffler"])
            self.kl.coef = saved["kl_coef"]
            self.evaluation.load_state(saved["probe"])  # so named by version 0.1
            if self.ahead:
                self.ahead.load_state(saved["in_flight"])

    def prompts(self, step: int) -> list[Example]:
        rows = batch_rows(step - 1, self.config, len(self.examples))
        return [self.examples[i] for i in rows]

    def batch(self, step: int) -> list[Example]:
        """The prompts of a step, each as often as it has responses."""
        return [e for e in self.prompts(step) for _ in range(self.config.responses_per_prompt)]

    def sample(self, step: int) -> tuple[list[Example], Rollout]:
        """The rows of a step's batch, and a response to each."""
        batch = self.batch(step)
        if self.ahead is None:
            prompts, seeds = [e.prompt for e in batch], self.response_seeds(len(batch))
            return batch, sample_responses(prompts, self.models, self.config.sampling, seeds)
        if self.ahead.in_flight is None:
            self._begin(step, now=step)  # the first step: nothing was sampled ahead yet
        rollout = self.ahead.take(step)
        if step < self.num_steps:
            self._begin(step + 1, now=step)
        return batch, rollout

    @property
    def age(self) -> int:
        """How many steps old the weights are that sampled the last batch."""
        return self.ahead.age if self.ahead else 0

    def _begin(self, step: int, *, now: int) -> None:
        assert self.ahead is not None
        prompts = [e.prompt for e in self.batch(step)]
        self.ahead.begin(step, prompts, self.response_seeds(len(prompts)), now=now)

    def response_seeds(self, count: int) -> list[int]:
        return torch.randint(2**62, (count,), generator=self.sampler).tolist()

    def rates(self, step: int) -> dict[str, float]:
        """The learning rates of a step."""
        return {
            role: self.config.rate(step, self.num_steps, peak)
            for role, peak in self.learning_rates.items()
        }

    def save(self, **more: Any) -> None:
        self.loop.save(
            **more,
            sampler=generator_state(self.sampler),
            shuffler=generator_state(self.shuffler),
            kl_coef=self.kl.coef,
            probe=self.evaluation.state(),
            in_flight=self.ahead.state() if self.ahead else None,
        )

    def close(self) -> Path:
        """Save what was trained, and end the run: the folder of the policy."""
        if "critic" in self.trained:
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
        if target is not None and (target <= 0 or horizon < 1):
            raise SettingError(
                f"kl_target and kl_horizon must be positive; got {target}, {horizon}."
            )
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, responses: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * responses / self.horizon
