"""What everything about models shares: their types, their errors, devices and precision."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from transformers.utils import logging as hf_logging

from marlhf.config.model import Precision
from marlhf.errors import MarlhfError

Model: TypeAlias = Any
"""A transformers model: its own annotations are too loose to check anything against."""
Tokenizer: TypeAlias = Any
"""A transformers tokenizer, likewise."""


class ModelError(MarlhfError, ValueError):
    """Something about a model or tokenizer that the user has to put right."""


def pick_device(name: str = "auto") -> torch.device:
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            cause = textwrap.shorten(str(error), 120)
            raise ModelError(
                f"There is no device {name!r} here ({cause}). Set `device` to cpu, cuda, cuda:0 "
                "or the like, or to auto."
            ) from error
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """bfloat16 arithmetic on GPUs that support it, float32 elsewhere, unless `precision` is set."""
    enabled = computes_in_bfloat16(device, precision)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def computes_in_bfloat16(device: torch.device, precision: Precision) -> bool:
    auto = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16" or (precision == "auto" and auto)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and notices, which would break up our own output."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
