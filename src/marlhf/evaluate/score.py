"""Scores of held-out responses, for any model: SFT, PPO, RLOO, DPO, or a plain folder.

Every response is a line of a file in `evaluation/` of the run folder, with its settings, its score
by each reward, KL, length and repetition, so that reports need no GPU. The same command resumes
after a stop; another reward model scores the responses there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlhf.data import Encoded, Row, decode
from marlhf.environments import EpisodeRecord, opening
from marlhf.evaluate.eval_plan import EvaluationOptions, find_fallback, find_policies, make_plan
from marlhf.evaluate.results import Summary, summarise
from marlhf.evaluate.sampling import RewardSource, SamplingTask, as_played, key_of
from marlhf.runs.atomic import Line
from marlhf.runs.evaluations import SamplingSettings, as_text
from marlhf.runs.layout import EVALUATION, weights_digest

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
    """Sample all policies with the same settings, score the responses, keep them in run folders."""
    policies = find_policies(paths)
    fallback = find_fallback(policies, options.like)
    plans = [make_plan(policy, options, fallback) for policy in policies]
    reward_models: dict[str, Any] = {}
    return [
        _evaluate(SamplingTask(policy, plan, options, fallback, reward_models), notice)
        for policy, plan in zip(policies, plans)
    ]


def _evaluate(task: SamplingTask, notice: Notice) -> ScoredResponses:
    policy, reference, settings = task.policy, task.plan.reference, task.settings()

    def sample(chunk: Sequence[Encoded], known: dict[str, Line]) -> list[Line]:
        _drop_outdated(known, task.rewards)
        new = [p for p in chunk if key_of(p.row) not in known]
        all_lines = known | (_sample(new, task) if new else {})
        lines = [all_lines[key_of(p.row)] for p in chunk]
        _score(lines, chunk, task)
        return lines

    lines = task.complete_lines(
        policy.folder / EVALUATION / settings.file_name,
        task.setting(None if reference is None else weights_digest(reference)),
        settings,
        lambda line: all(line["judges"].get(r.name) == r.digest for r in task.rewards),
        sample,
        size=CHUNK,
        notice=lambda words: notice(f"{policy.name}: {words}"),
    )
    return ScoredResponses(policy.name, policy.folder, settings, lines)


def _drop_outdated(known: Mapping[str, Line], rewards: Sequence[RewardSource]) -> None:
    """Drop scores of a reward model that has been trained again since."""
    for line in known.values():
        for reward in rewards:
            if line["judges"].get(reward.name, reward.digest) != reward.digest:
                del line["judges"][reward.name], line["scores"][reward.name]


def _sample(prompts: Sequence[Encoded], task: SamplingTask) -> dict[str, Line]:
    """One line per prompt: the response and its measures, not yet scored."""
    answers = task.respond(prompts, [0] * len(prompts))
    rollout = answers.rollout
    kl = task.kl_to_reference(answers.prompts, rollout)
    lines: dict[str, Line] = {}
    for i, (prompt, whole) in enumerate(zip(prompts, rollout.responses)):
        key, ids = key_of(prompt.row), whole
        if rollout.sampled is not None:
            ids = [token for token, own in zip(whole, rollout.sampled[i].tolist()) if own]
        lines[key] = {
            "key": key,
            "prompt": prompt.row.prompt,
            "response": decode(task.tokenizer, ids),
            "scores": {},
            "kl": kl[i],
            "length": len(ids),
            "repetition": repetition(ids),
            "distinct_1": distinct(ids, 1),
            "distinct_2": distinct(ids, 2),
            "ended": bool(rollout.ended[i]),
            "response_ids": whole,
            "judges": {},
        }
        if (record := answers.episodes[i]) is not None:
            lines[key] |= _conversation(record, answers.prompts[i], len(whole) - len(ids))
        if reference_text := _reference_text(prompt.row):
            lines[key]["reference"] = reference_text
    return lines


def _conversation(record: EpisodeRecord, played: Encoded, world_tokens: int) -> Line:
    """What a line says of a conversation."""
    first = opening(record)
    return {
        "prompt": record.messages[:first],
        "response": as_text(record.messages[first:]),
        "episode": record.to_dict(),
        "prompt_ids": played.prompt_ids,
        "turns": len(record.turns),
        "success": record.success,
        "tool_calls": record.tool_calls,
        "tool_errors": record.tool_errors,
        "world_tokens": world_tokens,
    }


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


def _score(lines: Sequence[Line], prompts: Sequence[Encoded], task: SamplingTask) -> None:
    """Fill in the scores that lines lack."""
    for reward in task.rewards:
        unseen = [i for i, line in enumerate(lines) if reward.name not in line["judges"]]
        if unseen:
            responses = [lines[i]["response_ids"] for i in unseen]
            given = [lines[i].get("episode") for i in unseen]
            records = [EpisodeRecord.from_dict(e) if e else None for e in given]
            seen = [
                as_played(prompts[i], lines[i]["prompt_ids"], record) if record else prompts[i]
                for i, record in zip(unseen, records)
            ]
            scores = task.scores(reward, seen, responses, records)
            for i, score in zip(unseen, scores):
                lines[i]["scores"][reward.name] = score
                lines[i]["judges"][reward.name] = reward.digest


def distinct(tokens: Sequence[int], n: int) -> float:
    """Share of n-grams that differ from one another: 1 for all; 0 where there are none.

    >>> distinct([1, 2, 1, 2], n=2)  # 12 21 12: two of three
    0.6666666666666666
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that have occurred before: 0 for none, near 1 for a loop.

    >>> repetition([1, 2, 1, 2, 1, 2], n=2)  # 12 21 12 21 12: three of five are repeats
    0.6
    """
    return 1 - distinct(tokens, n) if len(tokens) >= n else 0.0
