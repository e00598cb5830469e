"""Best of n: what the highest-scored of n samples is worth, at each n and temperature.

The largest n is sampled once per temperature; smaller ones are estimated from the same samples
without bias. Scores are kept in `best_of_n/` of the run folder, with the best response of each
prompt, so the same command resumes after a stop, and a larger n adds to what is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from marlhf.data import Encoded, decode
from marlhf.data.rows import is_blank
from marlhf.evaluate.best_of_n_grid import Grid, expected_best
from marlhf.evaluate.eval_plan import (
    EvaluationError,
    EvaluationOptions,
    EvaluationPlan,
    PolicySource,
    find_fallback,
    find_policies,
    make_plan,
    sampling_settings,
    setting_of,
)
from marlhf.evaluate.sampling import (
    ResponseSampler,
    RewardModelCache,
    RewardSource,
    find_rewards,
    key_of,
    load_prompts,
    seed_of,
)
from marlhf.intervals import mean
from marlhf.models.base import Tokenizer, pick_device
from marlhf.models.load import load_tokenizer
from marlhf.runs.evaluations import SamplingSettings
from marlhf.runs.jsonl import Line, append_jsonl, read_keyed, write_jsonl
from marlhf.runs.layout import BEST_OF_N

ROWS = 512
"""Responses sampled and scored at once: about what a stop can cost."""


@dataclass(frozen=True)
class SamplingTask:
    """A policy, the prompts it answers, and the rewards that choose among its responses."""

    policy: PolicySource
    fallback: PolicySource | None
    plan: EvaluationPlan
    tokenizer: Tokenizer
    prompts: list[Encoded]
    rewards: list[RewardSource]

    @property
    def reward_names(self) -> str:
        return "+".join(re.sub("[/:]", "_", reward.name) for reward in self.rewards)


def find_task(path: Path | str, options: EvaluationOptions) -> SamplingTask:
    policies = find_policies([path])
    if len(policies) > 1:
        raise EvaluationError(f"{path} holds {len(policies)} runs. Give the folder of one.")
    [policy] = policies
    fallback = find_fallback(policies, options.like)
    plan = make_plan(policy, replace(options, reference="none"), fallback)
    tokenizer = load_tokenizer(policy.model, trust_remote_code=plan.trust_remote_code)
    prompts = load_prompts(policy, plan, tokenizer, options.prompts)
    rewards = [reward for reward in find_rewards(plan) if reward.weight]
    return SamplingTask(policy, fallback, plan, tokenizer, prompts, rewards)


def best_of_n(
    path: Path | str,
    options: EvaluationOptions,
    ns: Sequence[int],
    temperatures: Sequence[float] = (),
    notice: Callable[[str], None] = lambda words: None,
) -> Grid:
    """Sample, score and keep; the grid of mean best scores, and the lines it was made from."""
    if not ns or min(ns) < 1:
        raise EvaluationError(f"Give one n or more, each at least 1; got {list(ns)}.")
    task = find_task(path, options)
    policy, plan, prompts, rewards = task.policy, task.plan, task.prompts, task.rewards
    reward_models = RewardModelCache(pick_device(options.device))
    sampler: ResponseSampler | None = None
    by_temperature: dict[float, list[Line]] = {}
    for temperature in sorted(set(temperatures)) or [plan.sampling.temperature]:
        plan = replace(plan, sampling=replace(plan.sampling, temperature=temperature))
        setting = setting_of(policy, plan, options.seed, [(r.digest, r.weight) for r in rewards])
        settings = sampling_settings(plan, options.seed, task.reward_names)
        file = policy.folder / BEST_OF_N / settings.file_name
        known = read_keyed(file, setting)
        left = [p for p in prompts if _count(known, p) < max(ns)]
        done = len(prompts) - len(left)
        notice(f"temperature {temperature:g}: {done} of {len(prompts)} prompts")
        if left:
            sampler = sampler or ResponseSampler(policy, plan, task.tokenizer, reward_models.device)
            sampler.plan = plan
            for chunk in _chunks(left, max(ns)):
                lines = [known.get(key_of(p.row)) or _empty(setting, settings, p) for p in chunk]
                _add_samples(lines, chunk, max(ns), sampler, rewards, reward_models)
                known |= {line["key"]: line for line in lines}
                append_jsonl(file, lines)
            write_jsonl(file, known.values())
        by_temperature[temperature] = [known[key_of(p.row)] for p in prompts]
    return Grid(sorted(set(ns)), by_temperature)


def _count(known: Mapping[str, Line], prompt: Encoded) -> int:
    line = known.get(key_of(prompt.row))
    return len(line["scores"]) if line else 0


def _chunks(prompts: Sequence[Encoded], n: int) -> list[Sequence[Encoded]]:
    size = max(1, ROWS // n)
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _empty(setting: str, settings: SamplingSettings, prompt: Encoded) -> Line:
    return {
        "setting": setting,
        "sampling": asdict(settings),
        "key": key_of(prompt.row),
        "prompt": prompt.row.prompt,
        "scores": [],
        "lengths": [],
        "best": None,
    }


def _add_samples(
    lines: Sequence[Line],
    prompts: Sequence[Encoded],
    n: int,
    sampler: ResponseSampler,
    rewards: Sequence[RewardSource],
    reward_models: RewardModelCache,
) -> None:
    """Bring the line of every prompt to n samples."""
    missing = [(i, k) for i, line in enumerate(lines) for k in range(len(line["scores"]), n)]
    repeated = [prompts[i] for i, _ in missing]
    seeds = [seed_of(lines[i]["key"], k, lines[i]["sampling"]["seed"]) for i, k in missing]
    rollout = sampler.sample(repeated, seeds)
    totals = total_scores(repeated, rollout.responses, sampler, rewards, reward_models)
    ended = rollout.ended.tolist()
    for (i, k), ids, total, end in zip(missing, rollout.responses, totals, ended):
        line = lines[i]
        line["scores"].append(total)
        line["lengths"].append(len(ids))
        if line["best"] is None or total > line["best"]["score"]:
            text = decode(sampler.tokenizer, ids)
            line["best"] = {"number": k, "score": total, "response": text, "ended": end}


def total_scores(
    prompts: Sequence[Encoded],
    responses: Sequence[Sequence[int]],
    sampler: ResponseSampler,
    rewards: Sequence[RewardSource],
    reward_models: RewardModelCache,
) -> list[float]:
    """The weighted sum of all rewards, for each response."""
    totals = [0.0] * len(prompts)
    for reward in rewards:
        scores = reward_models.score(reward, sampler.plan, sampler.tokenizer, prompts, responses)
        totals = [t + reward.weight * (s or 0.0) for t, s in zip(totals, scores)]
    return totals


def export(grid: Grid, file: Path) -> tuple[float, int, int]:
    """Write the best response to each prompt as data for `marlhf sft`.

    Of several temperatures the one whose best responses score highest is taken. Responses that
    were cut off or are empty are left out: they would teach to stop in mid-sentence. Returns the
    temperature, the rows written and the rows left out.
    """
    means: dict[float, float] = {}
    for temperature, lines in grid.lines.items():
        fewest = min(len(line["scores"]) for line in lines)
        means[temperature] = mean([expected_best(line["scores"], fewest) for line in lines])
    best_temperature = max(means, key=lambda each: means[each])
    rows: list[dict[str, Any]] = []
    for line in grid.lines[best_temperature]:
        best = line["best"]
        if best["ended"] and not is_blank(best["response"]):
            row = {"prompt": line["prompt"], "chosen": best["response"]}
            rows.append(row | {"score": best["score"], "samples": len(line["scores"])})
    if not rows:
        raise EvaluationError(
            "No best response ended by itself, so there is nothing to export. Raise "
            "--max-new-tokens."
        )
    write_jsonl(file, rows)
    return best_temperature, len(rows), len(grid.lines[best_temperature]) - len(rows)
