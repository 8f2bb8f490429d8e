"""How a request waits for the engine: refused where there is no room, patiently, or behind all others.

A console that redraws at every move of a slider must not slow customers down: its requests say so in a header, and few of them run at a
time. Knows headers and turns. Does not know queries or engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto

from espalier.errors import InvalidInput

from ..errors import DeadlinePassed, QueueFull

HEADER = "Espalier-Priority"
BACKGROUND = b"background"
RUNNING, WAITING = 2, 16
"""Background requests of one worker that are answered at a time, and that wait for their turn."""
TOO_LATE = "The deadline passed before the search began."


class Priority(Enum):
    """How the queries of a request wait for an engine that is busy.

    NORMAL      in the order of arrival; refused where there is no room in the queue
    PATIENT     the same, but they wait for room
    BACKGROUND  until the engine has nothing else to do; then it takes a millisecond's worth of them, or one, so that others hardly wait for
                them. They count as no load, and whoever sends them limits how many there are
    """

    NORMAL = auto()
    PATIENT = auto()
    BACKGROUND = auto()


def priority_of(header: bytes) -> Priority:
    """What the value of the header says. Raises InvalidInput for any other value."""
    if header != BACKGROUND:
        raise InvalidInput(HEADER, header.decode("latin-1"), "`background`, or no such header")
    return Priority.BACKGROUND


class Turns:
    """The turns of what one worker does a few at a time.

    noun              of several of them, for messages
    running, waiting  how many have their turn at a time, and how many wait for it
    clock             in seconds; deadlines are points of it
    """

    def __init__(self, noun: str, running: int, waiting: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._noun, self._free, self._most_waiting, self.clock = noun, asyncio.Semaphore(running), waiting, clock
        self._waiting = 0

    async def enter(self, deadline: float) -> None:
        """Wait for a turn, in the order of arrival; `leave` ends it. Raises QueueFull, DeadlinePassed."""
        if self._free.locked() and self._waiting >= self._most_waiting:
            raise QueueFull(f"{self._waiting} {self._noun} wait already.", retry_after_s=1)
        self._waiting += 1
        try:
            async with asyncio.timeout(max(deadline - self.clock(), 0)):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlinePassed(f"The deadline passed while other {self._noun} ran.") from None
        finally:
            self._waiting -= 1

    def leave(self) -> None:
        self._free.release()
