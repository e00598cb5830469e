"""Where in a response credit falls: estimated by rules, and true by continuations.

From every start of a macro action of some responses, continuations are sampled. The mean of their
returns is the true value there, but for sampling noise; the change from one start to the next, with
the reward in between, is what the macro action really brought. Beside it stand the critic's values,
and the credit that each rule gives.

Axes: B rows, M macro actions, S states, K continuations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlhf.config.candidates import parse_candidates
from marlhf.core import Lines, Segments, segment
from marlhf.credit.measure import MEASURED, credit_of
from marlhf.credit.state import CreditError, RunState, sample_batch, shown
from marlhf.data.encode import decode
from marlhf.data.sums import first_wrong_line
from marlhf.evaluate.results import text_table
from marlhf.runtime.progress import Steps, say
from marlhf.runtime.stage import Example
from marlhf.train.credit_choice import Option, options_of
from marlhf.train.experience import Credit, Experience
from marlhf.train.ppo import assign_credit
from marlhf.train.state_values import continuation_returns, states_of

PARTS = ("first third", "second third", "last third")
CHUNK = 256
"""Continuations between two updates of the progress bar."""


@dataclass(frozen=True)
class Truth:
    """Values and credit by continuations, beside the critic's values."""

    segments: Segments
    values: Tensor  # [B, M], by continuations
    noise: Tensor  # [B, M], the standard error of each
    critic: Tensor  # [B, M]
    credit: Tensor  # [B, M], what each macro action brought


def locate(
    state: RunState,
    rules: tuple[str, ...],
    *,
    responses: int = 12,
    continuations: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Credit along some responses, as plain data for JSON and the report."""
    if state.config.environment:
        raise CreditError(
            "--where continues responses from the middle, where an environment cannot be put back. "
            "Leave it out for runs with an environment."
        )
    if responses < 1 or continuations < 2:
        raise CreditError(
            "--where needs at least 1 response and 2 continuations from each macro action; "
            f"got {responses} and {continuations}."
        )
    options = options_of(state.ppo, parse_candidates(rules or MEASURED))
    state.score.provide_for(option.config.segmenter for option in options)
    experience, examples = sample_batch(state, 0, seed, most=responses)
    by_line = state.config.data.source == "sums"
    shuffler = torch.Generator().manual_seed(seed)
    responses_seen = experience.responses(state.models.vocabulary, shuffler)
    rule = Lines() if by_line else state.config.segmenter
    segments = segment(rule, responses_seen)
    credit = credit_of(state, experience, torch.Generator().manual_seed(0))
    truth = _truth(state, experience, examples, segments, credit, continuations, seed)
    estimates = _estimates(state, experience, options, segments, credit)
    texts = [decode(state.models.tokenizer, row) for row in experience.response_tokens()]
    result: dict[str, Any] = {
        "responses": len(examples),
        "continuations": continuations,
        "critic_error": _critic_error(truth),
        "rules": [],
        "samples": _samples(state, truth, estimates[0], examples, experience),
    }
    wrong = _wrong_lines(examples, texts) if by_line else []
    for option, estimate in zip(options, estimates):
        row: dict[str, Any] = {
            "name": option.name,
            "correlation": _correlation(truth.credit, estimate, segments.macro_mask),
        }
        if wrong:
            row["first_wrong"] = _share_lowest(estimate, segments, wrong)
        result["rules"].append(row)
    if wrong:
        result["wrong"] = len(wrong)
        result["first_wrong"] = _share_lowest(truth.credit, segments, wrong)
    return result


def _truth(
    state: RunState,
    experience: Experience,
    examples: Sequence[Example],
    segments: Segments,
    own: Credit,
    count: int,
    seed: int,
) -> Truth:
    states = states_of(examples, segments, experience)
    say(f"where: {len(states) * count} continuations from {len(states)} starts of macro actions")
    generator = torch.Generator().manual_seed(seed + 1)
    seeds = torch.randint(2**62, (len(states) * count,), generator=generator).tolist()
    parts: list[Tensor] = []
    size = max(1, CHUNK // count)
    with Steps("where", len(states)) as bar:
        for begin in range(0, len(states), size):
            chosen = states[begin : begin + size]
            parts.append(
                continuation_returns(
                    chosen,
                    state.score,
                    count,
                    seeds[begin * count : (begin + len(chosen)) * count],
                    state.kl_coef,
                    state.config.kl_estimator,
                )
            )
            bar.advance(begin + len(chosen), {"return": float(parts[-1].mean())})
    returns = torch.cat(parts)  # [S, K]
    tokens = torch.zeros((2, *segments.mask.shape), device=returns.device)
    tokens[0][segments.starts] = returns.mean(dim=1)
    tokens[1][segments.starts] = returns.std(dim=1) / math.sqrt(count)
    values, noise = segments.first(tokens[0]), segments.first(tokens[1])
    critic, rewards = segments.first(own.values), segments.sum(own.rewards)
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]  # 0 after the last one
    credit = torch.where(segments.macro_mask, rewards + following - values, 0.0)
    return Truth(segments, values, noise, critic, credit)


def _estimates(
    state: RunState,
    experience: Experience,
    options: Sequence[Option],
    segments: Segments,
    own: Credit,
) -> list[Tensor]:
    """The mean advantage of the tokens of each macro action, by every option: [B, M] each."""
    seen = experience.responses(state.models.vocabulary, torch.Generator().manual_seed(0))
    estimates: list[Tensor] = []
    for option in options:
        cut = segment(option.config.segmenter, seen, split_last=option.config.split_last)
        credit = assign_credit(own.rewards, own.values, cut, option.config)
        estimates.append(segments.mean(credit.advantages))
    return estimates


def _critic_error(truth: Truth) -> list[dict[str, Any]]:
    """The critic's error in each third of the responses, without the noise of continuations."""
    mask = truth.segments.macro_mask
    place = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    part = place * len(PARTS) // mask.sum(dim=1, keepdim=True).clamp(min=1)
    square = (truth.critic - truth.values).square() - truth.noise.square()
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(PARTS):
        here = mask & (part == number)
        if bool(here.any()):
            error = math.sqrt(max(0.0, float(square[here].mean())))
            spread = float(truth.values[here].std()) if int(here.sum()) > 1 else 0.0
            bias = float((truth.critic - truth.values)[here].mean())
            rows.append({"part": name, "error": error, "bias": bias, "spread": spread})
    return rows


def _correlation(true: Tensor, estimate: Tensor, mask: Tensor) -> float | None:
    pairs = torch.stack((true[mask], estimate[mask]))
    if pairs.shape[1] < 3 or float(pairs.std(dim=1).min()) == 0:
        return None
    correlation = float(torch.corrcoef(pairs)[0, 1])
    return correlation if math.isfinite(correlation) else None


def _samples(
    state: RunState,
    truth: Truth,
    estimate: Tensor,
    examples: Sequence[Example],
    experience: Experience,
) -> list[dict[str, Any]]:
    """Each macro action's text with its true and its estimated credit."""
    samples: list[dict[str, Any]] = []
    ids, scores = truth.segments.ids.tolist(), experience.scores.tolist()
    for row, tokens in enumerate(experience.response_tokens()):
        pieces: list[dict[str, Any]] = []
        for macro in range(int(truth.segments.macro_mask[row].sum())):
            text = decode(
                state.models.tokenizer, [t for t, i in zip(tokens, ids[row]) if i == macro]
            )
            pieces.append(
                {
                    "text": text,
                    "true": float(truth.credit[row, macro]),
                    "estimated": float(estimate[row, macro]),
                    "value": float(truth.values[row, macro]),
                    "error": float(truth.noise[row, macro]),
                    "critic": float(truth.critic[row, macro]),
                }
            )
        prompt = decode(state.models.tokenizer, examples[row].prompt)
        samples.append({"prompt": prompt, "score": scores[row], "pieces": pieces})
    return samples


def _wrong_lines(examples: Sequence[Example], texts: Sequence[str]) -> list[tuple[int, int]]:
    """Rows with a wrong line, and the number of the first one."""
    lines = [first_wrong_line(str(e.row.prompt), text) for e, text in zip(examples, texts)]
    return [(row, line) for row, line in enumerate(lines) if line is not None]


def _share_lowest(credit: Tensor, segments: Segments, wrong: Sequence[tuple[int, int]]) -> float:
    """How often the line with the lowest credit is the first wrong one."""
    masked = torch.where(segments.macro_mask, credit, math.inf)
    lowest = masked.argmin(dim=1).tolist()
    return sum(lowest[row] == line for row, line in wrong) / len(wrong)


def table(result: dict[str, Any]) -> str:
    """For the terminal: the critic's error, then the rules."""
    critic = text_table(
        ["of the response", "critic's error", "bias", "spread of values"],
        [
            [row["part"], *(f"{row[key]:.2f}" for key in ("error", "bias", "spread"))]
            for row in result["critic_error"]
        ],
    )
    header = ["credit by", "correlation with true credit"]
    rows = [[r["name"], shown(r["correlation"])] for r in result["rules"]]
    if "wrong" in result:
        header.append(f"lowest on the first wrong line, of {result['wrong']}")
        rows = [[*row, f"{r['first_wrong']:.0%}"] for row, r in zip(rows, result["rules"])]
        rows.append(["continuations", "", f"{result['first_wrong']:.0%}"])
    return f"{critic}\n\n{text_table(header, rows)}"
