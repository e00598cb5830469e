"""The command line: a thin layer over the functions that do the work.

Nothing heavy is imported until a command needs it, so that `--help` answers at once.
"""

from marlhf.cli import training, evaluate, runs, info  # noqa: F401, I001  in the order of --help
from marlhf.cli.app import app, main

__all__ = ["app", "main"]
