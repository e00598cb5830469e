"""How well scores tell pairs of responses apart, and how far they go by length.

Axes: B pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 10


def pair_metrics(
    chosen: Tensor,  # [B], scores
    rejected: Tensor,  # [B]
    lengths: Tensor,  # [2, B], tokens of the chosen and of the rejected responses
    decided: Tensor,  # [B] bool, False for ties
) -> dict[str, float]:
    """Accuracy, also where the shorter response won, calibration, correlation with length.

    What no pair says anything about is left out.
    """
    margins, shorter = (chosen - rejected)[decided], (lengths[0] < lengths[1])[decided]
    metrics = {
        "length_correlation": float(correlation(torch.cat([chosen, rejected]), lengths.flatten()))
    }
    if len(margins):
        metrics["accuracy"] = accuracy(margins)
        metrics["calibration_error"] = calibration_error(margins)
    if bool(shorter.any()):
        metrics["accuracy_short"] = accuracy(margins[shorter])
    return metrics


def accuracy(margins: Tensor) -> float:
    """Share of pairs whose chosen response scores higher; a tie counts half."""
    return float(((margins > 0).float() + 0.5 * (margins == 0).float()).mean())


def calibration_error(margins: Tensor) -> float:
    """The expected calibration error: how far confidence is from accuracy, in ten bins.

    A model is sigmoid(|margin|) sure of the response that it prefers, 0.5 to 1, and right where
    people chose that one. Bins are weighted by their pairs.

    >>> round(calibration_error(torch.tensor([9.0, 9.0, 9.0, -9.0])), 2)  # sure, right in 3 of 4
    0.25
    """
    sure = margins.double().abs().sigmoid()
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    bins = ((sure - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=margins.device)
    return float(gaps.index_add(0, bins, sure - right).abs().sum() / len(margins))


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's, with gradients; 0 where either is constant."""
    x, y = x.float() - x.float().mean(), y.float() - y.float().mean()
    return (x * y).sum() / (x.norm() * y.norm()).clamp(min=1e-8)
