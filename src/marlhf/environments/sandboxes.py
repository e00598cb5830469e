"""Sandboxes for many episodes at once: each borrows one for a moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from marlhf.reward.code import processors_per_rank

T = TypeVar("T")


class Shared(Generic[T]):
    """As many objects as there are processors, each made when it is first needed.

    A fork of this process makes its own: it cannot use its parent's sandboxes.

    >>> lists = Shared(list)
    >>> with lists.borrow() as borrowed:
    ...     borrowed
    []
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self._owner, self._idle = os.getpid(), list[T]()
        self._slots = threading.Semaphore(processors_per_rank())

    @contextmanager
    def borrow(self) -> Iterator[T]:
        """An object for this thread alone, once there is one."""
        if self._owner != os.getpid():
            self._begin()
        with self._slots:
            try:
                one = self._idle.pop()
            except IndexError:
                one = self._make()
            try:
                yield one
            finally:
                self._idle.append(one)
