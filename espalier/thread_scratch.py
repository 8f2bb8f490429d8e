"""Arrays that compiled code writes into while it works. Every thread has its own, so any number of threads may search with one engine.

A call finds them as they were made and leaves them so: all 0, or all −1. Knows nothing of what is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadScratch(Generic[T]):
    """The arrays of each thread, made when it first needs them.

    make  a size → arrays that are large enough for it, as a call must find them
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make, self._own = make, threading.local()

    @contextmanager
    def of(self, size: int = 0) -> Iterator[T]:
        """This thread's arrays, large enough for `size`: made for the next power of two, so that they seldom have to grow.

        Where the block raises, they are not used again: what it wrote would be in the next answer.
        """
        held: tuple[int, T] | None = getattr(self._own, "held", None)
        self._own.held = None
        if held is None or held[0] < size:
            room = 1 << (size - 1).bit_length() if size > 0 else 0
            held = room, self._make(room)
        yield held[1]
        self._own.held = held
