"""Python's garbage collector, off until a command has taken its first step.

Importing torch and transformers and tracing layers makes more than half a million objects, nearly
all of which stay. Searching them for garbage, again and again as they become more, takes a fifth of
the time to the first step of a small run.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_paused = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing in here before `resume_collector`; nothing changes where it was off."""
    global _paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _paused = True
    try:
        yield
    finally:
        resume_collector()


def keep_imported() -> None:
    """What a paused collector finds here is never searched again.

    Called before a stage loads its models: these have cycles of references, and go with the stage.
    """
    if _paused:
        gc.freeze()


def resume_collector() -> None:
    """Collect from here on."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()
