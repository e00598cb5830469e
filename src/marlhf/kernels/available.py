"""Whether fused kernels can run."""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor


@cache
def has_triton() -> bool:
    """Torch installs Triton only where there may be a GPU."""
    return importlib.util.find_spec("triton") is not None


def fused(x: Tensor) -> bool:
    """Whether there are fused kernels for the device of this tensor."""
    return x.is_cuda and has_triton()
