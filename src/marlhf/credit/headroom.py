"""Headroom: how much better than RLOO, and than the run's own setting, could any credit be?

Values from many continuations at the starts of macro actions stand for a perfect critic. Their
noise is taken out (`headroom_estimates`). What is measured with them is a lower bound all the same:
values between those starts could save more.

With an environment, episodes are replayed up to a turn and then sampled on. The world keeps its
seed, so these values also know what it will do: there the headroom is an upper bound.

Axes: U groups, F ways to assign credit, B rows, T response tokens, D numbers of a sketch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from marlhf.config.candidates import Candidate, parse_candidates
from marlhf.config.settings import to_raw
from marlhf.core import NGram, Segments, Turns, segment
from marlhf.credit.headroom_estimates import (
    OTHERS,
    REACHES,
    Estimates,
    L,
    Sample,
    advantages_by_way,
    estimate,
)
from marlhf.credit.state import CreditError, RunState, measured_parts, shown
from marlhf.credit.ways import of_group, returns_from
from marlhf.evaluate.results import text_table
from marlhf.models.logprobs import BLOCK, BLOCKS, TokenScores
from marlhf.runs.layout import HEADROOM_LINES, digest_of
from marlhf.runtime.checkpoint import decode, encode
from marlhf.runtime.stage import batch_rows
from marlhf.train.agreement import jackknife_error
from marlhf.train.credit_choice import ERRORS, name_of
from marlhf.train.experience import Experience
from marlhf.train.ppo import assign_credit, shape_and_segment
from marlhf.train.ppo_config import PPOConfig
from marlhf.train.rloo_config import RLOOConfig
from marlhf.train.sampling import sample_examples

ROWS = 32
"""Responses that are sampled, continued and written down together."""
GROUP = 4
"""Responses per prompt for RLOO, where the run has none."""
WORTH_IT = 1.2
"""Headroom below which nothing is to be won."""
GOOD_SHARE = 0.7
"""Share of the headroom from which the run's critic is as good as it needs to be."""


def measure_headroom(
    state: RunState,
    rules: tuple[str, ...] = (),
    *,
    responses: int = 128,
    continuations: int = 8,
    boundaries: int = 24,
    seed: int = 0,
) -> dict[str, Any]:
    """As plain data; infinite where there is no bound, NaN where nothing is known.

    The first of `rules` cuts, else the run's own rule.
    """
    config = state.config
    group = config.responses_per_prompt if isinstance(config, RLOOConfig) else GROUP
    _check(state, responses, continuations, boundaries, group)
    rule = _rule(state, rules)
    state.score.provide_for([rule])
    own = [BLOCKS, ROWS, REACHES, state.step, state.kl_coef]  # with these, all that decides it
    setting = digest_of([*own, to_raw(rule), group, continuations, boundaries, seed])
    file = state.folder / HEADROOM_LINES
    per_chunk, count = max(1, ROWS // group), responses // group
    chunks = [range(i, min(i + per_chunk, count)) for i in range(0, count, per_chunk)]

    def intro(before: int) -> str:
        return (
            f"{state.folder.name}, step {state.step}: headroom from {count * group} responses, "
            f"{continuations} continuations at up to {boundaries} starts of macro actions"
            + (f"; {before} of {len(chunks)} parts measured before" if before else "")
        )

    def part(chunk: range) -> tuple[dict[str, Any], float]:
        line = _measure(state, rule, chunk, group, continuations, boundaries, seed)
        return line, line["score"]

    mine = measured_parts(file, setting, chunks, part, "headroom", intro)
    sample = Sample(*(torch.cat([decode(x[key]) for x in mine]) for key in Sample._fields))
    totals = torch.tensor([x["totals"] for x in mine]).sum(dim=0)
    grouped = isinstance(config, RLOOConfig)  # else training centres advantages
    centres = totals[OTHERS:] / totals[0] * (not grouped and config.whiten != "none")
    batch = config.batch_size * (group if grouped else 1)
    estimates = estimate(sample, group, batch, centres.tolist(), grouped=grouped)
    tokens, actions, whole = (sum(x["sizes"][i] for x in mine) for i in range(3))
    if actions < whole:  # what a user can set to come close to the actions that were joined
        rule = NGram(max(1, round(tokens / actions)))
    result: dict[str, Any] = {
        "responses": count * group,
        "continuations": continuations,
        "boundaries": boundaries,
        "group": group,
        "batch": batch,
        "rule": _name(rule),
        "score": sum(x["score"] * len(chunk) for x, chunk in zip(mine, chunks)) / count,
    }
    return result | summarise(estimates, config, rule, continuations)


def _check(
    state: RunState, responses: int, continuations: int, boundaries: int, group: int
) -> None:
    if continuations < 2:
        raise CreditError(
            "--headroom needs at least 2 continuations, two independent halves, to take out their "
            f"noise; got --continuations {continuations}."
        )
    if responses < 3 * group:
        raise CreditError(
            f"--headroom compares groups of {group} responses to a prompt, and needs 3 of them: "
            f"set --responses to {3 * group} or more; got {responses}."
        )
    if boundaries < 1:
        raise CreditError(f"--boundaries must be at least 1; got {boundaries}.")
    if isinstance(state.config, RLOOConfig) and state.config.tree is not None:
        raise CreditError(
            f"{state.folder} samples trees, whose leaves share tokens: headroom is measured on "
            "independent responses. Give a run without tree."
        )


def _rule(state: RunState, rules: tuple[str, ...]) -> Any:
    """What macro actions begin where values are measured: tokens, if a response is one action."""
    if state.config.environment:
        return Turns()
    rule = parse_candidates(rules)[0].segmenter() if rules else state.config.segmenter
    return NGram(1) if _is_whole(rule) else rule


def _measure(
    state: RunState,
    rule: Any,
    numbers: range,
    group: int,
    continuations: int,
    boundaries: int,
    seed: int,
) -> dict[str, Any]:
    """Some groups: sampled, continued from the starts of macro actions, and their gradients."""
    config, models = state.config, state.models
    size, prompts = config.batch_size, len(state.examples)
    examples, seeds = [], []
    for number in numbers:
        step, place = divmod(number, size)
        row = batch_rows(state.step + step, prompts, size, config.seed)[place]
        examples += [state.examples[row]] * group
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        seeds += torch.randint(2**62, (group,), generator=generator).tolist()
    examples, rollout = sample_examples(examples, models, seeds, group)
    experience = state.score(examples, rollout)
    shuffler = torch.Generator().manual_seed(seed * 1_000_003 + numbers.start)
    kl_coef = 0.0 if isinstance(config, RLOOConfig) and config.kl_in == "loss" else state.kl_coef
    rewards, segments = shape_and_segment(experience, models, config, kl_coef, shuffler)
    actions = segment(rule, experience.responses(models.vocabulary, shuffler))
    cut = evenly(actions, boundaries)

    starts = [seeds[i - i % group] for i in range(len(seeds))]
    chosen = examples, experience, cut, continuations, shuffler, kl_coef, starts
    returns = returns_from(state, *chosen)  # [S, K]
    halves = torch.zeros(2, *cut.mask.shape, device=returns.device)
    for half in (0, 1):
        halves[half][cut.starts] = returns[:, half::2].mean(dim=1)

    others: list[Tensor] = []
    critic = None
    if isinstance(config, RLOOConfig):
        if not _is_rloo(config):
            others = [of_group(experience, models, config, state.kl_coef)]
    elif config.has_critic:
        critic = experience.critic_values(models)
        others = [assign_credit(rewards, critic, segments, config).advantages]
    ways = advantages_by_way(rewards, cut, halves, group, critic)
    ways = torch.cat([ways, *(x[None] for x in others)])
    counted = segments.starts if getattr(config, "whiten", "") == "macros" else segments.mask
    sample = Sample.of(gradients_by_row(state, experience, ways), group)
    return {
        **{key: encode(x.float().cpu()) for key, x in sample._asdict().items()},
        "totals": torch.where(counted, ways, 0.0).sum(dim=(1, 2)).tolist(),
        "sizes": [int(x.sum()) for x in (cut.mask, cut.macro_mask, actions.macro_mask)],
        "score": float(experience.scores.mean()),
    }


def _is_whole(rule: Any) -> bool:
    return isinstance(rule, NGram) and rule.n == math.inf


def _is_rloo(config: RLOOConfig) -> bool:
    """Whether the run's own setting is the one that headroom is measured against."""
    other = config.baseline != "leave_one_out" or config.group == "state"
    return _is_whole(config.segmenter) and not other and config.ratio != "macro_mean"


def evenly(segments: Segments, count: int) -> Segments:
    """At most `count` macro actions of each row, by joining neighbours, but none over a hole."""
    most = segments.macro_mask.sum(dim=1, keepdim=True).clamp(min=count)
    part = segments.ids * count // most
    before = torch.nn.functional.pad(part[:, :-1], (1, 0), value=-1)
    return Segments.from_starts(segments.starts & (part != before), segments.mask)


def gradients_by_row(state: RunState, experience: Experience, ways: Tensor) -> Tensor:
    """The gradient of each response by every way, as a sketch: [F, B, T] -> [F, B, D]."""
    models = state.models
    total = torch.zeros(*ways.shape[:2], BLOCKS * BLOCK, device=ways.device)
    for micro in experience.micro_batches(models):
        if not micro.weight:
            continue
        scores, present = TokenScores(), micro.sequences.present
        models.logprobs(models.policy, micro.sequences, scores)
        ours = ways[:, micro.index, : present.shape[1]][:, present]  # [F, N]
        rows = present.nonzero()[:, 0]
        of_row = torch.eye(len(micro.index), device=ways.device)[:, rows]  # [b, N]
        sketched = scores.gradients((ours[:, None] * of_row).flatten(0, 1))
        total[:, micro.index] = sketched.view(len(ways), len(micro.index), -1)
    return models.world.sum(total)


def summarise(
    estimates: Estimates, config: PPOConfig | RLOOConfig, rule: Any, continuations: int
) -> dict[str, Any]:
    """What the estimates say, and the sentence."""
    errors = Estimates(*(estimates.error(x) for x in estimates))
    remaining = estimates.remaining[0]
    best = int((remaining + errors.remaining).argmin())
    critics = estimates.worth.shape[1] > L
    rows: list[dict[str, Any]] = []
    for i, lam in enumerate(REACHES):
        row = {"reach": lam, **_inverse(estimates.remaining[:, i])}
        row |= {"cosine": float(estimates.cosines[0, 1 + i])}
        row |= {"error": float(errors.cosines[1 + i])}
        row["sampled"] = _over(float(estimates.sampled[0, i]))
        if critics:
            row |= {"critic": float(estimates.worth[0, i])}
            row |= {"critic_error": float(errors.worth[i])}
        rows.append(row)
    result: dict[str, Any] = {
        "rows": rows,
        "best": REACHES[best],
        "rloo": {"cosine": float(estimates.cosines[0, 0]), "error": float(errors.cosines[0])},
    }
    if estimates.worth.shape[1]:
        own = {"cosine": float(estimates.cosines[0, -1]), "error": float(errors.cosines[-1])}
        own |= {"worth": float(estimates.worth[0, -1]), "worth_error": float(errors.worth[-1])}
        name = name_of(config) if isinstance(config, PPOConfig) else _name(config.segmenter)
        against = estimates.remaining[:, best] * estimates.worth[:, -1]
        result["own"] = {"name": name, **own, **_inverse(against)}
    if critics:
        at = int(estimates.worth[0, :L].nan_to_num(-1.0).argmax())
        share = (estimates.worth[:, at] - 1) / (1 / estimates.remaining[:, best] - 1)
        result["critic"] = {"reach": REACHES[at], "share": float(share[0])}
        result["critic"]["error"] = float(estimates.error(share))
    result["verdict"] = verdict(result, config, rule, continuations)
    return result


def verdict(
    result: dict[str, Any], config: PPOConfig | RLOOConfig, rule: Any, continuations: int
) -> str:
    """Whether to bother with credit, and what to set."""
    best = next(row for row in result["rows"] if row["reach"] == result["best"])
    if not best["low"] > 0:
        return (
            "Nothing can be told: responses to the same prompt hardly differ in reward. Use other "
            "prompts, or another reward."
        )
    between = f"{_times(best['headroom'])} ({_times(best['low'])} to {_times(best['high'])})"
    needs = f"RLOO needs {between} times the responses that PPO with exact values would"
    if best["headroom"] < WORTH_IT and best["high"] < 2:
        return f"Credit cannot help here: use RLOO. {needs}."
    if best["headroom"] < WORTH_IT or best["low"] <= 1:
        return (
            f"It cannot be told whether credit can help here: {needs}. Raise --responses; until "
            "then use RLOO."
        )
    settings = Candidate(**_named(rule), lam=best["reach"]).recipe
    said = [f"Credit can help here: {needs}, with {settings}."]
    if best["sampled"] > WORTH_IT and not config.environment:
        said.append(
            f"Beside values: monte_carlo with continuations: {continuations} it needs "
            f"{_times(best['sampled'])} times, continuations not counted."
        )
    own = result.get("own")
    if own and own["low"] > 0:
        between = f"{_times(own['headroom'])} ({_times(own['low'])} to {_times(own['high'])})"
        said.append(f"This run's own setting needs {between} times as many as that.")
    critic = result.get("critic")
    if critic is None:
        said.append("This run has no critic.")
    elif not math.isfinite(critic["share"]):
        said.append("How much of that its critic has cannot be told: raise --responses.")
    else:
        share = max(0.0, min(1.0, critic["share"]))
        at = f", at lam: {critic['reach']:g}" if share else ""
        said.append(f"Its critic has {share:.0%} of that gain{at}.")
        if share < GOOD_SHARE:
            said.append("Make it better by critic_pretraining or critic_replay.")
    return " ".join(said)


def table(result: dict[str, Any]) -> str:
    """For the terminal: by reach, then RLOO and the run's own setting."""
    header = ["credit by", "cosine", "+-", "RLOO needs, times", "sampled", "run's critic"]
    rows = [
        [
            f"exact values, lam={row['reach']:g}",
            shown(row["cosine"]),
            shown(row["error"]),
            f"{_times(row['headroom'])} [{_times(row['low'])}, {_times(row['high'])}]",
            _times(row["sampled"]),
            _times(row.get("critic")),
        ]
        for row in result["rows"]
    ]
    of_rloo, own = result["rloo"], result.get("own")
    first = [shown(of_rloo["cosine"]), shown(of_rloo["error"]), "1", "", ""]
    rows.append([f"RLOO, {result['group']} per prompt", *first])
    if own:
        mine = [shown(own["cosine"]), shown(own["error"]), _times(own["worth"]), "", ""]
        rows.append([f"{own['name']} (this run)", *mine])
    return text_table(header, rows)


def _name(rule: Any) -> str:
    kind, settings = _named(rule).values()
    return " ".join([kind, *(f"{key}={value}" for key, value in settings.items())])


def _named(rule: Any) -> dict[str, Any]:
    """A rule as a candidate has it, without what it leaves at its default."""
    raw = dict(to_raw(rule))
    kind = raw.pop("type")
    return {"rule": kind, "settings": {k: v for k, v in raw.items() if v is not None}}


def _inverse(share: Tensor) -> dict[str, float]:
    """How many times RLOO needs, with two standard errors, from the share that remains: [R]."""
    value, error = float(share[0]), float(ERRORS * jackknife_error(share[1:]))
    low, high = _over(value + error), _over(value - error)
    return {"headroom": _over(value), "low": low, "high": high}


def _over(share: float) -> float:
    return 1 / share if share > 0 else math.nan if math.isnan(share) else math.inf


def _times(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2g}" if value < 100 else "over 100"
