"""The log-prob of one token per row of logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from marlhf.kernels.available import fused, has_triton

triton_logprobs: Any = None
if has_triton():
    from marlhf.kernels import triton_logprobs


def pick(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of tokens, float32, in one pass over logits: [N, V], [N] -> [N]."""
    if fused(logits):
        return triton_logprobs.pick(logits, tokens)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return chosen.float() - logits.float().logsumexp(dim=1)
