"""Models, functions and rows that a trainer was given in Python, in place of names in a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from marlhf.data import Row
from marlhf.environments import Environment
from marlhf.models.base import Model, Tokenizer


@dataclass(frozen=True)
class GivenObjects:
    """An object takes precedence over the config; where it is None, the config says."""

    model: Model | None = None
    tokenizer: Tokenizer | None = None
    ref_model: Model | None = None
    critic_model: Model | None = None
    reward_funcs: Sequence[str | Model | Callable[..., Any]] | None = None
    reward_tokenizers: Sequence[Tokenizer | None] | None = None
    environment: Callable[[], Environment] | None = None
    judge: Any = None
    train_rows: list[Row] | None = None
    eval_rows: list[Row] | None = None
    peft_config: Any = None
    callbacks: Sequence[Any] = ()


NO_OBJECTS = GivenObjects()
"""Everything from the config, as on the command line."""
