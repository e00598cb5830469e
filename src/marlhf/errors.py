"""The base of every error that marlhf raises about what a user gave it.

Each subclass also has a parent from the standard library, so `except ValueError` works as well.
The command line prints these as a sentence; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import reprlib
from typing import ClassVar

MAX_VALUE = 200
"""Characters of a value that a message quotes."""


class MarlhfError(Exception):
    """Says what is wrong, where, and what to do about it."""

    exit_status: ClassVar[int] = 1
    """What the command line exits with."""


class UnknownNameError(MarlhfError, TypeError):
    """A setting or an argument that does not exist, with the nearest that does."""


class SettingError(MarlhfError, ValueError):
    """A value that a config or a function does not take."""


def quoted(value: object) -> str:
    """A user's value as a message shows it: cut, since a few lines of YAML can hold gigabytes.

    >>> quoted("8"), quoted(list(range(9)))
    ("'8'", '[0, 1, 2, 3, 4, 5, ...]')
    """
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 4, MAX_VALUE, MAX_VALUE
    return short.repr(value)
