"""Token rewards: the penalty for leaving the reference model, and scores where they are earned.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from marlhf.core.masked import check_choice, check_rows, check_tokens, keep, last_token

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator = "k1") -> Tensor:
    """KL from the policy to the reference at each sampled token, by Schulman's three estimators.

    `k1`: log-ratio, unbiased. `k2`: half its square, biased, never negative. `k3`: ratio minus 1
    minus log-ratio, unbiased and never negative.

    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([2.])
    """
    check_choice("kind", kind, ("k1", "k2", "k3"))
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def shape_rewards(
    scores: Tensor,  # [B], earned at the last token, or [B, T], each where it is earned
    logprobs: Tensor,  # [B, T]
    ref_logprobs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    kl_coef: float | Tensor,
    *,
    kl: KLEstimator = "k1",
    score_clip: float | None = None,
) -> Tensor:
    """r_t = -beta * KL_t, plus the score at the last token, or at each token: [B, T].

    `score_clip` bounds a score to plus or minus itself; the authors' code uses 2.5. Tokens that the
    mask leaves out carry no score, so that of an empty response is lost.

    >>> zero, mask = torch.zeros(1, 3), torch.tensor([[True, True, False]])
    >>> shape_rewards(torch.tensor([2.0]), zero + 0.5, zero, mask, kl_coef=0.1)
    tensor([[-0.0500,  1.9500,  0.0000]])
    """
    check_tokens(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    if scores.ndim != 2:
        check_rows(scores=scores)
        scores = at_last_token(scores, mask)
    check_tokens(mask, scores=scores)
    if score_clip is not None:
        scores = scores.clamp(-score_clip, score_clip)
    penalty = kl_estimate(keep(logprobs, mask), keep(ref_logprobs, mask), kl)
    return keep(scores, mask).to(penalty.dtype) - kl_coef * penalty


def at_last_token(
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T] bool
) -> Tensor:
    """Each row's score at its last token, 0 elsewhere: [B, T].

    >>> at_last_token(torch.tensor([2.0]), torch.tensor([[True, True, False]]))
    tensor([[0., 2., 0.]])
    """
    if len(scores) != len(mask):
        raise ValueError(f"scores must have one number per row: {len(mask)}, got {len(scores)}.")
    return torch.where(last_token(mask), scores[:, None], 0.0)


def overlong_penalty(
    lengths: Tensor,  # [B], tokens of each response
    start: float,
    end: float,
    *,
    most: float = 1.0,
) -> Tensor:
    """DAPO's soft punishment: 0 up to `start` tokens, rising to `most` at `end`: [B].

    >>> overlong_penalty(torch.tensor([80, 95, 120]), start=90, end=100)
    tensor([0.0000, 0.5000, 1.0000])
    """
    if not 0 <= start < end:
        raise ValueError(f"start must be at least 0 and less than end; got {start} and {end}.")
    return most * ((lengths - start) / (end - start)).clamp(0, 1)
