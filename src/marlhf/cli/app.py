"""What the commands share: the application, common arguments, and how errors are printed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import typer.core

from marlhf.cli.lean_imports import keep_compiled_modules, keep_what_transformers_reads
from marlhf.errors import MarlhfError


class WholeHelp(typer.core.TyperGroup):
    """Commands with all of their first sentence, wrapped: click would cut it at the line's end."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(n, c.get_short_help_str(limit=1000)) for n, c in commands if not c.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="marlhf",
    cls=WholeHelp,
    help="Reinforcement learning from human feedback with macro actions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")
]
StageName = Annotated[
    str | None, typer.Option("--stage", help="Which stage, where the recipe has several.")
]

MaxNewTokens = Annotated[int | None, typer.Option(help="The run's unless given.")]
Source = Annotated[str | None, typer.Option(help="Other data: tldr, hh, cnn_dailymail, mbpp, ...")]
DataPath = Annotated[str | None, typer.Option(help="Other data: a file or folder.")]
Split = Annotated[str | None, typer.Option(help="All of a split, such as test.")]
Like = Annotated[str | None, typer.Option(help="A run to take from what RUN lacks.")]
SampleSeed = Annotated[int, typer.Option(help="Of the samples.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run Python code that RUN names or that comes with models."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda ...")]

RANK_DELAY = 2.0
"""Seconds that ranks other than 0 wait before they print an error."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command with status 130.

    Not KeyboardInterrupt itself: where that passes through code that an import runs by `exec`,
    such as a dataclass, `python -m` remembers it and ends by SIGINT whatever status we give.
    """


class Several(typer.core.TyperCommand):
    """A command whose repeatable options also take several values at once: `--n 4 8 16`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {flag for p in self.params if getattr(p, "multiple", False) for flag in p.opts}
        spread: list[str] = []
        flag, has_value = "", False
        for word in args:
            if word.startswith("-") and not word[1:2].isdigit():
                flag, has_value = word if word in several else "", False
            elif flag and has_value:
                spread.append(flag)
            elif flag:
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)


def main() -> None:
    """Run a command; a user's mistake is a sentence and exit status 1, never a traceback."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if _importing(frame):
            os.write(2, b"Stopped.\n")
            os._exit(130)
        raise Interrupted

    # On ARM torch's allocator returns freed memory after 10 ms, and a training step on a CPU then
    # spends a tenth of its time on getting it back. Torch reads this when it is imported.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")
    keep_compiled_modules()
    keep_what_transformers_reads()
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
            signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        app()
    except KeyboardInterrupt:
        fail("Stopped.", 130)
    except Exception as error:
        if asked:  # an import that is interrupted may fail in a way of its own
            fail("Stopped.", 130)
        if os.environ.get("MARLHF_TRACEBACK") or not isinstance(error, MarlhfError):
            raise
        fail(str(error), error.exit_status)


def _importing(frame: FrameType | None) -> bool:
    """Whether an import is under way: an exception inside torch's would abort the process.

    Nothing is lost by ending at once there: runs survive kill -9 at any point.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def main_rank() -> bool:
    """Whether this process prints and writes reports: of several under torchrun, rank 0."""
    return os.environ.get("RANK", "0") == "0"


def tell(words: str, *, bold: bool = False) -> None:
    if main_rank():
        typer.secho(words, bold=bold, err=True)


def fail(message: str, status: int) -> None:
    if not main_rank():
        # Under torchrun most errors are those of all ranks. Rank 0 prints them, and torchrun ends
        # the others at once; what is still here after a while has an error of its own.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(RANK_DELAY)
    if sys.stderr.isatty():
        message = "\n".join(_wrapped(line) for line in message.splitlines())
    typer.secho(message, fg="red", err=True)
    sys.exit(status)


def _wrapped(line: str) -> str:
    """A line broken between words, never inside a path, at the terminal's width."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line,
        shutil.get_terminal_size().columns,
        subsequent_indent=f"{indent}  " if indent else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def write_report_of(runs: list[Path], output: Path) -> None:
    from marlhf.report.write import write_report

    with _explained(output):
        written = write_report(runs, output)
    typer.secho(f"report: {written}", bold=True, err=True)


def watch_report_of(runs: list[Path], output: Path, every: float) -> None:
    from marlhf.report.write import watch_report

    with _explained(output):
        for number, written in enumerate(watch_report(runs, output, every=every)):
            if number == 0:
                typer.secho(f"report: {written}", bold=True, err=True)
                tell(f"Written again every {every:g} s until the runs end. Ctrl-C ends it, too.")
    tell("No run is being trained any more.")


@contextlib.contextmanager
def _explained(output: Path) -> Iterator[None]:
    """Name the file and the remedy where a report cannot be written."""
    from marlhf.runs.layout import RunError
    from marlhf.train.recipe import ConfigError

    try:
        yield
    except RunError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        reason = error.__cause__.strerror
        raise ConfigError(f"Cannot write {output}: {reason}. Give another -o.") from error


def read_segmenter(words: str, option: str) -> Any:
    """The rule in an option such as `--segmenter 'ngram n=3'`."""
    import yaml

    from marlhf.config.build import build_segmenter
    from marlhf.config.recipe_files import ConfigError

    name, *settings = words.split() or [""]
    raw: dict[str, object] = {"type": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"Cannot read {setting!r}. Write {option} 'ngram n=3'.")
        raw[key] = yaml.safe_load(value)
    return build_segmenter(raw)
