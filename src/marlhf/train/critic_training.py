"""What a critic is taught beside PPO's own update: before the first step, and by replay.

The first update of a step is PPO's. Those of replay regress on the returns of lambda 1 of rows that
are drawn from the present batch and from `critic_replay` batches before it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlhf.core import Segments, masked_mean
from marlhf.fields import settings_with
from marlhf.runs.layout import RunError, digest_of
from marlhf.runtime.checkpoint import (
    decode,
    encode,
    list_checkpoints,
    load_latest,
    load_weights,
    read_checkpoint_state,
    save_checkpoint,
)
from marlhf.runtime.loop import Clock
from marlhf.runtime.optim import make_optimizer
from marlhf.runtime.progress import say, warn
from marlhf.runtime.stage import Example
from marlhf.train.critic_quality import (
    NOTHING,
    SPREAD,
    THIRDS,
    CriticWatch,
    advice,
    explained_by_thirds,
    explained_or_nothing,
)
from marlhf.train.critic_samples import CriticSamples, Returns, Shape, ValueTargets, regress
from marlhf.train.experience import Credit, Experience, all_values
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_run import Learner, RLRun

FOLDER = "critic_pretraining"
PATIENCE = 3
"""Epochs without a gain after which the critic is taken from the best one."""
EXPLAINED = "explained_variance"
GAIN = 0.005
"""Of explained variance, below which an epoch has gained nothing."""
EVALUATED = 512
"""Held-out responses in a forward pass, padded to the longest."""


class CriticTraining:
    """Pretraining, replay, and how much the critic explains; nothing without a critic.

    `watch` warns where it misleads. A checkpoint keeps the last `critic_replay` batches.

    `shape` and `returns_of` are PPO's own: token rewards with macro actions, and the returns of
    lambda 1 that a critic regresses on.
    """

    def __init__(self, config: PPOConfig, shape: Shape, returns_of: Returns) -> None:
        self.config, self.shape, self.returns_of = config, shape, returns_of
        self.watch = CriticWatch(config)
        self.batches: deque[ValueTargets] = deque(maxlen=config.critic_replay + 1)
        """The present batch last."""
        self.checkpointed = {"critic_replay": self} if config.critic_replay else {}

    def begin(self, step: int, rl: RLRun) -> None:
        """Pretrain before the first step."""
        if step == 1:
            pretrain_critic(rl, self.config, self.shape, self.returns_of)

    def learn(
        self,
        step: int,
        batch: Sequence[Example],
        experience: Experience,
        credit: Credit,
        config: PPOConfig,
        rl: RLRun,
        learning_rates: Mapping[str, float],
    ) -> dict[str, Tensor]:
        """Take in a batch after PPO's update: metrics of what the critic knew, and its replay.

        `config` has the settings that credited this batch, with `credit: auto` a candidate's.
        """
        if not config.has_critic:
            return {}
        returns = self.returns_of(credit.rewards, credit.segments, config)
        metrics = explained_by_thirds(credit.values, returns, credit.segments.mask)
        if not self.config.extra_critic_updates:
            return metrics
        prompts = [e.prompt for e in batch]
        self.batches.append(ValueTargets.of(prompts, experience, credit.segments, returns))
        losses = self.replay(step, len(batch), rl.learner, learning_rates["critic"])
        return metrics | {"rl/replay_loss": torch.tensor(sum(losses) / len(losses))}

    def replay(self, step: int, rows: int, learner: Learner, learning_rate: float) -> list[float]:
        """The losses of the critic's updates that are left in a step, of batches of `rows`."""
        config, pool = self.config, ValueTargets.join(self.batches)
        passes = config.num_ppo_epochs * config.num_mini_batches
        size = math.ceil(rows / config.num_mini_batches)
        losses: list[float] = []
        for update in range(config.extra_critic_updates * passes):
            # By step and update alone, so that a resumed run draws the same rows.
            seed = (config.seed * 1_000_003 + step) * 1_009 + update
            generator = torch.Generator().manual_seed(seed % 2**63)
            drawn = torch.randperm(len(pool), generator=generator)[:size].tolist()
            optimizer = learner.optimizers["critic"]
            losses.append(regress(pool, drawn, learner.models, optimizer, learning_rate, config))
        return losses

    def close(self, rl: RLRun) -> None:
        """Once the trained critic is saved, nothing of the pretraining is needed."""
        if rl.models.world.main:
            shutil.rmtree(rl.run.path / FOLDER, ignore_errors=True)

    def state(self) -> list[Any]:
        """The batches that the next step learns from again."""
        kept = list(self.batches)[-self.config.critic_replay :]
        return [
            {"prompts": x.prompts, "responses": x.responses}
            | {name: encode(getattr(x, name)) for name in ("mask", "ids", "returns")}
            for x in kept
        ]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        for x in state:
            tensors = (decode(x[name]) for name in ("mask", "ids", "returns"))
            self.batches.append(ValueTargets(x["prompts"], x["responses"], *tensors))


def pretrain_critic(rl: RLRun, config: PPOConfig, shape: Shape, returns_of: Returns) -> None:
    """Train the critic if the settings ask for it. Leaves the random numbers of the run alone."""
    if config.critic_pretraining is None:
        return
    device = rl.models.world.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        Pretraining(rl, config, CriticSamples(rl, config, shape, returns_of))()
    rl.clock = Clock(device)  # the first step begins now


class Pretraining:
    """The epochs that are left, resumed from the last one that was complete."""

    def __init__(self, rl: RLRun, config: PPOConfig, samples: CriticSamples) -> None:
        assert config.critic_pretraining is not None
        self.rl, self.config, self.samples = rl, config, samples
        self.settings, self.critic = config.critic_pretraining, rl.models.critic
        self.rate = self.settings.learning_rate or config.critic_learning_rate
        folder = rl.run.path / FOLDER
        self.latest, self.best, self.done = (folder / name for name in ("latest", "best", "done"))
        self.epochs: list[dict[str, float]] = []
        """What each epoch ended with; the first entry is from before the training."""

    def __call__(self) -> None:
        world = self.rl.models.world
        self._start = time.perf_counter()
        with world.raise_on_all_ranks():
            if world.main:
                self._drop_another()
        if self._resume(self.done, {}):
            say(f"critic: pretrained before, in {self.done}")
            return
        targets = self.samples.load()
        held_out = self.samples.held_out
        if len(held_out) == len(targets):
            raise RunError(
                "critic_pretraining holds out every tenth prompt, and there is only one prompt. "
                "Give more data, or leave critic_pretraining out."
            )
        if float(targets.returns[targets.mask].var()) < SPREAD:
            warn(
                f"all {len(targets)} responses of the starting policy have the same return, "
                f"{float(targets.returns[0, 0]):.3g}, so pretraining has nothing to teach the "
                "critic. Look at the rewards, or sample more responses."
            )
            return
        world.reshard([self.critic])  # the optimiser must know the shards, not what is gathered
        config = self.config
        self.optimizer = make_optimizer(
            self.critic, self.rate, config.weight_decay, config.optimizer, config.adam_betas
        )
        if self._resume(self.latest, {"critic": self.optimizer}):
            self._start -= self.epochs[-1]["seconds"]
        else:
            self.epochs = [{"epoch": 0, **self._evaluate(targets, held_out)}]
            self._save(self.best, {})
        reason = self._train(targets, held_out)
        load_weights(list_checkpoints(self.best)[-1], {"critic": self.critic}, world)
        self._save(self.done, {})
        if world.main:
            for other in (self.latest, self.best):
                shutil.rmtree(other, ignore_errors=True)
            self.rl.run.state[FOLDER] = {"responses": len(targets), "epochs": self.epochs}
            self.rl.run.write_state()
        self._report(reason)

    def _train(self, targets: ValueTargets, held_out: list[int]) -> str:
        """Train epoch by epoch; returns why it ends."""
        out = set(held_out)
        trained_on = [i for i in range(len(targets)) if i not in out]
        size = min(self.config.batch_size, len(trained_on))
        updates = len(trained_on) // size  # of an epoch, which leaves out the rest
        done = int(self.epochs[-1]["epoch"])
        total = self.settings.epochs * updates
        with self.rl.loop.other_steps("critic pretraining", total, done * updates) as bar:
            while not (reason := self._why_to_stop()):
                done, losses = done + 1, []
                seed = self.config.seed * 1_000_003 + done
                torch.manual_seed(seed)  # an epoch is the same whether or not it was resumed
                order = torch.randperm(len(trained_on)).tolist()
                for update in range(updates):
                    rows = [trained_on[i] for i in order[update * size : (update + 1) * size]]
                    losses.append(self._update(targets, rows))
                    shown = {"loss": losses[-1], "held-out explained": self.epochs[-1][EXPLAINED]}
                    bar.advance((done - 1) * updates + update + 1, shown)
                loss = sum(losses) / len(losses)
                self.epochs.append(
                    {"epoch": done, "loss": loss, **self._evaluate(targets, held_out)}
                )
                if self._best is self.epochs[-1]:
                    self._save(self.best, {})
                self._save(self.latest, {"critic": self.optimizer})
                self.rl.loop.check(f"with {done} epochs of critic pretraining saved")
        return reason

    @property
    def _best(self) -> dict[str, float]:
        """By the error, not by explained variance, which knows nothing of a wrong mean."""
        return min(self.epochs, key=lambda epoch: epoch["error"])

    def _update(self, targets: ValueTargets, rows: list[int]) -> float:
        return regress(targets, rows, self.rl.models, self.optimizer, self.rate, self.config)

    def _why_to_stop(self) -> str:
        """Why the pretraining is over, or nothing."""
        explained = [epoch[EXPLAINED] for epoch in self.epochs]
        if explained[-1] >= self.settings.until:
            return f"critic_pretraining.until ({self.settings.until:g}) is reached"
        if len(explained) > self.settings.epochs:
            return "that were all epochs (critic_pretraining.epochs)"
        # A critic may know nothing for long before it finds what to look at.
        before = max(explained[:-PATIENCE], default=-1.0)
        if before > NOTHING and max(explained[-PATIENCE:]) < before + GAIN:
            return f"the last {PATIENCE} epochs gained nothing"
        return ""

    def _report(self, reason: str) -> None:
        best = self._best
        thirds = ", ".join(f"{best[name.removeprefix('rl/')]:.2f}" for name in THIRDS)
        say(
            f"critic: after {best['epoch']:.0f} epochs it explains {best[EXPLAINED]:.2f} of the "
            f"returns of held-out prompts ({thirds} in the first, second and last third of a "
            f"response), {self.epochs[0][EXPLAINED]:.2f} before; {reason}"
        )
        if best[EXPLAINED] < NOTHING:
            warn(f"pretraining taught the critic nothing. {advice(self.config)}")

    def _evaluate(self, targets: ValueTargets, held_out: list[int]) -> dict[str, float]:
        """The explained variance on held-out prompts, whole and by thirds."""
        values = torch.zeros(len(held_out), targets.mask.shape[1])
        for begin in range(0, len(held_out), EVALUATED):
            sequences, _, _ = targets.rows(held_out[begin : begin + EVALUATED], self.rl.models)
            part = all_values(sequences, self.rl.models).float().cpu()
            values[begin : begin + EVALUATED, : part.shape[1]] = part
        segments = Segments(targets.ids[held_out].long(), targets.mask[held_out])
        if self.config.value_level != "token":
            values = segments.spread(segments.weighted(values, self.config.sigma))
        mask, returns = segments.mask, targets.returns[held_out]
        thirds = explained_by_thirds(values, returns, mask)
        return {
            "error": float(masked_mean((values - returns).square(), mask)),
            EXPLAINED: float(explained_or_nothing(values, returns, mask)),
            **{name.removeprefix("rl/"): float(x) for name, x in thirds.items()},
            "seconds": time.perf_counter() - self._start,
        }

    def _save(self, folder: Path, optimizers: dict[str, Any]) -> None:
        state = {"verdict": "", "callbacks": {}, "bases": {}, "seconds": 0.0, "key": self._key}
        save_checkpoint(
            folder,
            int(self.epochs[-1]["epoch"]),
            world=self.rl.models.world,
            models={"critic": self.critic},
            optimizers=optimizers,
            state=state | {"epochs": self.epochs},
            keep=1,
        )

    def _resume(self, folder: Path, optimizers: dict[str, Any]) -> bool:
        state, damaged = load_latest(
            folder,
            world=self.rl.models.world,
            models={"critic": self.critic},
            optimizers=optimizers,
            needs=("key", "epochs"),
        )
        for line in damaged:
            warn(line)
        if state is not None:
            self.epochs = state["epochs"]
        return state is not None

    def _drop_another(self) -> None:
        """Remove what was trained with other settings or on other samples."""
        for folder in (self.latest, self.best, self.done):
            for saved in list_checkpoints(folder):
                try:
                    same = read_checkpoint_state(saved).get("key") == self._key
                except (OSError, ValueError):  # damaged: whoever loads it says so
                    continue
                if not same:
                    shutil.rmtree(saved)

    @property
    def _key(self) -> str:
        """Changes with everything that the pretrained critic depends on."""
        run, free = self.rl.run, settings_with(type(self.config), "may_change")
        settings = {k: v for k, v in run.flat.items() if k.split(".")[0] not in free}
        return digest_of([settings, run.state["inputs"], self.samples.folder.name], 16)
