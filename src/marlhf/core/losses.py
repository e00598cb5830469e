"""Losses. Each is a sum over what counts divided by a count.

The count may be given for the whole batch, over all micro-batches and ranks; their losses and
gradients then add up to exactly the whole batch's. Advantages, old log-probs, old values and
returns are data: no gradient is meant to flow into them.

Axes: B rows, T response tokens, M macro actions.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from marlhf.core.masked import check_choice, check_rows, check_tokens, keep, masked_mean, wide
from marlhf.core.segments import Segments, Sigma

Ratio = Literal["token", "macro", "macro_mean"]
Level = Literal["token", "macro"]


def ppo_policy_loss(
    logprobs: Tensor,  # [B, T]
    old_logprobs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T], constant within a macro action
    mask: Tensor,  # [B, T] bool
    *,
    clip: float | tuple[float, float] = 0.2,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    segments: Segments | None = None,
    num_tokens: Tensor | float | None = None,
) -> Tensor:
    """Clipped PPO: mean of max(-A r, -A clip(r, 1 - low, 1 + high)).

    `clip` is both bounds, or the pair of low and high: a larger high one lets unlikely tokens
    become likelier (DAPO).

    `ratio`: `token` takes each token's own (the paper's listing), a mean over tokens. `macro`
    takes the joint ratio of the macro action, the product over its tokens (the paper's
    equation), `macro_mean` the geometric mean of that; both are a mean over macro actions, and
    `num_tokens` then counts macro actions. `dual_clip` bounds the loss of a negative advantage
    at `-A * dual_clip`, so that one token the policy has all but dropped cannot run away.

    >>> logprobs, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2).bool()
    >>> ppo_policy_loss(logprobs, logprobs, torch.tensor([[1.0, 2.0]]), mask)
    tensor(-1.5000)
    """
    check_tokens(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be larger than 1; got {dual_clip}.")
    change = pool_ratio(keep(logprobs - old_logprobs, mask), ratio, segments).exp()
    advantages = keep(advantages, mask)
    if segments is not None and ratio != "token":
        mask = segments.starts  # one term a macro action, read at its first token
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    loss = torch.maximum(-advantages * change, -advantages * change.clamp(1 - low, 1 + high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return masked_mean(loss, mask, num_tokens)


def importance_weights(
    logprobs: Tensor,  # [B, T], of the policy that learns
    sampled_logprobs: Tensor,  # [B, T], of the policy that sampled
    mask: Tensor,  # [B, T] bool
    *,
    cap: float,
    ratio: Ratio = "token",
    segments: Segments | None = None,
) -> Tensor:
    """Truncated importance weights of samples that another policy drew: min(p / p_sampled, cap).

    Multiplied into the advantages they weigh each term of `ppo_policy_loss`, so `ratio` is as
    there: the weight of a token, or that of its macro action (joint, or the geometric mean). They
    are data: no gradient flows through them. [B, T], 0 where the mask is.

    >>> sampled, mask = torch.tensor([[0.5, 0.1]]).log(), torch.ones(1, 2).bool()
    >>> importance_weights(torch.tensor([[0.4, 0.9]]).log(), sampled, mask, cap=2.0)
    tensor([[0.8000, 2.0000]])
    """
    check_tokens(mask, logprobs=logprobs, sampled_logprobs=sampled_logprobs)
    if not cap > 0:
        raise ValueError(f"cap must be positive; got {cap}.")
    log_weight = keep(logprobs.detach() - sampled_logprobs.detach(), mask)
    log_weight = pool_ratio(log_weight, ratio, segments)
    # Truncated before the exponential, which could overflow for a long macro action.
    return keep(log_weight.clamp(max=math.log(cap)).exp().clamp(max=cap), mask)


def pool_ratio(log_ratio: Tensor, ratio: Ratio, segments: Segments | None) -> Tensor:
    """The log-ratio that counts for each token, [B, T]: its own, or that of its macro action."""
    check_choice("ratio", ratio, get_args(Ratio))
    if ratio == "token":
        return log_ratio
    segments = _need(segments, f"ratio={ratio!r}")
    return segments.spread((segments.sum if ratio == "macro" else segments.mean)(log_ratio))


def ppo_value_loss(
    values: Tensor,  # [B, T]
    old_values: Tensor,  # [B, T]
    returns: Tensor,  # [B, T], constant within a macro action
    mask: Tensor,  # [B, T] bool
    *,
    clip: float | None = 0.2,
    level: Level = "token",
    sigma: Sigma = "equal",
    segments: Segments | None = None,
    num_tokens: Tensor | float | None = None,
) -> Tensor:
    """Half the squared error, the worse of the value and the value clipped to the old one.

    `level="token"` regresses every token's value on its macro action's return (the paper's
    listing), `"macro"` the value of the macro action, by `sigma` (the paper's Algorithm 1);
    `num_tokens` then counts macro actions.

    >>> values, mask = torch.tensor([[1.0, 1.0]]), torch.ones(1, 2).bool()
    >>> ppo_value_loss(values, values, values + 2, mask)
    tensor(2.)
    """
    check_tokens(mask, values=values, old_values=old_values, returns=returns)
    check_choice("level", level, ("token", "macro"))
    values, old_values, returns = keep(values, mask), keep(old_values, mask), keep(returns, mask)
    if level == "macro":
        segments = _need(segments, "level='macro'")
        values = segments.spread(segments.weighted(values, sigma))
        old_values = segments.spread(segments.weighted(old_values, sigma))
        mask = segments.starts
    error = (values - returns).square()
    if clip is not None:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        error = torch.maximum(error, (near - returns).square())
    return masked_mean(error, mask, num_tokens) / 2


def dpo_loss(
    chosen_logprobs: Tensor,  # [B], summed over each response
    rejected_logprobs: Tensor,  # [B]
    ref_chosen_logprobs: Tensor,  # [B]
    ref_rejected_logprobs: Tensor,  # [B]
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    num_pairs: Tensor | float | None = None,
) -> Tensor:
    """Direct preference optimisation: -log sigmoid(beta * (chosen - rejected log-ratio)).

    `label_smoothing` is the share of labels believed to be flipped (conservative DPO).

    >>> zero = torch.zeros(1)
    >>> dpo_loss(zero, zero, zero, zero)  # log 2
    tensor(0.6931)
    """
    check_rows(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    margin = (chosen_logprobs - ref_chosen_logprobs) - (rejected_logprobs - ref_rejected_logprobs)
    logits = beta * wide(margin)
    loss = -logsigmoid(logits) * (1 - label_smoothing) - logsigmoid(-logits) * label_smoothing
    return _mean(loss, num_pairs)


def reward_loss(
    chosen: Tensor,  # [B]
    rejected: Tensor,  # [B]
    *,
    margin: Tensor | float = 0.0,
    label_smoothing: Tensor | float = 0.0,
    center_coef: float = 0.0,
    num_pairs: Tensor | float | None = None,
) -> Tensor:
    """Bradley-Terry: -log sigmoid(chosen - rejected - margin).

    `label_smoothing` is the probability that the label is the wrong way round: one for all pairs,
    or one for each, where 0.5 is a tie. `center_coef` adds the squared sum of the two scores, so
    that scores stay around zero, which the loss itself leaves free.

    >>> reward_loss(torch.tensor([0.0]), torch.tensor([0.0]))  # log 2
    tensor(0.6931)
    """
    check_rows(chosen=chosen, rejected=rejected)
    chosen, rejected = wide(chosen), wide(rejected)
    logits = chosen - rejected - margin
    loss = -logsigmoid(logits) * (1 - label_smoothing) - logsigmoid(-logits) * label_smoothing
    if center_coef:
        loss = loss + center_coef * (chosen + rejected).square()
    return _mean(loss, num_pairs)


def sft_loss(
    logprobs: Tensor,  # [B, T], of the target tokens
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    num_tokens: Tensor | float | None = None,
) -> Tensor:
    """Mean negative log-likelihood of the response tokens.

    >>> sft_loss(torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[True, True, False]]))
    tensor(2.)
    """
    return -masked_mean(logprobs, mask, num_tokens)


def _need(segments: Segments | None, option: str) -> Segments:
    if segments is None:
        raise ValueError(f"{option} works on macro actions: pass `segments=` as well.")
    return segments


def _mean(loss: Tensor, count: Tensor | float | None) -> Tensor:
    return loss.sum() / (max(len(loss), 1) if count is None else count)
