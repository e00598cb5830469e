"""Progress: a bar with an ETA on a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
import time
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

console = Console(stderr=True, highlight=False)


class Steps:
    """`with Steps("ppo", total, done) as steps: steps.advance(step, {...})`."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self._start, self._first = time.perf_counter(), done
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
        text = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        if self._bar:
            self._bar.update(self._task, completed=step, numbers=text)
        if self._bar or console.quiet:  # quiet: another process tells
            return
        each = (time.perf_counter() - self._start) / max(1, step - self._first)
        left = time.strftime("%H:%M:%S", time.gmtime(each * (self.total - step)))
        print(f"{self.name} {step}/{self.total}  eta {left}  {text}", file=sys.stderr, flush=True)


def say(message: str, style: str = "") -> None:
    """A line above the bar."""
    console.print(message, style=style or None, markup=False, soft_wrap=True)


def warn(message: str) -> None:
    say(f"warning: {message}", style="yellow")


def _short(value: float) -> str:
    return f"{value:.4g}"
