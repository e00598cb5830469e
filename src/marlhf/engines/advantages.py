"""Advantages and returns over macro actions from what an engine has at hand.

Pure functions: no engine is imported here, and nothing is kept between calls but the text of the
vocabulary.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from marlhf.core import (
    Responses,
    Segmenter,
    Segments,
    Vocabulary,
    boundary_gae,
    macro_gae,
    moments,
    whiten,
)
from marlhf.core.segmenters import mix
from marlhf.engines.settings import (
    EngineError,
    MacroSettings,
    needs_logprobs,
    needs_reference,
    needs_text,
)
from marlhf.spans import vocabulary
from marlhf.spans.apply import Parsing, apply_segmenter, open_parsing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        known = len(self.vocabulary.begins_word)
        most = int(tokens.max()) + 1 if tokens.numel() else 0
        fields = {name: table for name, table in vars(self.vocabulary).items() if table is not None}
        missing = max(0, most - known)
        if missing:
            fields = {name: pad(table, (0, missing)) for name, table in fields.items()}
            self.vocabulary = Vocabulary(**fields)
        return Vocabulary(**{name: table.to(tokens.device) for name, table in fields.items()})

    def spans(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Constituents of each response, [B, S, 2], parsed now."""
        if self.parsing is None:
            return None
        rows = [row[: _length(keep)].tolist() for row, keep in zip(tokens, mask)]
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
    rewards, values, lam_value = batch.rewards, batch.values, settings.lam_value
    discounts = {"gamma": gamma, "lam": lam}
    if settings.credit == "macro":
        advantages, returns = macro_gae(
            rewards,
            values,
            segments,
            **discounts,
            rho=settings.rho,
            sigma=settings.sigma,
            pooling=settings.pooling,
            lam_value=lam_value,
        )
    else:
        advantages, returns = boundary_gae(
            rewards, values, segments, **discounts, lam_value=lam_value
        )
    return _whitened(advantages, segments, settings), returns


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


def _whitened(advantages: Tensor, segments: Segments, settings: MacroSettings) -> Tensor:
    if settings.whiten == "none":
        return advantages
    stats = None
    if settings.whiten == "macros":
        stats = moments(segments.first(advantages), segments.macro_mask)
    return whiten(advantages, segments.mask, stats=stats)


def _row_seeds(tokens: Tensor, mask: Tensor) -> Tensor:
    """A seed per response that depends on its tokens alone, [B] int64.

    Engines keep no generator of ours in their checkpoints. So a run that resumes draws the same
    random n-grams, on any rank and in any order of rows.
    """
    position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mix(torch.where(mask, mix((tokens + 1) * position), 0).sum(dim=1))


def _length(mask: Tensor) -> int:
    """Tokens up to the last one that counts."""
    counted = mask.nonzero()
    return int(counted[-1]) + 1 if len(counted) else 0
