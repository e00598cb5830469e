"""Fused GPU operations over tensors, each beside the plain function that defines it.

The plain form runs on CPUs, and tests compare the two. Nothing here knows a model or an engine.
Below are whether fused kernels can run, and the log-prob of one token per row of logits.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

from torch import Tensor


@cache
def has_triton() -> bool:
    """Torch installs Triton only where there may be a GPU."""
    return importlib.util.find_spec("triton") is not None


def fused(x: Tensor) -> bool:
    """Whether there are fused kernels for the device of this tensor."""
    return x.is_cuda and has_triton()


fused_pick: Any = None
if has_triton():
    from marlhf.kernels.triton_sampling import pick as fused_pick


def pick(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of tokens, float32, in one pass over logits: [N, V], [N] -> [N]."""
    if fused(logits):
        return fused_pick(logits, tokens)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return chosen.float() - logits.float().logsumexp(dim=1)
