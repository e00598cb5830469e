"""Which rule's gradient agrees best with the true gradient, from batches of a PPO run.

The measure is that of `credit: auto` (train/credit_choice.py), with more candidates and as many
batches as wanted. Every batch is written down, so a measurement that was interrupted resumes where
it stopped. Beside its order stands the trivial one, longest reach first, which often predicts
nearly as well (docs/results/predict.md).

Axes: E ways to assign credit, M batches, D numbers of a sketch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from marlhf.config.candidates import CANDIDATES, TURN_CANDIDATES
from marlhf.config.settings import to_raw
from marlhf.core import Learned
from marlhf.credit.state import CreditError, RunState, measured_parts, sample_batch, shown
from marlhf.credit.ways import Batch, Way, advantages_by_way, group_of, ways_of
from marlhf.environments import scored_row, turn_rewards
from marlhf.evaluate.results import text_table
from marlhf.models.logprobs import BLOCKS
from marlhf.runs.layout import CREDIT_LINES, digest_of
from marlhf.runtime.checkpoint import decode, encode
from marlhf.runtime.progress import warn
from marlhf.runtime.stage import Example
from marlhf.train.agreement import Agreement, gradient_agreement
from marlhf.train.credit_choice import ERRORS, Measurement, better, unbiased
from marlhf.train.critic_quality import NOTHING, THIRDS, advice, explained_by_thirds
from marlhf.train.experience import Credit, Experience
from marlhf.train.ppo import assign_credit, lambda_one_returns, shape_and_segment
from marlhf.train.ppo_config import PPOConfig

MEASURED = (
    *CANDIDATES,
    "token lam=0.5",
    "ngram n=5 lam=0.95 sigma=equal",
    "ngram n=10 lam=0.95",
    "words lam=0.95",
    "sentences lam=0.95 credit=boundary",
    "perplexity lam=0.77",
)
"""What `marlhf credit` compares unless told otherwise; with an environment, turns as well."""


@dataclass(frozen=True)
class Measured:
    """The agreement of every option with the true gradient; the run's own option is the first."""

    options: list[Way]
    agreement: Agreement
    batches: int
    responses: int
    config: PPOConfig
    explained: list[float]
    """Of the returns by the critic, in the first, second and last third of a response: the median
    over the batches."""
    reaches: list[float]
    """The share of a response that each option's credit reaches back over."""

    @property
    def like_reach(self) -> float:
        """The rank correlation of the cosines with the trivial order, longest reach first."""
        known = self.agreement.known_cosines()
        return rank_correlation(known, torch.tensor(self.reaches).to(known))

    @property
    def best(self) -> int:
        """The option to use: the run's own unless another is ahead by more than noise."""
        return better(self.agreement, 0)

    def rows(self) -> list[dict[str, Any]]:
        """Best first; NaN as None."""
        cosine = self.agreement.known_cosines().tolist()
        rows: list[dict[str, Any]] = []
        for i, option in enumerate(self.options):
            ahead = self.agreement.difference_error(i, 0)
            # More samples of a gradient that points the other way are no progress.
            compares = cosine[0] > 0 and cosine[i] > 0
            rows.append(
                {
                    "name": option.name,
                    "cosine": _finite(cosine[i]),
                    "error": _finite(float(self.agreement.error[i])),
                    "consistency": _finite(float(self.agreement.consistency[i])),
                    "samples": (cosine[0] / cosine[i]) ** 2 if compares else None,
                    "difference": _finite(cosine[i] - cosine[0]),
                    "difference_error": _finite(float(ahead)),
                    "reach": self.reaches[i],
                    "own": i == 0,
                }
            )
        return sorted(rows, key=lambda row: -(row["cosine"] if row["cosine"] is not None else -2))

    def summary(self) -> dict[str, Any]:
        best = self.options[self.best]
        return {
            "batches": self.batches,
            "responses": self.responses,
            "own": self.options[0].name,
            "best": best.name,
            "recipe": best.recipe if self.best else "",
            "rank_correlation_with_reach": _finite(self.like_reach),
            "limits": limits(self),
            "explained_variance": self.explained,
            "rows": self.rows(),
        }


def measure(
    state: RunState,
    rules: tuple[str, ...] = (),
    *,
    batches: int = 24,
    seed: int = 0,
    more: Sequence[Way] = (),
) -> Measured:
    """Compare ways to assign credit on `batches` batches of the size that the run trains with."""
    if batches < 3:
        raise CreditError(f"--batches must be at least 3 to compare anything; got {batches}.")
    turns = TURN_CANDIDATES if state.config.environment else ()
    own, *others = ways_of(state.ppo, rules or (*MEASURED, *turns))
    named = {way.name for way in more}
    options = [own, *more, *(way for way in others if way.name not in named)]
    gradients, lines = batch_gradients(state, options, range(batches), seed)
    # Where all reward comes at the end anyway, the last way is the first.
    if torch.equal(gradients[len(options) - 1], gradients[0]):
        options = options[:-1]
    agreement = gradient_agreement(gradients[: len(options)], gradients[-1], blocks=BLOCKS)
    if not bool(agreement.known_cosines()[0].isfinite()):
        warn(
            "the batches are too few, or too noisy, to tell the true gradient from noise. "
            f"Raise --batches, which is {batches}."
        )
    medians = {
        key: [statistics.median(x) for x in zip(*(line[key] for line in lines))]
        for key in ("explained", "reaches")
    }
    reaches = medians["reaches"][: len(options)]
    size = _batch_size(state)
    return Measured(
        options, agreement, batches, batches * size, state.ppo, medians["explained"], reaches
    )


def batch_gradients(
    state: RunState, options: list[Way], numbers: range, seed: int
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The gradient of each batch by each way, the unbiased one last, [E + 1, M, D]; and the line
    that is kept of each batch."""
    state.score.provide_for(option.config.segmenter for option in options)
    ways = [*options, Way("", unbiased(state.ppo))]
    size = _batch_size(state)
    group = max(state.ppo.num_samples, group_of(options, size))
    file = state.folder / CREDIT_LINES
    # What a name such as `learned path=cuts.json` stands for may change.
    learned = [to_raw(rule) for o in options if isinstance(rule := o.config.segmenter, Learned)]
    own = [BLOCKS, THIRDS, state.step, state.config.batch_size, state.kl_coef]
    names = [option.name for option in options]
    setting = digest_of([*own, names, group, seed, *learned])  # all that decides the numbers

    def intro(before: int) -> str:
        return (
            f"{state.folder.name}, step {state.step}: {len(options) - 1} ways to assign credit on "
            f"{len(numbers)} batches of {size} responses"
            + (f", {before} of them measured before" if before else "")
        )

    lines = measured_parts(
        file, setting, numbers, partial(_batch, state, ways, group, seed), "credit", intro
    )
    gradients = torch.stack([decode(line["sketch"]) for line in lines], dim=1).double()
    return gradients, lines


def _batch_size(state: RunState) -> int:
    return state.ppo.batch_size * state.ppo.num_samples


def _batch(
    state: RunState, ways: list[Way], group: int, seed: int, number: int
) -> tuple[dict[str, Any], float]:
    """One batch's gradient by each way, [E + 1, D]; what the critic explains of its returns, by
    thirds of a response; how far each way reaches; and the mean score."""
    models = state.models
    experience, examples = sample_batch(state, number, seed, group=group)
    if number == 0:
        _check_reward(state, experience, examples)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    credit = credit_of(state, experience, generator)
    batch = Batch(state, examples, experience, credit, generator)
    advantages, reaches = advantages_by_way(batch, ways)
    measurement = Measurement(advantages, [seed] * BLOCKS)
    part = measurement.begin()
    for micro in experience.micro_batches(models):
        models.logprobs(models.policy, micro.sequences, part.watch())
        part.add(micro)
    part.end()
    returns = lambda_one_returns(credit.rewards, credit.segments, state.ppo)
    thirds = explained_by_thirds(credit.values, returns, experience.mask)
    sketch = encode(measurement.over_ranks(models.world).cpu().float())
    explained = [float(thirds[name]) for name in THIRDS]
    line = {"sketch": sketch, "explained": explained, "reaches": reaches}
    return line, float(experience.scores.mean())


def credit_of(state: RunState, experience: Experience, shuffler: torch.Generator) -> Credit:
    """Credit by the run's own settings."""
    models, config = state.models, state.ppo
    rewards, segments = shape_and_segment(experience, models, config, state.kl_coef, shuffler)
    return assign_credit(rewards, experience.critic_values(models), segments, config)


def _check_reward(state: RunState, experience: Experience, examples: list[Example]) -> None:
    responses = experience.response_tokens()
    rows = [scored_row(e.row, e.episode) for e in examples]
    again = state.models.reward([e.prompt for e in examples], responses, rows)
    again = again if again.ndim == 1 else again.sum(dim=1)
    if experience.episodes is not None:
        again = again + turn_rewards(experience.episodes, experience.mask).sum(dim=1)
    if not torch.allclose(again, experience.raw_scores, rtol=1e-3, atol=1e-3):
        warn(
            "the reward gives the same responses other scores the second time. Its noise counts "
            "as noise of every rule, so all cosines are lower than they could be."
        )


def table(measured: Measured) -> str:
    """For the terminal: best first."""
    rows = [
        [
            row["name"] + (" (this run)" if row["own"] else ""),
            shown(row["cosine"]),
            shown(row["error"]),
            shown(row["consistency"]),
            shown(row["samples"], "x"),
            shown(row["reach"]),
        ]
        for row in measured.rows()
    ]
    return text_table(["credit by", "cosine", "+-", "consistency", "samples needed", "reach"], rows)


def critic_verdict(measured: Measured) -> str:
    """What the critic knows, in a sentence or two."""
    shown = ", ".join(f"{each:.2f}" for each in measured.explained)
    said = (
        f"The critic explains {shown} of the returns in the first, second and last third of a "
        "response."
    )
    if max(measured.explained) >= NOTHING:
        return said
    remedy = advice(measured.config)
    return f"{said} That is nothing: {remedy[0].lower()}{remedy[1:]}"


def verdict(measured: Measured) -> str:
    """What to do about it, in a sentence."""
    own, best = measured.options[0], measured.options[measured.best]
    cosine = measured.agreement.known_cosines()
    own_cosine = float(cosine[0])
    if not math.isfinite(own_cosine):
        return f"The batches are too few, or too noisy, to judge {own.name}. Raise --batches."
    away = f"whose gradient does not point along the true one (cosine {own_cosine:.2f})"
    if best is own:
        nothing = f"Nothing is ahead of {own.name} by more than {ERRORS:g} standard errors"
        if own_cosine > 0:
            return f"{nothing}: keep it."
        return f"{nothing}, {away}: more steps may gain nothing. Raise --batches to be sure."
    if own_cosine <= 0:
        return (
            f"{best.name} is ahead of {own.name}, {away}: more steps with it may do harm. In the "
            f"recipe: {best.recipe}"
        )
    gain = (float(cosine[measured.best]) / own_cosine) ** 2
    return (
        f"{best.name} is ahead of {own.name}: about {gain:.2g} times the progress from the same "
        f"samples. In the recipe: {best.recipe}"
    )


def limits(measured: Measured) -> str:
    """What the measure can and cannot tell here."""
    cosine, error = measured.agreement.known_cosines(), measured.agreement.error
    if not bool(cosine[0].isfinite()):
        return ""
    said: list[str] = []
    top, own = int(cosine.nan_to_num(nan=-1.0).argmax()), measured.options[0].name
    if top and not measured.best:
        ahead = measured.options[top].name
        said.append(f"The intervals of {ahead} and {own} overlap: which is better is open.")
    harmful = [o.name for o, c, e in zip(measured.options, cosine, error) if c + ERRORS * e < 0]
    if harmful:
        names = ", ".join(harmful)
        said.append(f"To avoid, since they point away from the true gradient: {names}.")
    if math.isfinite(measured.like_reach):
        said.append(
            f"Longest reach first, which needs no measuring, orders them with rank correlation "
            f"{measured.like_reach:.2f} to this; in training it predicted nearly as well."
        )
    return " ".join(said)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's, of the finite ones; equal numbers share their mean rank.

    >>> rank_correlation(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([1.0, 9.0, 4.0]))
    1.0
    """
    known = x.isfinite() & y.isfinite()
    pairs = torch.stack((x[known], y[known])).double()
    below = (pairs[:, :, None] > pairs[:, None]).double().sum(dim=2)
    ranks = below + (pairs[:, :, None] == pairs[:, None]).double().sum(dim=2) / 2
    if ranks.shape[1] < 3 or float(ranks.std(dim=1).min()) == 0:
        return math.nan
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
