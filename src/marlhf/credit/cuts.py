"""Learn where to cut: weights of `Learned` whose gradient agrees best with the true one.

A pool of heads, each feature alone and random directions, is measured as fixed rules are, in the
same passes over some batches. The best becomes a rule of its own, and is measured once more on the
batches of the table, which it has not seen: what it gained from noise alone is lost there. Beside
it stand rules that cut as often at the same lambda, so that only the places differ.

Axes: C candidates, M batches, D numbers of a sketch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from marlhf.config.candidates import Candidate
from marlhf.core import Learned
from marlhf.core.segmenters import FEATURES
from marlhf.credit.measure import Measured, batch_gradients
from marlhf.credit.state import CreditError, RunState
from marlhf.credit.ways import Way
from marlhf.models.logprobs import BLOCKS
from marlhf.runs.atomic import write_json
from marlhf.runs.layout import CUTS
from marlhf.train.agreement import gradient_agreement
from marlhf.train.credit_choice import ERRORS, options_of

NAME = "learned cuts"
POOL = 96
"""Candidates. Every one is a way more in the same passes, and 8 kB more to keep of a batch."""
QUANTILE = 0.9
"""How often all of them cut. More seldom reaches further back, which is another question."""
FIRST = 10_000
"""The first batch to learn from: no table gets that far."""


@dataclass(frozen=True)
class Cuts:
    """What was learned, and how well it agreed where it was learned."""

    way: Way
    twins: list[Way]
    """Fixed rules that cut as often, at the same lambda."""
    cosine: float
    error: float


def heads(seed: int, vocabulary_size: int | None) -> list[Learned]:
    """What is tried: each feature alone, for and against, and random directions."""
    generator = torch.Generator().manual_seed(seed)
    alone = torch.eye(len(FEATURES))
    # Features that are 0 or 1 leave ties, whose first would win: cuts early in the response, which
    # reach further back. Entropy breaks them.
    alone[[FEATURES.index(name) for name in ("word", "line", "sentence")], 0] = 0.1
    drawn = torch.randn(POOL - 2 * len(FEATURES), len(FEATURES), generator=generator)
    weights = torch.cat((alone, -alone, drawn / drawn.norm(dim=1, keepdim=True)))
    return [
        Learned(
            QUANTILE,
            vocabulary_size=vocabulary_size,
            **{name: round(weight, 2) + 0.0 for name, weight in zip(FEATURES, row)},
        )
        for row in weights.tolist()
    ]


def learn_cuts(state: RunState, *, batches: int, seed: int) -> Cuts:
    """The best head on batches of its own, written into the run's folder."""
    if batches < 3:
        raise CreditError(f"--batches must be at least 3 to learn anything; got {batches}.")
    lam = state.ppo.lam
    size = len(state.models.vocabulary.begins_word)
    candidates = [Candidate("learned", asdict(head), lam) for head in heads(seed, size)]
    ways = [Way(o.name, o.config) for o in options_of(state.ppo, candidates)]
    gradients, _ = batch_gradients(state, ways, range(FIRST, FIRST + batches), seed)
    if torch.equal(gradients[1:-1], gradients[1:2].expand_as(gradients[1:-1])):
        raise CreditError(
            f"{state.folder} has responses so short that a tenth of their tokens is none: there is "
            "no place to learn."
        )
    agreement = gradient_agreement(gradients[1:-1], gradients[-1], blocks=BLOCKS)
    cosines = agreement.known_cosines()
    if not bool(cosines.isfinite().any()):
        raise CreditError(
            f"{batches} batches are too few, or too noisy, to learn cuts from. Raise --batches."
        )
    best = int(cosines.nan_to_num(nan=-math.inf).argmax())
    config = ways[1 + best].config
    rule = config.segmenter
    assert isinstance(rule, Learned)
    file = state.folder / CUTS
    write_json(file, asdict(rule))
    recipe = Candidate("learned", {"path": str(file)}, lam).recipe
    twins = [
        Candidate("ngram", {"n": round(1 / (1 - QUANTILE))}, lam),
        Candidate("entropy", {"quantile": QUANTILE}, lam),
        Candidate("value_change", {"quantile": QUANTILE}, lam),
    ]
    return Cuts(
        Way(Candidate(NAME, {}, lam).name, config, settings=recipe),
        [Way(option.name, option.config) for option in options_of(state.ppo, twins)[1:]],
        float(cosines[best]),
        float(agreement.error[best]),
    )


def verdict(cuts: Cuts, measured: Measured) -> str:
    """Whether learned cuts are better than as many fixed ones, in a sentence or two."""
    names = [option.name for option in measured.options]
    cosine, error = measured.agreement.known_cosines(), measured.agreement.error
    learned = names.index(cuts.way.name)
    seen = f"Learned cuts agree by {cuts.cosine:.2f} +- {cuts.error:.2f} where they were learned"
    if not bool(cosine[learned].isfinite()):
        return f"{seen}; the batches of this table are too few, or too noisy, to check it."
    twins = [names.index(twin.name) for twin in cuts.twins]
    best = max(twins, key=lambda i: float(cosine[i]))
    ahead = float(cosine[learned] - cosine[best])
    unsure = float(measured.agreement.difference_error(learned, best))
    better = "no better" if abs(ahead) <= ERRORS * unsure else "better" if ahead > 0 else "worse"
    held_out = f"{float(cosine[learned]):.2f} +- {float(error[learned]):.2f} on other batches"
    fixed = f"{names[best]} cuts as often and has {float(cosine[best]):.2f}"
    return f"{seen}, by {held_out}. {fixed}: they are {better} ({ahead:+.2f} +- {unsure:.2f})."
