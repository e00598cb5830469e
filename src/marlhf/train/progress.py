"""Progress: a bar with an ETA on a terminal; elsewhere a line now and then, to keep logs short."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Under torchrun only rank 0 prints, from the first line on. A cluster may set RANK alone.
_rank, _world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
console = Console(stderr=True, highlight=False, quiet=_world_size != "1" and _rank != "0")

LINES_PER_RUN = 10
SECONDS_BETWEEN_LINES = 30.0
"""Without a terminal, a line is due after this share of the steps or this time."""


class Steps:
    """`with Steps("ppo", total, done) as steps: steps.advance(step, {...})`."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self._start, self._first = time.perf_counter(), done
        self._printed_step, self._printed_at = done, self._start
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal and not console.quiet:
            bar = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=console,
            )
            self._task = bar.add_task(name, total=total, completed=done, numbers="")
            self._bar = bar

    def __enter__(self) -> Steps:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int, numbers: dict[str, float]) -> None:
        self.done = step
        text = format_numbers(numbers)
        if self._bar:
            self._bar.update(self._task, completed=step, numbers=text)
        elif not console.quiet and self._line_is_due(step):
            self._printed_step, self._printed_at = step, time.perf_counter()
            each = (self._printed_at - self._start) / max(1, step - self._first)
            left = time.strftime("%H:%M:%S", time.gmtime(each * (self.total - step)))
            line = f"{self.name} {step}/{self.total}  eta {left}  {text}"
            print(line, file=sys.stderr, flush=True)

    def _line_is_due(self, step: int) -> bool:
        """After the first step, every tenth of the run, and where steps take long."""
        if step == self._first + 1:
            return True
        if step * LINES_PER_RUN // self.total > self._printed_step * LINES_PER_RUN // self.total:
            return True
        return time.perf_counter() - self._printed_at >= SECONDS_BETWEEN_LINES


def say(message: str, style: str = "") -> None:
    """A line above the bar."""
    console.print(message, style=style or None, markup=False, soft_wrap=True)


def warn(message: str) -> None:
    say(f"warning: {message}", style="yellow")


def format_numbers(numbers: Mapping[str, float]) -> str:
    """Metrics by their last name: `rl/kl` is kl."""
    return "  ".join(f"{name.rpartition('/')[2]} {x:.4g}" for name, x in numbers.items())
