"""Scores of held-out responses, for any model: SFT, PPO, RLOO, DPO, or a plain folder.

Every response is a line of a file in `evaluation/` of the run folder, with its settings, its score
by each reward, KL, length and repetition, so that reports need no GPU. The same command resumes
after a stop; another reward model scores the responses there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from marlhf.data import Encoded, Row, decode
from marlhf.evaluate.eval_plan import (
    EvaluationOptions,
    EvaluationPlan,
    PolicySource,
    find_fallback,
    find_policies,
    make_plan,
    sampling_settings,
    setting_of,
)
from marlhf.evaluate.held_out import Summary, summarise
from marlhf.evaluate.sampling import (
    ResponseSampler,
    RewardModelCache,
    RewardSource,
    find_rewards,
    key_of,
    kl_to,
    load_prompts,
    load_reference,
    seed_of,
)
from marlhf.models.base import Model, Tokenizer, pick_device
from marlhf.models.load import load_tokenizer
from marlhf.rollout.repetition import repetition
from marlhf.runs.digests import weights_digest
from marlhf.runs.evaluations import SamplingSettings
from marlhf.runs.jsonl import Line, append_jsonl, read_keyed, write_jsonl
from marlhf.runs.layout import EVALUATION

CHUNK = 256
"""Prompts sampled and scored at once: what a stop can cost."""

Notice = Callable[[str], None]


@dataclass(frozen=True)
class ScoredResponses:
    """The responses of a policy with their scores, and the file that holds them."""

    name: str
    folder: Path
    settings: SamplingSettings
    lines: list[Line]

    @property
    def file(self) -> Path:
        return self.folder / EVALUATION / self.settings.file_name

    @property
    def summary(self) -> Summary:
        return summarise(self.lines)


def evaluate(
    paths: Sequence[Path | str], options: EvaluationOptions, notice: Notice = lambda words: None
) -> list[ScoredResponses]:
    """Sample every policy under `paths` alike, score the responses, and keep them in its folder."""
    policies = find_policies(paths)
    fallback = find_fallback(policies, options.like)
    plans = [make_plan(policy, options, fallback) for policy in policies]
    reward_models = RewardModelCache(pick_device(options.device))
    scored: list[ScoredResponses] = []
    for policy, plan in zip(policies, plans):
        scored.append(_evaluate(policy, plan, options, reward_models, notice))
    return scored


def _evaluate(
    policy: PolicySource,
    plan: EvaluationPlan,
    options: EvaluationOptions,
    reward_models: RewardModelCache,
    notice: Notice,
) -> ScoredResponses:
    tokenizer = load_tokenizer(policy.model, trust_remote_code=plan.trust_remote_code)
    prompts = load_prompts(policy, plan, tokenizer, options.prompts)
    rewards = find_rewards(plan)
    reference_id = None if plan.reference is None else weights_digest(plan.reference)
    setting = setting_of(policy, plan, options.seed, reference_id)
    settings = sampling_settings(plan, options.seed)
    file = policy.folder / EVALUATION / settings.file_name
    known = read_keyed(file, setting)
    left = [p for p in prompts if not _complete(known.get(key_of(p.row)), rewards)]
    notice(f"{policy.name}: {len(prompts) - len(left)} of {len(prompts)} prompts are done")
    if left:
        new_prompts = any(key_of(p.row) not in known for p in left)
        sampler = (
            ResponseSampler(policy, plan, tokenizer, reward_models.device) if new_prompts else None
        )
        reference = (
            load_reference(policy, plan, tokenizer, reward_models.device) if new_prompts else None
        )
        for start in range(0, len(left), CHUNK):
            chunk = left[start : start + CHUNK]
            if sampler is not None:
                new = [p for p in chunk if key_of(p.row) not in known]
                known |= _sample(new, sampler, reference, setting, settings)
            lines = [known[key_of(p.row)] for p in chunk]
            _score(lines, chunk, rewards, plan, tokenizer, reward_models)
            append_jsonl(file, lines)
            done = len(prompts) - len(left) + start + len(chunk)
            notice(f"{policy.name}: {done} of {len(prompts)} prompts")
        _drop_outdated(known, rewards)
        write_jsonl(file, known.values())
    lines = [known[key_of(p.row)] for p in prompts]
    return ScoredResponses(policy.name, policy.folder, settings, lines)


def _complete(line: Line | None, rewards: Sequence[RewardSource]) -> bool:
    return line is not None and all(line["judges"].get(r.name) == r.digest for r in rewards)


def _drop_outdated(known: dict[str, Line], rewards: Sequence[RewardSource]) -> None:
    """Drop scores of a reward model that has been trained again since."""
    for line in known.values():
        for reward in rewards:
            if line["judges"].get(reward.name, reward.digest) != reward.digest:
                del line["judges"][reward.name], line["scores"][reward.name]


@torch.no_grad()
def _sample(
    prompts: Sequence[Encoded],
    sampler: ResponseSampler,
    reference: Model | None,
    setting: str,
    settings: SamplingSettings,
) -> dict[str, Line]:
    """One line per prompt: the response and its measures, not yet scored."""
    if not prompts:
        return {}
    keys = [key_of(p.row) for p in prompts]
    rollout = sampler.sample(prompts, [seed_of(key, 0, settings.seed) for key in keys])
    plan, tokenizer = sampler.plan, sampler.tokenizer
    kl: list[Any] = [None if plan.reference is None else 0.0] * len(prompts)
    if reference is not None:
        kl = kl_to(reference, prompts, rollout, plan, tokenizer.pad_token_id)
    lines: dict[str, Line] = {}
    for i, (prompt, ids) in enumerate(zip(prompts, rollout.responses)):
        lines[keys[i]] = {
            "setting": setting,
            "sampling": asdict(settings),
            "key": keys[i],
            "prompt": prompt.row.prompt,
            "response": decode(tokenizer, ids),
            "scores": {},
            "kl": kl[i],
            "length": len(ids),
            "repetition": repetition(ids),
            "distinct_1": distinct(ids, 1),
            "distinct_2": distinct(ids, 2),
            "ended": bool(rollout.ended[i]),
            "response_ids": ids,
            "judges": {},
        }
        if reference_text := _reference_text(prompt.row):
            lines[keys[i]]["reference"] = reference_text
    return lines


def _reference_text(row: Row) -> str:
    """What a judge may check an answer against: a column of that name, or WebGPT's quotes."""
    given, quotes = row.columns.get("reference"), row.columns.get("chosen_quotes")
    if isinstance(given, str):
        return given
    if not isinstance(quotes, Mapping):
        return ""
    extracts = quotes.get("extract") or []
    titles = quotes.get("title") or [""] * len(extracts)
    return "\n\n".join(f"{title}\n{text}".strip() for title, text in zip(titles, extracts))


def _score(
    lines: Sequence[Line],
    prompts: Sequence[Encoded],
    rewards: Sequence[RewardSource],
    plan: EvaluationPlan,
    tokenizer: Tokenizer,
    reward_models: RewardModelCache,
) -> None:
    """Fill in the scores that lines lack."""
    for reward in rewards:
        unseen = [i for i, line in enumerate(lines) if not _complete(line, [reward])]
        if not unseen:
            continue
        chosen = [prompts[i] for i in unseen]
        responses = [lines[i]["response_ids"] for i in unseen]
        for i, score in zip(
            unseen, reward_models.score(reward, plan, tokenizer, chosen, responses)
        ):
            lines[i]["scores"][reward.name] = score
            lines[i]["judges"][reward.name] = reward.digest


def distinct(tokens: Sequence[int], n: int) -> float:
    """Share of n-grams that differ from one another: 1 for all; 0 where there are none.

    >>> distinct([1, 2, 1, 2], n=2)  # 12 21 12: two of three
    0.6666666666666666
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
