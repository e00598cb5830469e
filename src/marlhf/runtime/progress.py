"""Progress: a bar with an ETA on a terminal; elsewhere a line now and then, to keep logs short."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

# Under torchrun only rank 0 prints, from the first line on. A cluster may set RANK alone.
_rank, _world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
console = Console(stderr=True, highlight=False, quiet=_world_size != "1" and _rank != "0")

LINES_PER_RUN = 10
SECONDS_BETWEEN_LINES = 30.0
"""Without a terminal, a line is due after this share of the steps or this time."""


RECENT_STEPS = 20
"""An ETA is by the pace of so many steps, evaluations between them included."""


class StagesAhead:
    """How long the stages take that `marlhf run` trains after the present one.

    A stage is expected to have the pace of the last one of its method. Without one, or where the
    data decides the number of steps, there is no estimate.

    >>> ahead = StagesAhead()
    >>> ahead.begin("ppo", [("ppo", 40), ("dpo", 10)])
    >>> ahead.seconds(pace=2.0)
    >>> ahead.begin("ppo", [("ppo", 40)])
    >>> ahead.seconds(pace=2.0)
    80.0
    """

    def __init__(self) -> None:
        self.method = ""
        self.stages: list[tuple[str, int | None]] = []
        self.paces: dict[str, float] = {}

    def begin(self, method: str, later: Sequence[tuple[str, int | None]]) -> None:
        """A stage of this method begins; `later` are the method and steps of those after it."""
        self.method, self.stages = method, list(later)

    def seconds(self, pace: float) -> float | None:
        """Of all stages to come; `pace` is the present stage's, in seconds per step."""
        self.paces[self.method] = pace
        total = 0.0
        for method, steps in self.stages:
            if steps is None or method not in self.paces:
                return None
            total += steps * self.paces[method]
        return total


stages_ahead = StagesAhead()


class _TwoLines(Progress):
    """The bar, and below it the numbers of the last batch, which would not fit beside it."""

    numbers = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.numbers:
            yield Text(f"  {self.numbers}", no_wrap=True, overflow="ellipsis")


class Steps:
    """`with Steps("ppo", total, done) as steps: steps.advance(step, {...})`."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self._first = done
        self._printed_step, self._printed_at = done, time.perf_counter()
        self._recent = deque([(done, self._printed_at)], maxlen=RECENT_STEPS + 1)
        self._bar: _TwoLines | None = None
        if console.is_terminal and not console.is_dumb_terminal and not console.quiet:
            bar = _TwoLines(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[eta]}"),
                console=console,
            )
            self._task = bar.add_task(name, total=total, completed=done, eta="")
            self._bar = bar

    def __enter__(self) -> Steps:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bar where it is: what is printed from now on comes below it."""
        if self._bar:
            self._bar.stop()

    def advance(self, step: int, numbers: dict[str, float]) -> None:
        self.done, now = step, time.perf_counter()
        self._recent.append((step, now))
        text = f"batch: {format_numbers(numbers)}" if numbers else ""
        if self._bar:
            self._bar.numbers = text
            self._bar.update(self._task, completed=step, eta=self._eta())
        elif not console.quiet and self._line_is_due(step, now):
            self._printed_step, self._printed_at = step, now
            line = f"{self.name} {step}/{self.total}  {self._eta()}  {text}".rstrip()
            print(line, file=sys.stderr, flush=True)

    def _eta(self) -> str:
        """Of this stage by its recent steps, and of all stages where that is known."""
        (first, since), (last, now) = self._recent[0], self._recent[-1]
        pace = (now - since) / max(1, last - first)
        left, later = pace * (self.total - last), stages_ahead.seconds(pace)
        if last >= self.total:
            return "done"
        eta = f"eta {_clock(left)}"
        return f"{eta}, all stages {_clock(left + later)}" if later else eta

    def _line_is_due(self, step: int, now: float) -> bool:
        """After the first step, every tenth of the run, and where steps take long."""
        if step == self._first + 1:
            return True
        if step * LINES_PER_RUN // self.total > self._printed_step * LINES_PER_RUN // self.total:
            return True
        return now - self._printed_at >= SECONDS_BETWEEN_LINES


def say(message: str, style: str = "", *, wrap: bool = False) -> None:
    """A line above the bar; wrapped between words on request, as paths and commands must not be."""
    soft_wrap = not (wrap and console.is_terminal)
    overflow = None if soft_wrap else "ignore"  # a path that is too long stays whole
    console.print(
        message, style=style or None, markup=False, soft_wrap=soft_wrap, overflow=overflow
    )


def warn(message: str) -> None:
    say(f"warning: {message}", style="yellow", wrap=True)


def format_numbers(numbers: Mapping[str, float]) -> str:
    """Metrics by their last name: `rl/kl` is kl; what is 0 up to rounding is 0."""
    shown = {name: 0.0 if abs(x) < 1e-6 else x for name, x in numbers.items()}
    return "  ".join(f"{name.rpartition('/')[2]} {x:.4g}" for name, x in shown.items())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
