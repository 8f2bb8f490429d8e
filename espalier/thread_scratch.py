"""Scratch arrays of compiled code. Every thread has its own, so any number of threads may search with one engine.

A call gets the arrays as `make` made them, all 0 or all −1, and must leave them so. Knows nothing of their content.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadScratch(Generic[T]):
    """The arrays of each thread, made when it first needs them.

    make  size → new arrays for this size
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make, self._thread = make, threading.local()

    @contextmanager
    def of(self, size: int = 0) -> Iterator[T]:
        """This thread's arrays, large enough for `size`: made for the next power of two, so that they seldom have to grow.

        If the block raises, the arrays are dropped: its numbers would get into the next answer.
        """
        room, arrays = getattr(self._thread, "scratch", None) or (-1, None)
        self._thread.scratch = None
        if arrays is None or room < size:
            room = 1 << (size - 1).bit_length() if size > 0 else 0
            arrays = self._make(room)
        yield arrays
        self._thread.scratch = room, arrays
