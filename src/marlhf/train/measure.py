"""Numbers about a step: tensors to the host in one go, and where the time went."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from marlhf.core import masked_mean


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """How much of the returns the critic foresaw: 1 all of it, 0 no better than their mean."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    return 1 - variance(returns - values) / variance(returns).clamp(min=1e-8)


def to_numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    """To the host in one go: each `float()` would wait for the device once."""
    device = next(iter(metrics.values())).device
    values = torch.stack([v.detach().float().to(device) for v in metrics.values()]).tolist()
    return dict(zip(metrics, values))


class Clock:
    """Seconds of each phase of a step. Waits for the device only where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: dict[str, float] = {}
        self._last = self._start = time.perf_counter()

    def mark(self, phase: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.phases[f"time/{phase}"], self._last = now - self._last, now

    def times(self, rows: int) -> dict[str, Any]:
        whole = time.perf_counter() - self._start
        return self.phases | {"time/step": whole, "time/samples_per_second": rows / whole}
