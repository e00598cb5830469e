"""Scalar heads: one number per token, for reward models and critics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def init_scalar_head(head: nn.Linear, seed: int) -> None:
    """Draw the weights of a fresh head, scaled so that scores are about 1.

    The seed alone decides them: torch's global generator is neither read nor moved, so a critic
    is the same whatever was loaded before it.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = 1 / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * scale)


def fresh_scalar_head(hidden_size: int, seed: int) -> nn.Linear:
    head: Any = nn.utils.skip_init(nn.Linear, hidden_size, 1, bias=False)
    init_scalar_head(head, seed)
    return head
