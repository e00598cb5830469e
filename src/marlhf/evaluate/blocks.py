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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from marlhf.core import Lines, NGram, Responses, Segmenter, Sentences, Words, segment
from marlhf.data import Encoded, decode, pad_right, token_budget_batches
from marlhf.data.rows import is_blank
from marlhf.evaluate.best_of_n import ROWS, SamplingTask, find_task, total_scores
from marlhf.evaluate.blocks_frontier import BlockLines
from marlhf.evaluate.eval_plan import (
    EvaluationError,
    EvaluationOptions,
    sampling_settings,
    setting_of,
)
from marlhf.evaluate.sampling import TOKENS, ResponseSampler, RewardModelCache, key_of, seed_of
from marlhf.intervals import mean
from marlhf.models.base import Model, autocast, pick_device
from marlhf.models.forward import final_scores
from marlhf.models.load import load_scalar
from marlhf.models.sequences import Sequences
from marlhf.rollout.engine import Rollout
from marlhf.runs.digests import weights_digest
from marlhf.runs.jsonl import Line, append_jsonl, read_keyed, write_jsonl
from marlhf.runs.layout import BLOCKS, CRITIC, is_run, read_score_scale
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

    def check_length(self, max_new_tokens: int) -> None:
        if isinstance(self.rule, NGram) and max_new_tokens < self.rule.n < math.inf:
            raise EvaluationError(
                f"Blocks of {self.rule.n:g} tokens are longer than a response, which has at most "
                f"{max_new_tokens}. Lower n, or raise --max-new-tokens."
            )


def best_of_blocks(
    path: Path | str,
    options: EvaluationOptions,
    blocks: BlockOptions,
    notice: Callable[[str], None] = lambda words: None,
) -> list[BlockLines]:
    """A response to each prompt for each k, decided block by block, and what is known of them."""
    return decide_blocks(find_task(path, options), options, blocks, notice)


def decide_blocks(
    task: SamplingTask,
    options: EvaluationOptions,
    blocks: BlockOptions,
    notice: Callable[[str], None] = lambda words: None,
) -> list[BlockLines]:
    plan = task.plan
    blocks.check_length(plan.sampling.max_new_tokens)
    critic = find_critic(task) if blocks.value == "critic" else None
    settings = sampling_settings(plan, options.seed, task.reward_names)
    decider: BlockDecider | None = None
    results: list[BlockLines] = []
    for k in sorted(set(blocks.ks)):
        setting = setting_of(
            task.policy,
            plan,
            options.seed,
            [(r.digest, r.weight) for r in task.rewards],
            [blocks.label, k, blocks.value, critic and weights_digest(critic.path)],
            blocks.continuations if blocks.value == "monte_carlo" else None,
        )
        way = re.sub(r"[^\w.]+", "_", f"{blocks.label} k{k} {blocks.value}")
        file = task.policy.folder / BLOCKS / f"{way}-{settings.file_name}"
        known = read_keyed(file, setting)
        left = [p for p in task.prompts if key_of(p.row) not in known]
        notice(f"k = {k}: {len(task.prompts) - len(left)} of {len(task.prompts)} prompts")
        if left:
            decider = decider or BlockDecider(task, blocks, critic, options)
            same = {"setting": setting, "sampling": asdict(settings), "k": k}
            same |= {"blocks": blocks.label, "value": blocks.value}
            per_prompt = k * (blocks.continuations if blocks.value == "monte_carlo" else 1)
            size = max(1, ROWS // per_prompt)
            for start in range(0, len(left), size):
                lines = [same | line for line in decider.respond(left[start : start + size], k)]
                known |= {line["key"]: line for line in lines}
                append_jsonl(file, lines)
            write_jsonl(file, known.values())
        lines = [known[key_of(p.row)] for p in task.prompts]
        results.append(BlockLines(blocks.label, blocks.value, k, settings, lines))
    return results


@dataclass(frozen=True)
class CriticSource:
    """Where a critic is, and by what the scores that it predicts were normalised."""

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
                f"The critic of {run} predicts normalised scores, and nothing there says by what. "
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

    draft: int
    number: int  # among all candidates of its prompt
    tokens: list[int]
    ended: bool


class BlockDecider:
    """The policy, the rewards and the value function, loaded."""

    def __init__(
        self,
        task: SamplingTask,
        blocks: BlockOptions,
        critic: CriticSource | None,
        options: EvaluationOptions,
    ) -> None:
        self.task, self.blocks, self.seed = task, blocks, options.seed
        self.reward_models = RewardModelCache(pick_device(options.device))
        device = self.reward_models.device
        self.sampler = ResponseSampler(task.policy, task.plan, task.tokenizer, device)
        self.max_new_tokens = task.plan.sampling.max_new_tokens
        self.vocabulary = None
        if not isinstance(blocks.rule, NGram):
            self.vocabulary = vocabulary(task.tokenizer)
        self.critic: Model | None = None
        self.critic_source = critic
        if critic is not None:
            remote = task.plan.trust_remote_code
            self.critic = load_scalar(critic.path, trust_remote_code=remote).to(device).eval()

    def respond(self, prompts: Sequence[Encoded], k: int) -> list[Line]:
        """One response to each prompt, with its score and what it cost."""
        drafts = [Draft(prompt) for prompt in prompts]
        while unfinished := [i for i, draft in enumerate(drafts) if not self._finished(draft)]:
            candidates = self._draw(drafts, unfinished, k)
            values = self._values(drafts, candidates) if k > 1 else [0.0] * len(candidates)
            best: dict[int, tuple[float, BlockCandidate]] = {}
            for candidate, value in zip(candidates, values):
                if candidate.draft not in best or value > best[candidate.draft][0]:
                    best[candidate.draft] = value, candidate
            for i, (_, candidate) in best.items():
                drafts[i].tokens, drafts[i].ended = candidate.tokens, candidate.ended
                drafts[i].num_blocks += 1
        scores = self._scores(prompts, [draft.tokens for draft in drafts])
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

    def _draw(self, drafts: list[Draft], unfinished: list[int], k: int) -> list[BlockCandidate]:
        """k candidates for each unfinished draft."""
        # The first block has the numbers, and so the seeds, of best-of-n: one block is best-of-n.
        rows = [(i, drafts[i].num_blocks * k + j) for i in unfinished for j in range(k)]
        rollout = self._sample(
            [(drafts[i].prompt, drafts[i].tokens) for i, _ in rows],
            [self._block_length(drafts[i], k) for i, _ in rows],
            [number for _, number in rows],
        )
        candidates: list[BlockCandidate] = []
        for (i, number), new, ended in zip(rows, rollout.responses, rollout.ended.tolist()):
            drafts[i].num_sampled += len(new)
            candidates.append(BlockCandidate(i, number, [*drafts[i].tokens, *new], ended))
        if self.vocabulary is None or k == 1:
            return candidates
        cuts = self._cuts([c.tokens for c in candidates], [len(drafts[i].tokens) for i, _ in rows])
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

    def _sample(
        self,
        rows: Sequence[tuple[Encoded, list[int]]],
        lengths: Sequence[int],
        numbers: Sequence[int],
    ) -> Rollout:
        """Continue each prompt and response by at most so many tokens."""
        seeds = [seed_of(key_of(p.row), number, self.seed) for (p, _), number in zip(rows, numbers)]
        responses: list[list[int]] = [[] for _ in rows]
        ended = torch.zeros(len(rows), dtype=torch.bool)
        for length in sorted(set(lengths)):
            chosen = [i for i, each in enumerate(lengths) if each == length]
            rollout = self.sampler.continue_from(
                [rows[i] for i in chosen], length, [seeds[i] for i in chosen]
            )
            for i, response, end in zip(chosen, rollout.responses, rollout.ended.tolist()):
                responses[i], ended[i] = response, end
        return Rollout(responses, torch.zeros(len(rows), 0), ended)

    def _values(self, drafts: list[Draft], candidates: list[BlockCandidate]) -> list[float]:
        """Finished responses by their reward, others by the value function."""
        if self.blocks.value == "reward":
            chosen = list(range(len(candidates)))
        else:
            chosen = [i for i, c in enumerate(candidates) if self._finished(c)]
        values = [0.0] * len(candidates)
        prompts = [drafts[c.draft].prompt for c in candidates]
        if chosen:
            scores = self._scores(
                [prompts[i] for i in chosen], [candidates[i].tokens for i in chosen]
            )
            for i, score in zip(chosen, scores):
                values[i] = score
        others = sorted(set(range(len(candidates))) - set(chosen))
        if others and self.blocks.value == "critic":
            estimates = self._critic_values([(prompts[i], candidates[i].tokens) for i in others])
        else:
            estimates = self._continued(drafts, [candidates[i] for i in others])
        for i, estimate in zip(others, estimates):
            values[i] = estimate
        return values

    def _scores(
        self, prompts: Sequence[Encoded], responses: Sequence[Sequence[int]]
    ) -> list[float]:
        return total_scores(prompts, responses, self.sampler, self.task.rewards, self.reward_models)

    @torch.no_grad()
    def _critic_values(self, rows: Sequence[tuple[Encoded, list[int]]]) -> list[float]:
        """The critic's value of the state after the last token."""
        assert self.critic is not None
        assert self.critic_source is not None
        device, pad_id = self.reward_models.device, self.task.tokenizer.pad_token_id
        prompts, responses = [p.prompt_ids for p, _ in rows], [tokens for _, tokens in rows]
        sequences = Sequences.from_lists(prompts, responses, pad_id, device)
        values = torch.zeros(len(rows), device=device)
        for batch in token_budget_batches(sequences.total_lengths, TOKENS):
            with autocast(device, self.task.plan.precision):
                part = final_scores(self.critic, sequences.rows(batch))
            values[torch.tensor(batch, device=device)] = part
        return (values * self.critic_source.deviation + self.critic_source.mean).tolist()

    def _continued(self, drafts: list[Draft], candidates: Sequence[BlockCandidate]) -> list[float]:
        """The mean reward of several continuations of each candidate to the end."""
        if not candidates:
            return []
        count = self.blocks.continuations
        repeated = [(c, i) for c in candidates for i in range(count)]
        rows = [(drafts[c.draft].prompt, c.tokens) for c, _ in repeated]
        rollout = self._sample(
            rows,
            [self.max_new_tokens - len(c.tokens) for c, _ in repeated],
            # Negative, so that no candidate has the same number, and the same in any batch.
            [-1 - c.number * count - i for c, i in repeated],
        )
        whole = [tokens + new for (_, tokens), new in zip(rows, rollout.responses)]
        scores = self._scores([prompt for prompt, _ in rows], whole)
        for (c, _), new in zip(repeated, rollout.responses):
            drafts[c.draft].num_sampled += len(new)
        return [mean(scores[i : i + count]) for i in range(0, len(scores), count)]


def write_responses(results: Sequence[BlockLines], file: Path) -> tuple[int, int, int]:
    """Write the responses of the k that scores highest as data for `marlhf sft`.

    Those that were cut off or are empty are left out. Returns k, the rows written and left out.
    """
    best = max(results, key=lambda each: mean([line["score"] for line in each.lines]))
    rows = [
        {"prompt": line["prompt"], "chosen": line["response"], "score": line["score"]}
        for line in best.lines
        if line["ended"] and not is_blank(line["response"])
    ]
    if not rows:
        raise EvaluationError(
            "No response ended by itself, so there is nothing to write. Raise --max-new-tokens."
        )
    write_jsonl(file, rows)
    return best.k, len(rows), len(best.lines) - len(rows)
