"""Samples responses from a model, and scores them.

A response depends on its prompt, its number, the seed and the weights alone: neither order nor
interruptions change any, and models of one tokenizer are sampled with the same random numbers.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from marlhf.config.user_code import import_named
from marlhf.data import Encoded, Row, decode, fit_prompts, load_data, token_budget_batches
from marlhf.data.collate import TokenRows
from marlhf.data.rows import prompt_key
from marlhf.data.toy import gold_score
from marlhf.environments import (
    ChatTokens,
    Conversations,
    EpisodeRecord,
    find_environment,
    scored_row,
)
from marlhf.evaluate.eval_plan import (
    EvaluationError,
    EvaluationOptions,
    EvaluationPlan,
    PolicySource,
    is_function,
    is_user_environment,
)
from marlhf.models.base import Model, Tokenizer, autocast, pick_device
from marlhf.models.facts import model_facts, same_tokenizer
from marlhf.models.forward import token_stats
from marlhf.models.load import (
    check_vocabulary,
    end_tokens,
    load_policy,
    load_scalar,
    load_tokenizer,
)
from marlhf.models.sequences import Sequences
from marlhf.reward import RewardFunction, RewardModel, import_function
from marlhf.rollout.engine import Rollout
from marlhf.rollout.native import NativeEngine
from marlhf.runs.atomic import Line, append_jsonl, read_keyed, write_jsonl
from marlhf.runs.evaluations import SamplingSettings
from marlhf.runs.layout import digest_of, weights_digest

TOKENS = 1 << 15
"""Padded tokens in a forward pass."""

GOLD = "marlhf.data.toy:gold_score"
"""The offline task's true score."""
ENVIRONMENT = "environment"
"""The rewards that an environment gives, summed over an episode."""


@dataclass(frozen=True)
class RewardSource:
    """What scores responses; `digest` changes with its weights or its source code."""

    name: str
    path: str
    digest: str
    weight: float = 1.0


def load_prompts(
    policy: PolicySource, plan: EvaluationPlan, tokenizer: Tokenizer, count: int
) -> list[Encoded]:
    """The first prompts that fit, each once: held-out ones unless other data was named."""
    part = plan.part if plan.part in plan.data.parts else next(iter(plan.data.parts), "ppo")
    loaded = load_data(plan.data, part)
    rows = loaded.train if plan.all_rows or plan.train else loaded.eval
    rows = list({prompt_key(row): row for row in reversed(rows)}.values())[::-1]
    if not rows:
        raise EvaluationError(
            f"{policy.folder} holds out no prompts (data.eval_size is {plan.data.eval_size}). "
            "Name other data with --path FILE: all its prompts are used."
        )
    fitting, _ = fit_prompts(rows, tokenizer, plan.data.max_prompt_tokens, plan.data.too_long)
    return fitting[:count]


def key_of(row: Row) -> str:
    """A prompt's short name in files."""
    return hashlib.sha256(prompt_key(row).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def seed_of(key: str, number: int, seed: int) -> int:
    """The seed of a prompt's response number `number`."""
    digest = hashlib.sha256(f"{seed} {key} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Answers:
    """Responses, and their prompts as rewards and the reference see them."""

    prompts: Sequence[Encoded]
    rollout: Rollout
    episodes: Sequence[EpisodeRecord | None]
    """None for single responses."""


def as_played(prompt: Encoded, ids: list[int], record: EpisodeRecord) -> Encoded:
    """The prompt of a conversation: what the model saw first, and a row with what followed."""
    return Encoded(scored_row(prompt.row, record), ids)


@dataclass
class SamplingTask:
    """A policy, the prompts it answers, and what scores its responses.

    Models are loaded when they are first needed: where all is known already, none is.
    """

    policy: PolicySource
    plan: EvaluationPlan
    options: EvaluationOptions
    fallback: PolicySource | None = None
    reward_models: dict[str, tuple[Model, Tokenizer]] = field(default_factory=dict)
    """Those loaded so far, by path; policies that are evaluated together share them."""

    def __post_init__(self) -> None:
        self.seed, self.device = self.options.seed, pick_device(self.options.device)
        remote = self.plan.trust_remote_code
        self.tokenizer = load_tokenizer(self.policy.model, trust_remote_code=remote)
        self.prompts = load_prompts(self.policy, self.plan, self.tokenizer, self.options.prompts)
        if self.conversations is not None:
            self.conversations.check(self.prompts[0].row)
        if (path := self._other_model) is not None:
            own = load_tokenizer(path, trust_remote_code=remote)
            if not same_tokenizer(own, self.tokenizer):
                raise EvaluationError(
                    f"The tokenizer of the reference {path} is not that of {self.policy.model}, so "
                    "there is no KL between them. Give another --reference, or --reference none."
                )

    @cached_property
    def rewards(self) -> list[RewardSource]:
        return find_rewards(self.plan)

    @cached_property
    def weighted_rewards(self) -> list[RewardSource]:
        """Those that count in `total_scores`."""
        return [reward for reward in self.rewards if reward.weight]

    @cached_property
    def conversations(self) -> Conversations | None:
        """How prompts are played; None where a response is a single turn."""
        plan = self.plan.environment
        if plan is None:
            return None
        make = find_environment(plan.name, **plan.options)
        chat = ChatTokens(self.tokenizer, raw=plan.raw_turns)
        return Conversations(make, chat, plan.max_turns, plan.episode_tokens, plan.timeout)

    @cached_property
    def engine(self) -> NativeEngine:
        model = load_policy(self.policy.model, trust_remote_code=self.plan.trust_remote_code)
        model = model.to(self.device).eval()
        check_vocabulary(model, self.tokenizer, self.policy.model)
        ends, pad = end_tokens(model, self.tokenizer), self.tokenizer.pad_token_id
        return NativeEngine(model, ends, pad, precision=self.plan.precision)

    @cached_property
    def _other_model(self) -> str | None:
        """The reference, where it is not the policy itself."""
        path = self.plan.reference
        same = path is None or weights_digest(path) == weights_digest(self.policy.model)
        return None if same else path

    @cached_property
    def reference(self) -> Model | None:
        """What KL is measured to; None where it is the policy itself, or there is none."""
        if (path := self._other_model) is None:
            return None
        remote = self.plan.trust_remote_code
        model = load_policy(path, seed=self.plan.reference_seed, trust_remote_code=remote)
        return model.requires_grad_(False).to(self.device).eval()

    def setting(self, *more: object) -> str:
        """A short name for all that decides a response, and for whatever `more` adds."""
        plan, data = self.plan, self.plan.data
        which = [weights_digest(self.policy.model), asdict(plan.sampling), self.seed]
        which += [plan.all_rows, plan.train, *more]
        which += [data.source, data.path, data.split, data.max_prompt_tokens, data.too_long]
        if (world := plan.environment) is not None:
            which.append(asdict(world))
            if is_user_environment(world.name):
                which.append(_source_digest(import_named(world.name, to_call=False), world.name))
        return digest_of(which)

    def settings(self, *, with_rewards: bool = False) -> SamplingSettings:
        """What every line says about how it was sampled, and by what the best were chosen."""
        sampling, data = self.plan.sampling, self.plan.data
        words = [Path(data.path or data.source).stem, data.split] if self.plan.all_rows else []
        prompts = "-".join(filter(None, [*words, "train" if self.plan.train else ""]))
        rewards = self.weighted_rewards if with_rewards else []
        names = "+".join(re.sub("[/:]", "_", reward.name) for reward in rewards)
        length, world = sampling.max_new_tokens, self.plan.environment
        where = "" if world is None else re.sub("[/:]", "_", world.name)
        return SamplingSettings(
            sampling.temperature, length, self.seed, prompts, names, environment=where
        )

    def respond(self, prompts: Sequence[Encoded], numbers: Sequence[int]) -> Answers:
        """Response number `numbers[i]` to each prompt; with an environment, a conversation.

        All conversations of a prompt begin in the same state.
        """
        if self.conversations is None:
            return Answers(prompts, self.sample(prompts, numbers), [None] * len(prompts))
        self.check_conversations_fit(self.conversations)
        keys = [key_of(p.row) for p in prompts]
        seeds = [seed_of(key, number, self.seed) for key, number in zip(keys, numbers)]
        starts = [seed_of(key, 0, self.seed) for key in keys]
        rows = [p.row for p in prompts]
        rollout, first, records = self.conversations.play(
            rows, seeds, self.engine, self.plan.sampling, starts
        )
        played = [as_played(p, ids, record) for p, ids, record in zip(prompts, first, records)]
        return Answers(played, rollout, records)

    def check_conversations_fit(self, conversations: Conversations) -> None:
        """Refuse conversations that may be longer than the model's positions."""
        advice = "Set episode_tokens lower in the run, or give --environment none."
        self._check_room(conversations.episode_tokens, "A conversation takes", advice)

    def _check_room(self, longest: int, what: str, advice: str) -> None:
        limit = getattr(self.engine.model.config, "max_position_embeddings", None)
        if limit is not None and longest > limit:
            raise EvaluationError(
                f"{what} up to {longest} tokens, but the model has {limit} positions. {advice}"
            )

    def sample(
        self,
        prompts: Sequence[Encoded],
        numbers: Sequence[int],
        begun: Sequence[list[int]] | None = None,
        length: int | None = None,
    ) -> Rollout:
        """Response number `numbers[i]` to each prompt, at most `length` tokens after `begun`."""
        length = length or self.plan.sampling.max_new_tokens
        texts = [[*p.prompt_ids, *b] for p, b in zip(prompts, begun or [[] for _ in prompts])]
        self._check_room(
            max(map(len, texts)) + length,
            "Prompt and response take",
            f"Lower --max-new-tokens, which is {self.plan.sampling.max_new_tokens}.",
        )
        seeds = [seed_of(key_of(p.row), number, self.seed) for p, number in zip(prompts, numbers)]
        return self.engine.generate(
            texts, replace(self.plan.sampling, max_new_tokens=length), seeds
        )

    @torch.no_grad()
    def kl_to_reference(self, prompts: Sequence[Encoded], rollout: Rollout) -> list[float | None]:
        """Log-prob of each response under the policy minus that under the reference, in nats."""
        if self.reference is None:
            return [None if self.plan.reference is None else 0.0] * len(prompts)
        ids, pad_id = [p.prompt_ids for p in prompts], self.tokenizer.pad_token_id
        whole = Sequences.from_lists(ids, rollout.responses, pad_id, self.device, rollout.sampled)
        theirs = torch.zeros(len(prompts), device=self.device)
        for rows in token_budget_batches(whole.total_lengths, TOKENS):
            with autocast(self.device, self.plan.precision):
                stats = token_stats(self.reference, whole.rows(rows), self.plan.sampling.scale)
            theirs[torch.tensor(rows, device=self.device)] = stats.logprobs.sum(dim=1)
        return (rollout.logprobs.to(self.device).sum(dim=1) - theirs).tolist()

    def scores(
        self,
        reward: RewardSource,
        prompts: Sequence[Encoded],
        responses: TokenRows,
        episodes: Sequence[EpisodeRecord | None] = (),
    ) -> list[float | None]:
        """One number per response; None where a function returns none."""
        if reward.path == ENVIRONMENT:
            return [sum(turn.reward for turn in e.turns) if e else None for e in episodes]
        rows, ids = [p.row for p in prompts], [p.prompt_ids for p in prompts]
        path, tokenizer = reward.path, self.tokenizer
        if path == GOLD:
            texts = [decode(tokenizer, response) for response in responses]
            return [gold_score(str(row.prompt), text) for row, text in zip(rows, texts)]
        if is_function(path):
            scores = RewardFunction(import_function(path), tokenizer)(ids, responses, rows)
            scores = scores if scores.ndim == 1 else scores.sum(dim=1)  # parts of a response
            return [None if math.isnan(x) else x for x in scores.tolist()]
        if path not in self.reward_models:
            remote = self.plan.trust_remote_code
            model = load_scalar(path, trust_remote_code=remote).to(self.device).eval()
            own = load_tokenizer(path, trust_remote_code=remote)
            self.reward_models[path] = model, own
        options: Any = {"precision": self.plan.precision, "combine": self.plan.combine}
        scores = RewardModel(*self.reward_models[path], tokenizer, **options)(ids, responses)
        if not bool(scores.isfinite().all()):
            raise EvaluationError(
                f"The reward model {path} gave a score that is not a number. Its weights are "
                "damaged, or its training diverged; take another."
            )
        return scores.tolist()

    def total_scores(
        self,
        prompts: Sequence[Encoded],
        responses: TokenRows,
        episodes: Sequence[EpisodeRecord | None] = (),
    ) -> list[float]:
        """The weighted sum of all rewards, for each response."""
        totals = [0.0] * len(prompts)
        for reward in self.weighted_rewards:
            scores = self.scores(reward, prompts, responses, episodes)
            totals = [t + reward.weight * (s or 0.0) for t, s in zip(totals, scores)]
        return totals

    def complete_lines(
        self,
        file: Path,
        setting: str,
        settings: SamplingSettings,
        is_complete: Callable[[Line], bool],
        sample: Callable[[Sequence[Encoded], dict[str, Line]], list[Line]],
        *,
        size: int,
        notice: Callable[[str], None],
    ) -> list[Line]:
        """One line per prompt: the complete ones in `file`, and what `sample` makes of the others.

        `sample` gets some prompts and the lines known so far, by key. New lines are kept after
        every `size` prompts: what a stop can cost.
        """
        same, known = {"setting": setting, "sampling": asdict(settings)}, read_keyed(file, setting)
        keys = [key_of(prompt.row) for prompt in self.prompts]
        todo = [key not in known or not is_complete(known[key]) for key in keys]
        left = [prompt for prompt, wanted in zip(self.prompts, todo) if wanted]
        done = len(keys) - len(left)
        notice(f"{done} of {len(keys)} prompts")
        for start in range(0, len(left), size):
            lines = [same | line for line in sample(left[start : start + size], known)]
            known |= {line["key"]: line for line in lines}
            append_jsonl(file, lines)
            notice(f"{done + start + len(lines)} of {len(keys)} prompts")
        if left:
            write_jsonl(file, known.values())
        return [known[key] for key in keys]


def find_rewards(plan: EvaluationPlan) -> list[RewardSource]:
    """The plan's rewards under short names; the true score too, which the offline task knows."""
    weights = {path.rstrip("/"): weight for path, weight in plan.rewards}
    parts = {path: path.removesuffix("/model").split("/") for path in weights}
    rewards: list[RewardSource] = []
    for path, weight in weights.items():
        # The last folder's name, with as many parents as make it unique.
        sizes = range(1, len(parts[path]) + 1)
        tails = {n: [each[-n:] for each in parts.values()] for n in sizes}
        size = next((n for n in sizes if tails[n].count(parts[path][-n:]) == 1), sizes[-1])
        name = "/".join(parts[path][-size:])
        _check_scores(path, plan)
        combined = "" if plan.combine == "mean" else f" {plan.combine}"  # another score
        rewards.append(RewardSource(name, path, _digest(path) + combined, weight))
    if plan.environment is not None:
        settings = json.dumps(asdict(plan.environment), sort_keys=True, default=str)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        rewards.insert(0, RewardSource("environment", ENVIRONMENT, digest, plan.environment.weight))
    elif plan.data.source == "toy":
        taken = any(reward.name == "gold" for reward in rewards)
        rewards.append(RewardSource("gold (true)" if taken else "gold", GOLD, "toy", 0.0))
    return rewards


def _check_scores(path: str, plan: EvaluationPlan) -> None:
    """A language model has no scalar head, and a random one would score at random."""
    if is_function(path) or plan.random_reward_head:
        return
    facts = model_facts(path, trust_remote_code=plan.trust_remote_code)
    if not facts.is_scalar:
        raise EvaluationError(
            f"{path} is a language model without a scalar head, so its scores would come from "
            "random weights. Name a reward model with --reward PATH; `marlhf reward` trains one."
        )
    facts.refuse_process_model()


def _digest(path: str) -> str:
    if not is_function(path):
        return weights_digest(path)
    function = import_function(path)
    return _source_digest(function.func if isinstance(function, partial) else function, path)


def _source_digest(code: Any, name: str) -> str:
    """Of the source: an edited function is another reward, an edited class another environment."""
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:12]
    except (TypeError, OSError):
        return name
