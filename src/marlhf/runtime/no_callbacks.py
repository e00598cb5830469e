"""Stands in for `Callbacks` in a run without any.

`callbacks.py` needs transformers' trainer, which imports peft, bitsandbytes and torch's compiler
wherever they are installed: a fifth of the time that a command takes to start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NoCallbacks:
    should_stop = should_save = should_evaluate = False

    def train_begin(self, step: int = 0) -> None: ...

    def step_begin(self, step: int) -> None: ...

    def step_end(self, step: int) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluate(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def save(self, step: int) -> None: ...

    def train_end(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...
