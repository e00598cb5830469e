"""Imports that processes of tests share, without what they have no use for: 1.5 s for each."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock

from marlhf.cli.lean_imports import keep_what_transformers_reads, skip_unused_packages

keep_what_transformers_reads()
skip_unused_packages()

import torch  # noqa: E402


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return function or (lambda other: other)


# bitsandbytes, which peft imports, compiles functions: torch would import its compiler for them.
with mock.patch.object(torch, "compile", _as_it_is), contextlib.suppress(ImportError):
    importlib.import_module("bitsandbytes")
