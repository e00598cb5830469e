"""The base of every error that marlhf raises about what a user gave it.

Each subclass also has a parent from the standard library, so `except ValueError` works as well.
The command line prints these as a sentence; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class MarlhfError(Exception):
    """Says what is wrong, where, and what to do about it."""

    exit_status: ClassVar[int] = 1
    """What the command line exits with."""


class UnknownNameError(MarlhfError, TypeError):
    """A setting or an argument that does not exist, with the nearest that does."""


class SettingError(MarlhfError, ValueError):
    """A value that a config or a function does not take."""
