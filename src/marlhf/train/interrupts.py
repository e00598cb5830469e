"""Ctrl-C and SIGTERM: a run ends between two steps, after it has been saved."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any

from marlhf.errors import MarlhfError


class Stopped(MarlhfError):
    """The user asked for an end (Ctrl-C, SIGTERM) and the run has been saved."""

    exit_status = 130


class Interrupts:
    """Notes signals, to be checked between steps; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.asked = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self, where: str) -> None:
        """End here, where it is safe to, if a signal came."""
        if self.asked:
            raise Stopped(f"Stopped by {self.asked}, {where}. The same command resumes it.")

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
