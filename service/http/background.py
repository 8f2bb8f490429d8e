"""Requests that wait behind those of customers: the header that says so, and how many of them there may be.

A console that redraws at every move of a slider must not slow customers down. The batcher searches for such requests while it has nothing
else to do; here is the limit of how many run and wait. Knows headers and turns. Does not know queries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from espalier.errors import InvalidInput
from service.errors import DeadlinePassed, QueueFull

HEADER = "Espalier-Priority"
BACKGROUND = b"background"
RUNNING, WAITING = 2, 16
"""Background requests of one worker that are answered at a time, and that wait for their turn."""


def is_background(priority: bytes | None) -> bool:
    """Whether the value of the header says so; None: there is no such header. Raises InvalidInput for any other value."""
    if priority is None:
        return False
    if priority != BACKGROUND:
        raise InvalidInput(HEADER, priority.decode("latin-1"), "`background`, or no such header")
    return True


class Turns:
    """The turns of one worker. clock: in seconds; deadlines are points of it."""

    def __init__(self, running: int = RUNNING, waiting: int = WAITING, clock: Callable[[], float] = time.perf_counter) -> None:
        self._free, self._most_waiting, self._clock = asyncio.Semaphore(running), waiting, clock
        self._waiting = 0

    @asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """Wait for a turn, in the order of arrival, and have it. Raises QueueFull, DeadlinePassed."""
        if self._free.locked() and self._waiting >= self._most_waiting:
            raise QueueFull(f"{self._waiting} background requests wait already.", retry_after_s=1)
        self._waiting += 1
        try:
            async with asyncio.timeout(max(deadline - self._clock(), 0)):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlinePassed("The deadline passed before the search began.") from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()
