"""Best of k blocks: a decision at every macro boundary.

At each macro boundary k candidate blocks are drawn and the one with the highest value is kept,
until the response ends. Whole-response best-of-n is the case of one block. With M decisions the
result moves from the policy by at most M (log k - (k - 1)/k) nats. It costs k times the tokens of
a response, and what the value function samples.

Responses are kept in `blocks/` of the run folder, one file per setting, so the same command resumes
after a stop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from marlhf.core import Lines, NGram, Responses, Segmenter, Sentences, Words, segment
from marlhf.data import Encoded, decode, pad_right
from marlhf.evaluate.best_of_n import ROWS, find_task, write_ended
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
from marlhf.evaluate.results import BlockLines
from marlhf.evaluate.sampling import SamplingTask, key_of
from marlhf.intervals import mean
from marlhf.models.load import load_scalar
from marlhf.reward import RewardModel
from marlhf.runs.atomic import Line
from marlhf.runs.layout import BLOCKS, CRITIC, is_run, read_score_scale, weights_digest
from marlhf.spans import vocabulary

Value = Literal["critic", "reward", "monte_carlo"]
MAX_BLOCK = 64
"""Words, sentences and lines are looked for in this many new tokens; a longer block ends there."""


@dataclass(frozen=True)
class BlockOptions:
    """How a response is decided block by block."""

    rule: Segmenter
    label: str
    """The rule as the user wrote it, such as `ngram n=12`."""
    ks: tuple[int, ...] = (4,)
    """Candidates at each boundary; each k is a response of its own to every prompt."""
    value: Value = "reward"
    """What values an unfinished response: the run's critic, the reward of the text so far, or the
    mean reward of continuations. A finished one is always valued by its reward."""
    continuations: int = 4
    """Continuations of each candidate, for `monte_carlo`."""

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise EvaluationError(
                f"--k must be at least 1, the candidates at each boundary; got {list(self.ks)}."
            )
        if self.value not in get_args(Value):
            listed = ", ".join(get_args(Value))
            raise EvaluationError(f"--value must be one of {listed}; got {self.value}.")
        if self.continuations < 1:
            raise EvaluationError(f"--continuations must be at least 1; got {self.continuations}.")
        if not isinstance(self.rule, NGram | Words | Sentences | Lines):
            raise EvaluationError(
                f"--blocks takes ngram, words, sentences or lines, whose boundaries follow from "
                f"the tokens alone; got {self.label}."
            )


def best_of_blocks(
    path: Path | str,
    options: EvaluationOptions,
    blocks: BlockOptions,
    notice: Callable[[str], None] = lambda words: None,
) -> list[BlockLines]:
    """A response to each prompt for each k, decided block by block, and what is known of them."""
    task = find_task(path, options)
    if task.plan.environment is not None:
        raise EvaluationError(
            "--blocks selects within a single response, not within a conversation. Give "
            "--environment none as well."
        )
    longest = task.plan.sampling.max_new_tokens
    if isinstance(blocks.rule, NGram) and longest < blocks.rule.n < math.inf:
        raise EvaluationError(
            f"Blocks of {blocks.rule.n:g} tokens are longer than a response, which has at most "
            f"{longest}. Lower n, or raise --max-new-tokens."
        )
    critic = find_critic(task) if blocks.value == "critic" else None
    continuations = blocks.continuations if blocks.value == "monte_carlo" else None
    settings = task.settings(with_rewards=True)
    rewards = [(r.digest, r.weight) for r in task.weighted_rewards]
    decider = BlockDecider(task, blocks, critic)
    results: list[BlockLines] = []
    for k in sorted(set(blocks.ks)):
        way = [blocks.label, k, blocks.value, critic and weights_digest(critic.path)]
        name = re.sub(r"[^\w.]+", "_", f"{blocks.label} k{k} {blocks.value}")
        file = task.policy.folder / BLOCKS / f"{name}-{settings.file_name}"
        same = {"k": k, "blocks": blocks.label, "value": blocks.value}
        lines = task.complete_lines(
            file,
            task.setting(rewards, way, continuations),
            settings,
            lambda line: True,
            lambda chunk, _, k=k, same=same: [same | x for x in decider.respond(chunk, k)],
            size=max(1, ROWS // (k * (continuations or 1))),
            notice=lambda words, k=k: notice(f"k = {k}: {words}"),
        )
        results.append(BlockLines(blocks.label, blocks.value, k, settings, lines))
    return results


@dataclass(frozen=True)
class CriticSource:
    """Where a critic is, and how the scores that it predicts were normalised."""

    path: str
    mean: float = 0.0
    deviation: float = 1.0


def find_critic(task: SamplingTask) -> CriticSource:
    """The critic of the run, else of the run named by --like."""
    for source in (task.policy, task.fallback):
        if source is None:
            continue
        run = source.folder if is_run(source.folder) else source.folder.parent  # of its `best/`
        if (run / CRITIC).is_dir():
            if not source.config.get("normalize_scores"):
                return CriticSource(str(run / CRITIC))
            if scale := read_score_scale(run):
                return CriticSource(str(run / CRITIC), *scale)
            raise EvaluationError(
                f"The critic of {run} predicts normalised scores, and their scale is not recorded. "
                "Take --value reward or monte_carlo."
            )
    raise EvaluationError(
        f"{task.policy.folder} has no critic: only PPO trains one. Take --value reward or "
        "monte_carlo, or name a PPO run with --like RUN."
    )


@dataclass
class Draft:
    """A response that is being decided."""

    prompt: Encoded
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    num_blocks: int = 0
    num_sampled: int = 0  # tokens, with those of candidates that were not kept


@dataclass(frozen=True)
class BlockCandidate:
    """A draft with one more block."""

    draft: Draft
    number: int  # among all candidates of its prompt
    tokens: list[int]
    ended: bool


class BlockDecider:
    """The policy, the rewards and the value function."""

    def __init__(
        self, task: SamplingTask, blocks: BlockOptions, critic: CriticSource | None
    ) -> None:
        self.task, self.blocks, self.critic_source = task, blocks, critic
        self.max_new_tokens = task.plan.sampling.max_new_tokens
        self.vocabulary = None if isinstance(blocks.rule, NGram) else vocabulary(task.tokenizer)

    @cached_property
    def critic(self) -> RewardModel:
        """The critic, which like a reward model gives the last token a number."""
        assert self.critic_source is not None
        task, path = self.task, self.critic_source.path
        model = load_scalar(path, trust_remote_code=task.plan.trust_remote_code)
        model = model.to(task.device).eval()
        precision = task.plan.precision
        return RewardModel(model, task.tokenizer, task.tokenizer, precision=precision)

    def respond(self, prompts: Sequence[Encoded], k: int) -> list[Line]:
        """One response to each prompt, with its score and what it cost."""
        drafts = [Draft(prompt) for prompt in prompts]
        while unfinished := [draft for draft in drafts if not self._finished(draft)]:
            candidates = self._draw(unfinished, k)
            values = self._values(candidates) if k > 1 else [0.0] * len(candidates)
            for i, draft in enumerate(unfinished):
                best = max(range(i * k, i * k + k), key=values.__getitem__)
                draft.tokens, draft.ended = candidates[best].tokens, candidates[best].ended
                draft.num_blocks += 1
        scores = self.task.total_scores(prompts, [draft.tokens for draft in drafts])
        return [
            {
                "key": key_of(draft.prompt.row),
                "prompt": draft.prompt.row.prompt,
                "response": decode(self.task.tokenizer, draft.tokens),
                "score": score,
                "length": len(draft.tokens),
                "ended": draft.ended,
                "num_blocks": draft.num_blocks,
                "num_sampled": draft.num_sampled,
                "response_ids": draft.tokens,
            }
            for draft, score in zip(drafts, scores)
        ]

    def _finished(self, candidate: Draft | BlockCandidate) -> bool:
        return candidate.ended or len(candidate.tokens) >= self.max_new_tokens

    def _draw(self, drafts: list[Draft], k: int) -> list[BlockCandidate]:
        """k candidates for each draft."""
        # The first block has the numbers, and so the seeds, of best-of-n: one block is best-of-n.
        rows = [(draft, draft.num_blocks * k + j) for draft in drafts for j in range(k)]
        begun = [BlockCandidate(d, number, d.tokens, ended=False) for d, number in rows]
        lengths = [self._block_length(draft, k) for draft, _ in rows]
        candidates = self._continue(begun, lengths, [number for _, number in rows])
        if self.vocabulary is None or k == 1:
            return candidates
        cuts = self._cuts([c.tokens for c in candidates], [len(c.tokens) for c in begun])
        return [
            replace(c, tokens=c.tokens[:cut], ended=c.ended and cut == len(c.tokens))
            for c, cut in zip(candidates, cuts)
        ]

    def _block_length(self, draft: Draft, k: int) -> int:
        """New tokens to sample. With k = 1 nothing is decided, so the response is drawn whole."""
        left = self.max_new_tokens - len(draft.tokens)
        if k == 1:
            return left
        if isinstance(self.blocks.rule, NGram):
            return int(min(self.blocks.rule.n, left))
        return min(MAX_BLOCK, left)

    def _cuts(self, responses: list[list[int]], begins: list[int]) -> list[int]:
        """Where the first block after each beginning ends."""
        tokens, mask = pad_right(responses, 0)
        seen = Responses(tokens, mask, vocabulary=self.vocabulary)
        starts = segment(self.blocks.rule, seen).starts.tolist()
        return [
            next((t for t in range(begin + 1, len(tokens)) if row[t]), len(tokens))
            for tokens, begin, row in zip(responses, begins, starts)
        ]

    def _continue(
        self, begun: list[BlockCandidate], lengths: Sequence[int], numbers: Sequence[int]
    ) -> list[BlockCandidate]:
        """Continue each response by at most so many tokens."""
        continued = list(begun)
        for length in sorted(set(lengths)):
            chosen = [i for i, each in enumerate(lengths) if each == length]
            prompts = [begun[i].draft.prompt for i in chosen]
            tokens = [begun[i].tokens for i in chosen]
            rollout = self.task.sample(prompts, [numbers[i] for i in chosen], tokens, length)
            for i, new, ended in zip(chosen, rollout.responses, rollout.ended.tolist()):
                begun[i].draft.num_sampled += len(new)
                continued[i] = replace(begun[i], tokens=[*begun[i].tokens, *new], ended=ended)
        return continued

    def _values(self, candidates: list[BlockCandidate]) -> list[float]:
        """Finished responses by their reward, others by the value function."""
        if self.blocks.value == "reward":
            return self._rewards(candidates)
        estimate = self._critic_values if self.blocks.value == "critic" else self._continued_values
        finished = iter(self._rewards([c for c in candidates if self._finished(c)]))
        others = iter(estimate([c for c in candidates if not self._finished(c)]))
        return [next(finished if self._finished(c) else others) for c in candidates]

    def _rewards(self, candidates: list[BlockCandidate]) -> list[float]:
        prompts = [c.draft.prompt for c in candidates]
        return self.task.total_scores(prompts, [c.tokens for c in candidates]) if prompts else []

    def _critic_values(self, candidates: list[BlockCandidate]) -> list[float]:
        """The critic's value of the state after the last token."""
        if not candidates:
            return []
        assert self.critic_source is not None
        prompts = [c.draft.prompt.prompt_ids for c in candidates]
        values = self.critic(prompts, [c.tokens for c in candidates])
        return (values * self.critic_source.deviation + self.critic_source.mean).tolist()

    def _continued_values(self, candidates: list[BlockCandidate]) -> list[float]:
        """The mean reward of several continuations of each candidate to the end."""
        count = self.blocks.continuations
        repeated = [c for c in candidates for _ in range(count)]
        lengths = [self.max_new_tokens - len(c.tokens) for c in repeated]
        # Negative, so that no candidate has the same number, and the same in any batch.
        numbers = [-1 - c.number * count - i for c in candidates for i in range(count)]
        scores = self._rewards(self._continue(repeated, lengths, numbers))
        return [mean(scores[i : i + count]) for i in range(0, len(scores), count)]


def write_responses(results: Sequence[BlockLines], file: Path) -> tuple[int, int, int]:
    """Write the responses of the k that scores highest as data for `marlhf sft`.

    Returns k, the rows written and the rows left out.
    """
    best = max(results, key=lambda each: mean([line["score"] for line in each.lines]))
    kept, left = write_ended(file, [(line, line, {}) for line in best.lines])
    return best.k, kept, left
