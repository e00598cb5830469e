"""Advantages and returns over macro actions from what an engine has at hand, and their settings.

Pure functions: no engine is imported here, and nothing is kept between calls but the text of the
vocabulary. The settings have the names that recipes use.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from marlhf.config.build import build, make_segmenter, raise_problems
from marlhf.core import (
    NGram,
    Responses,
    Segmenter,
    Segments,
    Vocabulary,
    boundary_gae,
    macro_gae,
    moments,
    needs,
    whiten,
)
from marlhf.core.segmenters import mix
from marlhf.errors import MarlhfError
from marlhf.fields import check_settings, setting
from marlhf.spans import vocabulary
from marlhf.spans.apply import Parsing, apply_segmenter, open_parsing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The same as in marlhf.core; spelled out, so that the engine's log shows what may be written.
Sigma = Literal["equal", "unit", "position", "start"]
Pooling = Literal["sum", "mean"]


class EngineError(MarlhfError, ValueError):
    """An engine's configuration that cannot work with macro actions, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class MacroSettings:
    """How responses become macro actions, and how these are credited.

    gamma and lambda are not here: every engine has settings of its own for them.

    >>> MacroSettings(sigma="start").segmenter
    NGram(n=5)
    """

    segmenter: Segmenter = field(default_factory=NGram)
    """Where macro actions start: `ngram`, or `{type: ngram, n: 5}`; the types of recipes."""
    sigma: Sigma = "start"
    """How a macro action's value weighs its tokens' values."""
    pooling: Pooling = "sum"
    """Macro reward as a sum of token rewards (the paper's equation) or a mean."""
    rho: float = setting(1.0, least=0, most=1)
    """Discount of rewards inside a macro action."""
    whiten: Literal["tokens", "macros", "none"] = "tokens"
    """Scale advantages to mean 0 and deviation 1 over the batch, counting tokens or actions."""
    value_level: Literal["token", "macro"] = "token"
    """What the critic learns: each token's value, or that of the macro action."""
    credit: Literal["macro", "boundary"] = "macro"
    """`macro`: one advantage per macro action. `boundary`: GAE over tokens that bootstraps at the
    ends of macro actions only."""
    lam_value: float | None = setting(None, least=0, most=1)
    """Lambda of the returns that the critic learns from; the engine's lambda unless given."""

    def __post_init__(self) -> None:
        check_settings(self)
        by_token = {"value_level": "token", "pooling": "sum", "rho": 1.0}
        for name, needed in by_token.items():
            if self.credit == "boundary" and getattr(self, name) != needed:
                raise EngineError(
                    f"credit: boundary credits tokens, so {name} must be {needed}; got "
                    f"{getattr(self, name)}."
                )


def read_settings(raw: Mapping[str, Any] | None, where: str) -> MacroSettings:
    """Settings from plain data; all mistakes at once, under the name `where` they were given.

    >>> read_settings({"segmenter": {"type": "ngram", "n": 3}}, "algorithm.macro").segmenter
    NGram(n=3)
    >>> read_settings({"pooling": "sum", "sigmaa": "start"}, "algorithm.macro")
    Traceback (most recent call last):
    marlhf.config.recipe_files.ConfigError: 1 mistake
      algorithm.macro.sigmaa: unknown name 'sigmaa'. Did you mean sigma?
    """
    problems: list[str] = []
    settings = build(MacroSettings, dict(raw or {}), where, problems)
    if not problems:
        settings = make_segmenter(settings, f"{where}.segmenter", problems)
    raise_problems(problems)
    return settings


def needs_reference(segmenter: Segmenter) -> bool:
    """Whether a segmenter reads the log-probs of the reference model."""
    return needs(segmenter, "ref_logprobs")


def needs_logprobs(segmenter: Segmenter) -> bool:
    """Whether a segmenter reads the log-probs of the policy that sampled."""
    return needs(segmenter, "logprobs")


def needs_text(segmenter: Segmenter) -> bool:
    """Whether a segmenter reads the text of tokens, so that a tokenizer is needed."""
    return needs(segmenter, "vocabulary") or needs(segmenter, "spans")


@dataclass(frozen=True)
class EngineBatch:
    """Responses as an engine stores them. What an engine cannot see is None."""

    rewards: Tensor  # [B, T], of tokens, any KL penalty included
    mask: Tensor  # [B, T], not 0 on tokens that the policy wrote
    values: Tensor | None = None  # [B, T], of the state before each token
    tokens: Tensor | None = None  # [B, T] int64
    ref_logprobs: Tensor | None = None  # [B, T], of the reference
    logprobs: Tensor | None = None  # [B, T], of the policy that sampled


class TokenText:
    """What segmenters need of a tokenizer: tables over the vocabulary, and a parser."""

    vocabulary: Vocabulary | None = None
    parsing: Parsing | None = None

    def __init__(self, segmenter: Segmenter, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None or not needs_text(segmenter):
            return
        self.parsing = open_parsing(segmenter, tokenizer)
        if self.parsing is None:
            self.vocabulary = vocabulary(tokenizer, len(tokenizer))

    def tables(self, tokens: Tensor) -> Vocabulary | None:
        """The tables, long enough for every token: models may embed more than tokenizers have."""
        if self.vocabulary is None:
            return None
        most = int(tokens.max()) + 1 if tokens.numel() else 0
        missing = max(0, most - len(self.vocabulary.begins_word))
        tables = {name: table for name, table in vars(self.vocabulary).items() if table is not None}
        tables = {name: pad(table, (0, missing)) for name, table in tables.items()}
        self.vocabulary = Vocabulary(**tables)
        return Vocabulary(**{name: table.to(tokens.device) for name, table in tables.items()})

    def spans(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Constituents of each response, [B, S, 2], parsed now."""
        if self.parsing is None:
            return None
        lengths = [max(keep.nonzero().flatten().tolist(), default=-1) + 1 for keep in mask]
        rows = [row[:length].tolist() for row, length in zip(tokens, lengths)]
        return self.parsing.begin(rows)().to(mask.device)


def macro_advantages(
    batch: EngineBatch,
    settings: MacroSettings,
    *,
    gamma: float,
    lam: float,
    text: TokenText | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages, whitened as the settings say, and returns: both [B, T].

    >>> from marlhf.core import NGram
    >>> ones = torch.ones(1, 4)
    >>> batch = EngineBatch(rewards=ones, mask=ones, values=torch.zeros(1, 4))
    >>> advantages, returns = macro_advantages(
    ...     batch, MacroSettings(segmenter=NGram(2), whiten="none"), gamma=1.0, lam=1.0)
    >>> returns
    tensor([[4., 4., 2., 2.]])
    """
    return credit_segments(batch, segment_batch(batch, settings, text), settings, gamma, lam)


@torch.no_grad()
def segment_batch(
    batch: EngineBatch, settings: MacroSettings, text: TokenText | None = None
) -> Segments:
    """The macro actions of a batch, or a sentence about what the segmenter lacks."""
    rule, mask = settings.segmenter, batch.mask.bool()
    if needs_reference(rule) and batch.ref_logprobs is None:
        raise EngineError(
            f"{rule} reads the reference model's log-probs, and this batch has none. Let the "
            "engine compute them (a KL penalty in the reward or the loss does), or choose another "
            "segmenter."
        )
    if needs_logprobs(rule) and batch.logprobs is None:
        raise EngineError(
            f"{rule} reads the log-probs of the policy that sampled, and this batch has none. "
            "Choose another segmenter."
        )
    if needs_text(rule) and (batch.tokens is None or text is None):
        raise EngineError(
            f"{rule} reads the text of the tokens, and this engine shows the estimator none. "
            "Choose ngram, random, perplexity, surprise or turns."
        )
    tokens = torch.zeros_like(mask, dtype=torch.int64) if batch.tokens is None else batch.tokens
    tokens = torch.where(mask, tokens.long(), 0) if text is None else tokens.long()
    responses = Responses(
        tokens,
        mask,
        ref_logprobs=batch.ref_logprobs,
        spans=None if text is None else text.spans(tokens, mask),
        vocabulary=None if text is None else text.tables(tokens),
        seeds=_row_seeds(tokens, mask),
        logprobs=batch.logprobs,
    )
    return apply_segmenter(rule, responses)


@torch.no_grad()
def credit_segments(
    batch: EngineBatch, segments: Segments, settings: MacroSettings, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of macro actions that are known already: both [B, T]."""
    if batch.values is None:
        raise EngineError(
            "Advantages over macro actions need a critic, and this batch has no values. Give the "
            "engine a critic, as for its own GAE."
        )
    estimate = boundary_gae
    if settings.credit == "macro":
        pooled = {"rho": settings.rho, "sigma": settings.sigma, "pooling": settings.pooling}
        estimate = functools.partial(macro_gae, **pooled)
    discounts = {"gamma": gamma, "lam": lam, "lam_value": settings.lam_value}
    advantages, returns = estimate(batch.rewards, batch.values, segments, **discounts)
    if settings.whiten == "none":
        return advantages, returns
    stats = None
    if settings.whiten == "macros":
        stats = moments(segments.first(advantages), segments.macro_mask)
    return whiten(advantages, segments.mask, stats=stats), returns


def segment_metrics(segments: Segments) -> dict[str, float]:
    """Numbers about the macro actions of a batch, for the engine's log."""
    lengths = segments.lengths[segments.macro_mask].float()
    if not len(lengths):
        return {"macro/actions": 0.0}
    return {
        "macro/actions": float(len(lengths)),
        "macro/actions_per_response": len(lengths) / len(segments.mask),
        "macro/tokens_per_action": lengths.mean().item(),
        "macro/longest_action": lengths.max().item(),
    }


def _row_seeds(tokens: Tensor, mask: Tensor) -> Tensor:
    """A seed per response that depends on its tokens alone, [B] int64.

    Engines keep no generator of ours in their checkpoints. So a run that resumes draws the same
    random n-grams, on any rank and in any order of rows.
    """
    position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mix(torch.where(mask, mix((tokens + 1) * position), 0).sum(dim=1))
