"""Metrics of a step: copied to the host at once, and where the time went."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from marlhf.core import masked_mean


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of returns that values explain: 1 is all, 0 no more than their mean."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    return 1 - variance(returns - values) / variance(returns).clamp(min=1e-8)


def to_numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    """To the host in one go: each `float()` would wait for the device once."""
    device = next(iter(metrics.values())).device
    values = torch.stack([v.detach().float().to(device) for v in metrics.values()]).tolist()
    return dict(zip(metrics, values))


class Clock:
    """Seconds of each phase of a step.

    On a GPU the phases' ends are marked in its own queue and read when the step is over: waiting
    for each would leave the device idle until the host has launched the next.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._names: list[str] = []
        self._marks = [self._now()]
        self._start = time.perf_counter()

    def mark(self, phase: str) -> None:
        """The end of a phase."""
        self._names.append(f"time/{phase}")
        self._marks.append(self._now())

    def times(self, rows: int) -> dict[str, Any]:
        """Seconds of phases and step, once the device is through with it."""
        phases = self.phases
        whole = time.perf_counter() - self._start
        return phases | {"time/step": whole, "time/samples_per_second": rows / whole}

    @property
    def phases(self) -> dict[str, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        pairs = zip(self._names, self._marks, self._marks[1:])
        return {name: self._between(start, end) for name, start, end in pairs}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - start
