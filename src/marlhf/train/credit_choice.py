"""`credit: auto`: PPO measures several ways to assign credit, and uses the best.

Every batch gives a gradient for every candidate: token scores from the pass that trains the policy
(models/scores.py), weighted by the candidate's advantages. From a window of the last batches
`gradient_agreement` estimates the cosine of each candidate's gradient with the true one, whose
estimator is token GAE with lambda 1: unbiased whatever the critic says. The candidate in use is
replaced when another's cosine is larger by more than the error of their difference.

Axes: E candidates, B rows, T response tokens, M batches of the window, D numbers of a sketch.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from marlhf.config.build import build_segmenter
from marlhf.config.candidates import CANDIDATES, Candidate, parse_candidates
from marlhf.config.settings import to_raw
from marlhf.core import Agreement, NGram, gradient_agreement, jackknife_error
from marlhf.models.scores import SIZE, TokenScores
from marlhf.runtime.progress import say
from marlhf.train.experience import Credit, MicroBatch
from marlhf.train.ppo_config import PPOConfig

WINDOW = 12
"""Batches that the choice looks back on. Weights move little in so many steps."""
FIRST = 6
"""Batches before the first choice."""
ERRORS = 2.0
"""Standard errors by which a candidate must be ahead. With eleven candidates and a choice at every
step, one would too often switch on noise."""


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
        rule = build_segmenter({"type": candidate.rule, **candidate.settings}, candidate.name)
        changed = {"sigma": candidate.sigma, "lam": candidate.lam, "credit": candidate.credit}
        changed |= {"pooling": "sum", "rho": 1.0, "ratio": "token", "value_level": "token"}
        option = Option(candidate.name, replace(plain, segmenter=rule, **changed))
        if option.name != options[0].name and option.config != plain:
            options.append(option)
    return options


def name_of(config: PPOConfig) -> str:
    """A config's own way to assign credit, named as candidates are."""
    raw = dict(to_raw(config.segmenter))
    rule = str(raw.pop("type"))
    defaults = {"max_length": None}
    settings = {k: v for k, v in raw.items() if defaults.get(k, ...) != v}
    return Candidate(rule, settings, config.lam, config.sigma, config.credit).name


def unbiased(config: PPOConfig) -> PPOConfig:
    """Token GAE with lambda 1: its expected gradient is the true one, whatever the critic says."""
    changes: dict[str, Any] = {"lam": 1.0, "sigma": "start", "credit": "macro", "pooling": "sum"}
    return replace(config, segmenter=NGram(1), rho=1.0, **changes)


@dataclass
class Measurement:
    """The gradients of one batch by every option, as its micro-batches come."""

    advantages: Tensor  # [E + 1, B, T], whitened as in training; the unbiased ones last
    sums: Tensor  # [E + 1, D]
    size: int | None = SIZE
    watching: TokenScores = field(default_factory=TokenScores)

    @classmethod
    def of(cls, advantages: Tensor, size: int = SIZE) -> Measurement:
        sums = torch.zeros(len(advantages), size * size, device=advantages.device)
        return cls(advantages, sums, size)

    def watch(self) -> TokenScores:
        """For the next micro-batch's pass."""
        self.watching = TokenScores(self.size)
        return self.watching

    def add(self, micro: MicroBatch) -> None:
        """After that micro-batch's backward pass."""
        if not sum(micro.sequences.lengths) or not micro.weight:
            return
        mask = micro.sequences.mask
        ours = self.advantages[:, micro.index, : mask.shape[1]]
        self.sums += self.watching.gradients(ours[:, mask])


class CreditChooser:
    """Which candidate is in use, and the measurements that it was chosen by."""

    def __init__(self, config: PPOConfig) -> None:
        candidates = parse_candidates(config.credit_candidates or CANDIDATES)
        self.options = options_of(config, candidates)
        self.reference = unbiased(self.options[0].config)
        self.choice = 0
        self.window: deque[Tensor] = deque(maxlen=WINDOW)  # [E + 1, D] each

    @property
    def config(self) -> PPOConfig:
        """The settings that training uses now."""
        return self.options[self.choice].config

    @property
    def configs(self) -> list[PPOConfig]:
        """All that are measured: the options, and the unbiased one last."""
        return [*(option.config for option in self.options), self.reference]

    def update(self, step: int, measured: Tensor) -> dict[str, float]:
        """Take in a batch, [E + 1, D], and choose for the next. Returns metrics."""
        used = self.choice
        self.window.append(measured.double().cpu())
        metrics: dict[str, float] = {"credit/choice": float(used)}
        if len(self.window) < FIRST:
            return metrics
        gradients = torch.stack(list(self.window), dim=1)  # [E + 1, M, D]
        agreement = gradient_agreement(gradients[:-1], gradients[-1])
        self.choice = better(agreement, used)
        cosines, errors = agreement.cosine.tolist(), agreement.error.tolist()
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
        window = torch.stack(list(self.window)) if self.window else torch.zeros(0)
        return {
            "names": [option.name for option in self.options],
            "choice": self.choice,
            "shape": list(window.shape),
            "window": base64.b64encode(window.float().numpy().tobytes()).decode(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.choice = int(state["choice"])
        data = bytearray(base64.b64decode(state["window"]))
        if data:
            saved = torch.frombuffer(data, dtype=torch.float32).view(state["shape"])
            self.window.extend(saved.double())


def better(agreement: Agreement, used: int, errors: float = ERRORS) -> int:
    """The candidate with the largest cosine, if it is ahead by more than noise; else `used`."""
    cosine = agreement.cosine.nan_to_num(nan=-1.0)
    best = int(cosine.argmax())
    if best == used or not bool(agreement.cosine[used].isfinite()):
        return used
    gain = agreement.cosine[best] - agreement.cosine[used]
    error = jackknife_error(agreement.replicates[best] - agreement.replicates[used])
    return best if bool(gain > errors * error) else used


def reach(credit: Credit, lam: float) -> Tensor:
    """Over how many tokens credit is passed back on average, at most a whole response."""
    mask = credit.segments.mask
    length = mask.sum() / len(mask)
    macro_length = mask.sum() / credit.segments.macro_mask.sum().clamp(min=1)
    return length if lam == 1 else torch.minimum(length, macro_length / (1 - lam))
