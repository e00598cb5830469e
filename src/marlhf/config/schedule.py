"""How the learning rate moves over a run."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(
    step: int, peak: float, *, total: int, warmup: int, schedule: Schedule
) -> float:
    """The rate of update number `step`, counted from 0: linear warm-up, then the schedule.

    >>> [learning_rate_at(s, 1.0, total=4, warmup=2, schedule="constant") for s in range(3)]
    [0.5, 1.0, 1.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "linear":
        return peak * max(0.0, 1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
