"""Samples responses from a model, and scores them.

A response depends on its prompt, its number, the seed and the weights alone: neither order nor
interruptions change any, and models of one tokenizer are sampled with the same random numbers.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from marlhf.data import (
    Encoded,
    Row,
    decode,
    fit_prompts,
    load_data,
    token_budget_batches,
)
from marlhf.data.rows import prompt_key
from marlhf.data.toy import gold_score
from marlhf.evaluate.eval_plan import EvaluationError, EvaluationPlan, PolicySource, is_function
from marlhf.models.base import Model, Tokenizer, autocast
from marlhf.models.forward import token_stats
from marlhf.models.load import (
    check_vocabulary,
    end_tokens,
    has_same_tokenizer,
    is_scalar,
    load_policy,
    load_scalar,
    load_tokenizer,
)
from marlhf.models.sequences import Sequences
from marlhf.reward import RewardFunction, RewardModel, import_function
from marlhf.rollout.engine import Rollout
from marlhf.rollout.native import NativeEngine
from marlhf.runs.digests import weights_digest

TOKENS = 1 << 15
"""Padded tokens in a forward pass."""

GOLD = "marlhf.data.toy:gold_score"
"""The offline task's true score."""


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
    rows = _rows(plan, part)
    rows = list({prompt_key(row): row for row in reversed(rows)}.values())[::-1]
    if not rows:
        raise EvaluationError(
            f"{policy.folder} holds out no prompts (data.eval_size is {plan.data.eval_size}). "
            "Name other data with --path FILE: all its prompts are used."
        )
    fitting, _ = fit_prompts(rows, tokenizer, plan.data.max_prompt_tokens, plan.data.too_long)
    return fitting[:count]


def _rows(plan: EvaluationPlan, part: str) -> list[Row]:
    loaded = load_data(plan.data, part)
    return loaded.train if plan.all_rows or plan.train else loaded.eval


def key_of(row: Row) -> str:
    """A prompt's short name in files."""
    return hashlib.sha256(prompt_key(row).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def seed_of(key: str, number: int, seed: int) -> int:
    """The seed of a prompt's response number `number`."""
    digest = hashlib.sha256(f"{seed} {key} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class ResponseSampler:
    """A policy, loaded to generate responses."""

    def __init__(
        self, policy: PolicySource, plan: EvaluationPlan, tokenizer: Tokenizer, device: torch.device
    ):
        self.plan, self.tokenizer, self.device = plan, tokenizer, device
        remote = plan.trust_remote_code
        self.model = load_policy(policy.model, trust_remote_code=remote).to(device).eval()
        check_vocabulary(self.model, tokenizer, policy.model)
        ends, pad = end_tokens(self.model, tokenizer), tokenizer.pad_token_id
        self.engine = NativeEngine(self.model, ends, pad, precision=plan.precision)

    def sample(self, prompts: Sequence[Encoded], seeds: Sequence[int]) -> Rollout:
        """A response to each prompt."""
        length = self.plan.sampling.max_new_tokens
        return self.continue_from([(prompt, []) for prompt in prompts], length, seeds)

    def continue_from(
        self, rows: Sequence[tuple[Encoded, list[int]]], length: int, seeds: Sequence[int]
    ) -> Rollout:
        """At most `length` new tokens after each prompt and the beginning of its response."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(len(prompt.prompt_ids) + len(tokens) for prompt, tokens in rows) + length
        if limit is not None and longest > limit:
            raise EvaluationError(
                f"Prompt and response take up to {longest} tokens, but the model has {limit} "
                f"positions. Lower --max-new-tokens, which is {self.plan.sampling.max_new_tokens}."
            )
        texts = [[*prompt.prompt_ids, *tokens] for prompt, tokens in rows]
        sampling = replace(self.plan.sampling, max_new_tokens=length)
        return self.engine.generate(texts, sampling, seeds)


def load_reference(
    policy: PolicySource, plan: EvaluationPlan, tokenizer: Tokenizer, device: torch.device
) -> Model | None:
    """The model that KL is measured to; None where it is the policy itself, or there is none."""
    path = plan.reference
    if path is None or weights_digest(path) == weights_digest(policy.model):
        return None
    remote = plan.trust_remote_code
    if not has_same_tokenizer(path, tokenizer, trust_remote_code=remote):
        raise EvaluationError(
            f"The tokenizer of the reference {path} is not that of {policy.model}, so there is no "
            "KL between them. Give another --reference, or --reference none."
        )
    model = load_policy(path, seed=plan.reference_seed, trust_remote_code=remote)
    return model.requires_grad_(False).to(device).eval()


@torch.no_grad()
def kl_to(
    reference: Model,
    prompts: Sequence[Encoded],
    rollout: Rollout,
    plan: EvaluationPlan,
    pad_id: int,
) -> list[float]:
    """Log-prob of each response under the policy minus that under the reference, in nats."""
    device = reference.device
    whole = Sequences.from_lists([p.prompt_ids for p in prompts], rollout.responses, pad_id, device)
    theirs = torch.zeros(len(prompts), device=device)
    for rows in token_budget_batches(whole.total_lengths, TOKENS):
        with autocast(device, plan.precision):
            stats = token_stats(reference, whole.rows(rows), plan.sampling.scale)
        theirs[torch.tensor(rows, device=device)] = stats.logprobs.sum(dim=1)
    return (rollout.logprobs.to(device).sum(dim=1) - theirs).tolist()


def find_rewards(plan: EvaluationPlan) -> list[RewardSource]:
    """The plan's rewards under short names; the true score too, which the offline task knows."""
    weights = {path.rstrip("/"): weight for path, weight in plan.rewards}
    parts = {path: path.removesuffix("/model").split("/") for path in weights}
    rewards: list[RewardSource] = []
    for path, weight in weights.items():
        # The last folder's name, with as many before it as tell it from the others.
        sizes = range(1, len(parts[path]) + 1)
        tails = {n: [each[-n:] for each in parts.values()] for n in sizes}
        size = next((n for n in sizes if tails[n].count(parts[path][-n:]) == 1), sizes[-1])
        name = "/".join(parts[path][-size:])
        _check_scores(path, plan)
        rewards.append(RewardSource(name, path, _digest(path), weight))
    if plan.data.source == "toy":
        taken = any(reward.name == "gold" for reward in rewards)
        rewards.append(RewardSource("gold (true)" if taken else "gold", GOLD, "toy", 0.0))
    return rewards


def _check_scores(path: str, plan: EvaluationPlan) -> None:
    """A language model has no scalar head, and a random one would score at random."""
    if is_function(path) or plan.random_reward_head:
        return
    if not is_scalar(path, trust_remote_code=plan.trust_remote_code):
        raise EvaluationError(
            f"{path} is a language model without a scalar head, so its scores would come from "
            "random weights. Name a reward model with --reward PATH; `marlhf reward` trains one."
        )


def _digest(path: str) -> str:
    if not is_function(path):
        return weights_digest(path)
    function = import_function(path)
    function = function.func if isinstance(function, partial) else function
    try:  # an edited function is another reward
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]
    except (TypeError, OSError):
        return path


class RewardModelCache:
    """Scores responses; a reward model is loaded at its first use and kept for the next policy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loaded: dict[str, tuple[Model, Tokenizer]] = {}

    def score(
        self,
        reward: RewardSource,
        plan: EvaluationPlan,
        tokenizer: Tokenizer,
        prompts: Sequence[Encoded],
        responses: Sequence[Sequence[int]],
    ) -> list[float | None]:
        """One number per response; None where a function returns none."""
        rows, ids = [p.row for p in prompts], [p.prompt_ids for p in prompts]
        if reward.path == GOLD:
            texts = [decode(tokenizer, response) for response in responses]
            return [gold_score(str(row.prompt), text) for row, text in zip(rows, texts)]
        if is_function(reward.path):
            scores = RewardFunction(import_function(reward.path), tokenizer)(ids, responses, rows)
            return [None if math.isnan(x) else x for x in scores.tolist()]
        model, own = self._reward_model(reward.path, plan)
        scorer = RewardModel(model, own, tokenizer, token_budget=TOKENS, precision=plan.precision)
        return _finite(scorer(ids, responses), reward)

    def _reward_model(self, path: str, plan: EvaluationPlan) -> tuple[Model, Tokenizer]:
        if path not in self.loaded:
            remote = plan.trust_remote_code
            model: Any = load_scalar(path, trust_remote_code=remote)
            own = load_tokenizer(path, trust_remote_code=remote)
            self.loaded[path] = model.to(self.device).eval(), own
        return self.loaded[path]


def _finite(scores: Tensor, reward: RewardSource) -> list[float | None]:
    if not bool(scores.isfinite().all()):
        raise EvaluationError(
            f"The reward model {reward.path} gave a score that is not a number. Its weights are "
            "damaged, or its training diverged; take another."
        )
    return list(scores.tolist())
