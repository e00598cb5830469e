"""Ctrl-C, SIGTERM and SIGHUP: a run ends between two steps, after it has been saved."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Any

from marlhf.errors import MarlhfError
from marlhf.runtime import progress

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
"""Windows has no SIGHUP, which a terminal sends when it is closed."""


class Stopped(MarlhfError):
    """A signal asked the run to stop, and it has been saved."""

    exit_status = 130


class Interrupts:
    """Notes the first signal, to be checked between steps; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # nohup, or a shell's background job
                continue
            with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self, where: str) -> None:
        """End here, where it is safe to, if a signal came."""
        if self.received:
            raise Stopped(f"Stopped by {self.received}, {where}. The same command resumes it.")

    def _note(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":
            self.received = self.received or name
            _leave_terminal()
            return
        if self.received:
            raise KeyboardInterrupt
        self.received = name
        if not progress.console.quiet:
            # Not by `say`: a handler may run in the middle of another write to the same stream.
            words = "stopping after this step, which is saved. Ctrl-C again stops at once."
            os.write(2, f"\n{name}: {words}\n".encode())


def _leave_terminal() -> None:
    """The terminal is gone: printing to it would fail, and end the run before it is saved."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
