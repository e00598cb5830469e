"""`credit: auto`: PPO measures several ways to assign credit, and uses the best.

Every batch gives a gradient for every candidate: token scores from the pass that trains the policy
(models/logprobs.py), weighted by the candidate's advantages. From a window of the last batches
`gradient_agreement` estimates the cosine of each candidate's gradient with the true one, whose
estimator is token GAE with lambda 1: unbiased whatever the critic says. The candidate in use is
replaced when another's cosine is larger by more than the error of their difference.

Where the critic has long explained nothing of the returns, only candidates with a long reach are
chosen: a short one puts the critic's values in the place of returns.

Axes: E candidates, B rows, T response tokens, M batches of the window, D numbers of a sketch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from marlhf.config.candidates import Candidate
from marlhf.config.settings import to_raw
from marlhf.core import NGram, Segments, segment
from marlhf.models.logprobs import BLOCK, BLOCKS, TokenScores
from marlhf.runtime.checkpoint import decode, encode
from marlhf.runtime.distributed import World
from marlhf.runtime.progress import say
from marlhf.train.agreement import Agreement, gradient_agreement
from marlhf.train.critic_quality import LONG_REACH, THIRDS, WATCHED, knows_nothing
from marlhf.train.experience import Credit, Experience, MicroBatch
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rl_run import RLRun

WINDOW = 12
"""Batches that the choice looks back on. Weights move little in so many steps."""
FIRST = 6
"""Batches before the first choice."""
PERIOD = 48
"""Steps that a block of projections lasts."""
ERRORS = 2.0
"""Standard errors by which a candidate must be ahead. With eleven candidates and a choice at every
step, one would too often switch on noise."""

AssignCredit = Callable[[Tensor, Tensor, Segments, PPOConfig], Credit]
"""`assign_credit` of ppo.py, which imports this file."""


@dataclass(frozen=True)
class Option:
    """A candidate, and the config that trains by it."""

    name: str
    config: PPOConfig


def options_of(config: PPOConfig, candidates: list[Candidate]) -> list[Option]:
    """What can be chosen: the config as it is, and each candidate's change of it."""
    plain = config
    if config.credit == "auto":
        plain = replace(config, credit="macro", credit_candidates=())
    options = [Option(name_of(plain), plain)]
    for candidate in candidates:
        changed = {"sigma": candidate.sigma, "lam": candidate.lam, "credit": candidate.credit}
        changed |= {"pooling": "sum", "rho": 1.0, "ratio": "token", "value_level": "token"}
        option = Option(candidate.name, replace(plain, segmenter=candidate.segmenter(), **changed))
        if option.name != options[0].name and option.config != plain:
            options.append(option)
    return options


def name_of(config: PPOConfig) -> str:
    """A config's own way to assign credit, named as candidates are."""
    raw = dict(to_raw(config.segmenter))
    rule = str(raw.pop("type"))
    settings = {k: v for k, v in raw.items() if (k, v) != ("max_length", None)}
    if rule == "learned":  # eight weights are no name
        settings = {}
    return Candidate(rule, settings, config.lam, config.sigma, config.credit).name


def unbiased(config: PPOConfig) -> PPOConfig:
    """Token GAE with lambda 1: its expected gradient is the true one, whatever the critic says."""
    changes: dict[str, Any] = {"lam": 1.0, "sigma": "start", "credit": "macro", "pooling": "sum"}
    return replace(config, segmenter=NGram(1), rho=1.0, **changes)


def sketch_seeds(step: int) -> list[int]:
    """The seed of each block of projections at a step.

    Gradients of different batches are compared by projections that they share. Blocks are drawn
    anew one after the other, so that most have one seed in any window, and none lasts for long.
    """
    return [(step + block * PERIOD // BLOCKS) // PERIOD for block in range(BLOCKS)]


@dataclass
class Measurement:
    """The gradients of one batch by every option, as its micro-batches come."""

    advantages: Tensor  # [E + 1, B, T], whitened as in training; the unbiased ones last
    seeds: Sequence[int] | None  # of the sketch; None for whole gradients
    sums: Tensor | float = 0.0  # [E + 1, D]

    def begin(self) -> Part:
        """For the passes over some rows, which count once all of them are done."""
        return Part(self)

    def over_ranks(self, world: World) -> Tensor:
        sums = self.sums
        if not isinstance(sums, Tensor):  # this rank had no rows
            sums = torch.zeros(len(self.advantages), BLOCKS * BLOCK, device=self.advantages.device)
        return world.sum(sums)


@dataclass
class Part:
    """What some rows add to a measurement. Dropped where their passes run out of memory."""

    whole: Measurement
    sums: Tensor | float = 0.0

    def watch(self) -> TokenScores:
        """For the next micro-batch's pass."""
        self.watching = TokenScores(self.whole.seeds)
        return self.watching

    def add(self, micro: MicroBatch) -> None:
        """Before that micro-batch's backward pass."""
        if not sum(micro.sequences.lengths) or not micro.weight:
            return
        present = micro.sequences.present  # advantages are 0 where nothing was sampled
        ours = self.whole.advantages[:, micro.index, : present.shape[1]]
        self.sums = self.sums + self.watching.gradients(ours[:, present])

    def end(self) -> None:
        self.whole.sums = self.whole.sums + self.sums


class CreditChooser:
    """Which candidate is in use, and the measurements that it was chosen by.

    Without `credit: auto` the config is the only option, and nothing is measured.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.auto = config.credit == "auto"
        self.options = options_of(config, config.candidates) if self.auto else [Option("", config)]
        self.choice = 0
        self.window: deque[tuple[Sequence[int], Tensor]] = deque(maxlen=WINDOW)
        """Of each batch the seeds of its sketch, and [E + 1, D]."""
        self.explained: deque[float] = deque(maxlen=WATCHED)
        """Of each step the explained variance of the third that the critic knows best."""
        self.checkpointed = {"credit": self} if self.auto else {}

    @property
    def config(self) -> PPOConfig:
        """The settings that training uses now."""
        return self.options[self.choice].config

    @property
    def configs(self) -> list[PPOConfig]:
        """All that are measured: the options, and the unbiased one last."""
        own = self.options[0].config
        return [*(option.config for option in self.options), unbiased(own)]

    def measure(
        self, step: int, experience: Experience, credit: Credit, rl: RLRun, assign: AssignCredit
    ) -> Measurement | None:
        """To be taken in the passes of the next update: a batch's advantages by each config."""
        if not self.auto:
            return None
        return Measurement(
            by_each(experience, credit, rl.models, rl.shuffler, self.configs, assign),
            sketch_seeds(step),
        )

    def update(
        self,
        step: int,
        experience: Experience,
        credit: Credit,
        measurement: Measurement | None,
        models: Models,
    ) -> dict[str, float]:
        """Take in a batch, and choose for the next. Returns metrics."""
        if not self.auto:
            return {}
        config = self.config
        metrics = {"credit/reach": float(credit.reach(config.lam, config.lam_alpha))}
        if measurement is not None:
            allowed = None
            if knows_nothing(self.explained):
                reaches = reach_of_each(experience, models, self.configs[:-1])
                allowed = [reach >= LONG_REACH for reach in reaches]
            sums = measurement.over_ranks(models.world)
            metrics |= self.choose(step, sums, measurement.seeds, allowed)
        return metrics

    def note(self, metrics: Mapping[str, float]) -> None:
        """Remember how much the critic explained in a step."""
        if self.auto:
            self.explained.append(max(metrics[name] for name in THIRDS))

    def choose(
        self,
        step: int,
        measured: Tensor,
        seeds: Sequence[int] | None = None,
        allowed: Sequence[bool] | None = None,
    ) -> dict[str, float]:
        """Take in the gradients of a batch, [E + 1, D], and choose for the next among `allowed`."""
        used = self.choice
        self.window.append((seeds or [0], measured.double().cpu()))
        metrics: dict[str, float] = {"credit/choice": float(used)}
        if len(self.window) < FIRST:
            return metrics
        all_seeds = [seeds for seeds, _ in self.window]
        shared = [len(set(of_block)) == 1 for of_block in zip(*all_seeds)]
        gradients = torch.stack([x for _, x in self.window], dim=1)  # [E + 1, M, D]
        gradients = gradients.unflatten(2, (len(shared), -1))[:, :, shared].flatten(2)
        agreement = gradient_agreement(gradients[:-1], gradients[-1], blocks=sum(shared))
        self.choice = better(agreement, used, allowed=allowed)
        cosines, errors = agreement.known_cosines().tolist(), agreement.error.tolist()
        for option, cosine in zip(self.options, cosines):
            if cosine == cosine:
                metrics[f"credit/cosine/{option.name.replace(' ', '_')}"] = cosine
        if cosines[used] == cosines[used]:
            metrics |= {"credit/cosine": cosines[used], "credit/error": errors[used]}
        if self.choice != used:
            old, new = self.options[used].name, self.options[self.choice].name
            say(
                f"step {step}: credit by {new} instead of {old}: its gradient agrees with the true "
                f"one by {cosines[self.choice]:.2f} instead of {cosines[used]:.2f}"
            )
        return metrics

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        window = torch.stack([x for _, x in self.window]) if self.window else torch.zeros(0)
        return {
            "names": [option.name for option in self.options],
            "choice": self.choice,
            "seeds": [list(seeds) for seeds, _ in self.window],
            "window": encode(window.float()),
            "explained": list(self.explained),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.choice = int(state["choice"])
        saved = decode(state["window"])
        self.window.extend(zip(state["seeds"], saved.double()))
        self.explained.extend(state.get("explained", []))  # not in checkpoints of earlier versions


@torch.no_grad()
def by_each(
    experience: Experience,
    credit: Credit,
    models: Models,
    shuffler: torch.Generator,
    configs: Sequence[PPOConfig],
    assign: AssignCredit,
) -> Tensor:
    """A batch's advantages by every way to assign credit that is compared: [E, B, T]."""
    responses = experience.responses(models.vocabulary, shuffler)
    advantages: list[Tensor] = []
    for config in configs:
        segments = segment(config.segmenter, responses, split_last=config.split_last)
        assigned = assign(credit.rewards, credit.values, segments, config)
        advantages.append(assigned.whitened(config.whiten))
    return torch.stack(advantages) / credit.segments.mask.sum().clamp(min=1)


@torch.no_grad()
def reach_of_each(
    experience: Experience, models: Models, configs: Sequence[PPOConfig]
) -> list[float]:
    """The share of a response that credit reaches back over, by every way to assign it."""
    responses = experience.responses(models.vocabulary, torch.Generator().manual_seed(0))
    mask, shares = experience.mask, list[float]()
    for config in configs:
        assert config.lam != "adaptive", "`credit: auto` compares fixed lambdas"
        segments = segment(config.segmenter, responses, split_last=config.split_last)
        tokens = mask.float()
        credit = Credit(tokens, segments, tokens, tokens, tokens)
        shares.append(
            float(credit.reach(config.lam, config.lam_alpha) * len(mask) / mask.sum().clamp(min=1))
        )
    return shares


def better(
    agreement: Agreement,
    used: int,
    errors: float = ERRORS,
    allowed: Sequence[bool] | None = None,
) -> int:
    """The candidate with the largest cosine, if it is ahead by more than noise; else `used`."""
    cosine = agreement.known_cosines()
    if allowed is not None:
        others = torch.tensor([not each and i != used for i, each in enumerate(allowed)])
        cosine = cosine.masked_fill(others.to(cosine.device), float("nan"))
    best = int(cosine.nan_to_num(nan=-1.0).argmax())
    if best == used or not bool(cosine[used].isfinite()):
        return used
    gain = agreement.cosine[best] - agreement.cosine[used]
    error = agreement.difference_error(best, used)
    return best if bool(gain > errors * error) else used
