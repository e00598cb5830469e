"""The ways to assign credit that are compared on a run: rules, presets by name, other values.

Axes: E ways, B rows, T response tokens, S states, K continuations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from marlhf.config.build import build_segmenter
from marlhf.config.candidates import Candidate, Preset, parse_candidates, presets
from marlhf.config.rl import RLConfig
from marlhf.core import Segments, segment
from marlhf.credit.state import CreditError, RunState
from marlhf.runtime.stage import Example
from marlhf.train import rloo
from marlhf.train.credit_choice import options_of
from marlhf.train.experience import Credit, Experience
from marlhf.train.ppo import assign_credit, shape_and_segment
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rl_models import Models
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.state_values import answer_values, check_answers, continuation_returns, states_of

AT_END = "this run's, all reward at the end"
ANSWER = "answer"
"""The run's own rule and lambda, with values from the probability of the right answer."""
_OF_PPO = ("sigma", "pooling", "lam", "lam_alpha", "credit", "rho", "gamma", "split_last")
_OF_PPO += ("continuations",)
_OF_RLOO = ("baseline", "scale_group", "group", "num_samples", "ratio")


@dataclass(frozen=True)
class Way:
    """A way to assign credit, and where its values come from."""

    name: str
    config: PPOConfig | RLOOConfig
    values: str = "critic"
    """A name of `VALUES`."""
    at_end: bool = False
    """Move all reward to the last token: what are process rewards, or those of turns, worth?"""
    settings: str = ""
    """The settings to put into a recipe, where the name does not say them."""

    @property
    def recipe(self) -> str:
        """The settings to put into a recipe."""
        if self.settings:
            return self.settings
        if self.at_end:
            return "a reward at the end alone"
        if self.name == ANSWER:
            return "values: answer, sigma: start"
        return (
            f"preset: {self.name}" if self.name in presets() else Candidate.parse(self.name).recipe
        )


@dataclass(frozen=True)
class Batch:
    """A batch of the run, and its credit by the run's own settings."""

    state: RunState
    examples: Sequence[Example]
    experience: Experience
    credit: Credit
    generator: torch.Generator


def ways_of(config: PPOConfig, names: Sequence[str]) -> list[Way]:
    """The run's own way first, then rules as `Candidate` reads them, and presets."""
    rules = parse_candidates(tuple(name for name in names if name not in (*presets(), ANSWER)))
    ways = [Way(option.name, option.config) for option in options_of(config, rules)]
    own = ways[0].config
    assert isinstance(own, PPOConfig)
    ways += [_of_preset(own, presets()[name]) for name in names if name in presets()]
    if ANSWER in names:
        ways.append(Way(ANSWER, replace(own, sigma="start", credit="macro"), ANSWER))
    return [*ways, Way(AT_END, own, at_end=True)]


def _of_preset(config: PPOConfig, preset: Preset) -> Way:
    """The credit of a published method; what else it sets is not compared."""
    settings = dict(preset.settings)
    rule = build_segmenter(settings.get("segmenter", {"type": "ngram", "n": 5}))
    if preset.kind == "ppo":
        chosen: dict[str, Any] = {name: getattr(PPOConfig, name) for name in _OF_PPO}
        chosen |= {name: settings[name] for name in _OF_PPO if name in settings}
        changed = replace(config, segmenter=rule, ratio="token", value_level="token", **chosen)
        return Way(preset.name, changed, settings.get("values", "critic"))
    if "tree" in settings:
        raise CreditError(
            f"{preset.name} samples trees, whose leaves share tokens: its credit cannot be "
            "measured on the responses of a batch. Leave it out."
        )
    if settings.get("group") == "state" and not config.environment:
        raise CreditError(f"{preset.name} compares turns, and this run has no environment.")
    shared = {each.name: getattr(config, each.name) for each in fields(RLConfig)}
    chosen = {name: settings[name] for name in _OF_RLOO if name in settings}
    return Way(preset.name, RLOOConfig(**shared | chosen | {"segmenter": rule}))


def group_of(ways: Sequence[Way], batch_size: int) -> int:
    """How many responses to a prompt the ways need."""
    sizes = {way.config.num_samples for way in ways if isinstance(way.config, RLOOConfig)}
    group = max(sizes, default=1)
    if any(group % size for size in sizes) or batch_size % group:
        raise CreditError(
            f"Groups of {', '.join(map(str, sorted(sizes)))} responses do not share a batch of "
            f"{batch_size}. Compare one such preset at a time, or raise batch_size."
        )
    return group


def advantages_by_way(batch: Batch, ways: Sequence[Way]) -> tuple[Tensor, list[float]]:
    """Advantages as training has them, [E, B, T], and the share of a response they reach over."""
    state, experience, credit = batch.state, batch.experience, batch.credit
    responses = experience.responses(state.models.vocabulary, batch.generator)
    advantages: list[Tensor] = []
    reaches: list[float] = []
    for way in ways:
        config = way.config
        if isinstance(config, RLOOConfig):
            advantages.append(of_group(experience, state.models, config, state.kl_coef))
            reaches.append(1.0)
            continue
        segments = segment(config.segmenter, responses, split_last=config.split_last)
        values = VALUES[way.values](batch, segments, config)
        rewards = credit.rewards
        if way.at_end:
            late, known = replace(experience, earned=None), torch.Generator().manual_seed(0)
            rewards, _ = shape_and_segment(late, state.models, config, state.kl_coef, known)
        assigned = assign_credit(rewards, values, segments, config)
        advantages.append(assigned.whitened(config.whiten))
        reach = assigned.reach(config.lam, config.lam_alpha)
        reaches.append(float(reach * len(segments.mask) / segments.mask.sum().clamp(min=1)))
    return torch.stack(advantages) / credit.segments.mask.sum().clamp(min=1), reaches


def of_group(experience: Experience, models: Models, config: RLOOConfig, kl_coef: float) -> Tensor:
    """Advantages of RLOO and its kin, weighted as their loss weighs them: [B, T]."""
    shuffler = torch.Generator().manual_seed(0)
    credit = rloo.assign_credit(experience, models, config, kl_coef, shuffler)
    if config.ratio != "macro_mean":
        return credit.advantages
    return credit.advantages / credit.segments.spread(credit.segments.lengths).clamp(min=1)


def returns_from(
    state: RunState,
    examples: Sequence[Example],
    experience: Experience,
    segments: Segments,
    count: int,
    generator: torch.Generator,
    kl_coef: float,
    seeds: Sequence[int] = (),
) -> Tensor:
    """Returns of continuations from each start of a macro action, [S, K], row by row.

    With an environment, `seeds` has that of each row's.
    """
    states = states_of(examples, segments, experience)
    drawn = torch.randint(2**62, (len(states) * count,), generator=generator).tolist()
    starts = [seeds[each.row] for each in states] if seeds else []
    kl = state.config.kl_estimator
    return continuation_returns(states, state.score, count, drawn, kl_coef, kl, starts)


def _monte_carlo(batch: Batch, segments: Segments, config: PPOConfig) -> Tensor:
    if config.environment:
        raise CreditError("Values from continuations cannot be compared with an environment.")
    values = torch.zeros(segments.mask.shape, device=segments.mask.device)
    returns = returns_from(
        batch.state,
        batch.examples,
        batch.experience,
        segments,
        config.continuations,
        batch.generator,
        batch.state.kl_coef,
    )
    values[segments.starts] = returns.mean(dim=1)
    return values


def _answer(batch: Batch, segments: Segments, config: PPOConfig) -> Tensor:
    check_answers([example.row for example in batch.examples], config)
    states = states_of(batch.examples, segments, batch.experience)
    values = torch.zeros_like(batch.credit.rewards)
    found = answer_values(states, batch.experience, batch.state.models, config)
    values[segments.starts] = found.to(values)  # both row by row
    return values


VALUES: dict[str, Callable[[Batch, Segments, PPOConfig], Tensor]] = {
    "critic": lambda batch, segments, config: batch.credit.values,
    "monte_carlo": _monte_carlo,
    ANSWER: _answer,
}
"""Where the value of the state before each token can come from: [B, T]."""
