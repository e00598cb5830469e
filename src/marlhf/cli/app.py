"""What the commands share: the application, common arguments, and how errors are printed."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import typer.core

from marlhf.errors import MarlhfError


class FullHelpGroup(typer.core.TyperGroup):
    """List commands with their whole first sentence, which click would cut at the line's end."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="marlhf",
    cls=FullHelpGroup,
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
    str | None, typer.Option("--stage", help="Which stage, if the recipe has several.")
]

Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature (default: the run's).")
]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="Most tokens per response (default: the run's).")
]
Source = Annotated[
    str | None, typer.Option(help="Use another data source: tldr, hh, cnn_dailymail, mbpp, ...")
]
DataPath = Annotated[str | None, typer.Option(help="Use the rows of another file or folder.")]
Split = Annotated[str | None, typer.Option(help="Use all rows of a split, such as test.")]
Like = Annotated[str | None, typer.Option(help="Take missing settings from this run.")]
EnvironmentName = Annotated[
    str | None,
    typer.Option("--environment", help="Play prompts in it, or none (default: the run's)."),
]
SampleSeed = Annotated[int, typer.Option(help="Sampling seed.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run Python code that RUN names or that comes with models."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]

RANK_DELAY = 2.0
"""Seconds that ranks other than 0 wait before they print an error."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command with status 130.

    Not KeyboardInterrupt itself: where that passes through code that an import runs by `exec`,
    such as a dataclass, `python -m` remembers it and ends by SIGINT whatever status we give.
    """


class MultiValueCommand(typer.core.TyperCommand):
    """Lets repeatable options take several values at once: `--n 4 8 16`."""

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
    # transformers imports these wherever they are installed, and they list the kernels they lack.
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
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

    typer.secho(f"report: {write_report(runs, output)}", bold=True, err=True)


def options_for(context: typer.Context, call: Callable[..., Any], **instead: Any) -> dict[str, Any]:
    """The options of a command that a function, or a config, has under the same names.

    Options without a value are left out: the function's own default counts.
    """
    given = context.params
    names = inspect.signature(call).parameters
    return {name: given[name] for name in names if given.get(name) is not None} | instead


def read_segmenter(words: str, option: str) -> Any:
    """The rule in an option such as `--segmenter 'ngram n=3'`."""
    from marlhf.config.build import build_segmenter
    from marlhf.config.candidates import parse_rule

    name, settings = parse_rule(words, f"{option} 'ngram n=3'")
    return build_segmenter({"type": name, **settings})
