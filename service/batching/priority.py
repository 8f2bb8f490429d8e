"""How a request waits for the engine: normally, patiently for room, or behind all other requests.

A console that redraws at every move of a slider must not slow customers down: its requests are marked by a header, and only a few of them
run at a time. Knows headers and turns. Does not know queries or engines.
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
"""Most background requests of one worker that are answered at a time, and that wait for their turn."""
SEARCH_TOO_LATE, ANSWER_TOO_LATE = "The deadline passed before the search began.", "The deadline passed before the answer was there."


class Priority(Enum):
    """How the queries of a request wait for a busy engine.

    NORMAL      in the order of arrival; refused if the queue has no room
    PATIENT     in the order of arrival; they wait for room
    BACKGROUND  until the engine has no other work. It takes a millisecond's worth of them at a time, or one, so that other requests hardly
                wait. They do not count as load; the caller limits their number
    """

    NORMAL = auto()
    PATIENT = auto()
    BACKGROUND = auto()


def priority_of(header: bytes) -> Priority:
    """The priority that the header's value names. Raises InvalidInput for an unknown value."""
    if header != BACKGROUND:
        raise InvalidInput(HEADER, header.decode("latin-1"), "`background`, or no such header")
    return Priority.BACKGROUND


class Turns:
    """Turns for work of which one worker does only a little at a time: a semaphore with a bounded queue.

    noun              plural noun of the work, for messages
    running, waiting  most turns at a time, and most requests that wait for one
    clock             seconds; deadlines are times of this clock
    """

    def __init__(self, noun: str, running: int, waiting: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._noun, self._turns, self._most_waiting, self.clock = noun, asyncio.Semaphore(running), waiting, clock
        self._waiting = 0

    async def enter(self, deadline: float) -> None:
        """Wait for a turn, in the order of arrival. The caller ends it with `leave`. Raises QueueFull, DeadlinePassed."""
        if self._turns.locked() and self._waiting >= self._most_waiting:
            raise QueueFull(f"{self._waiting} {self._noun} wait already.", retry_after_s=1)
        self._waiting += 1
        try:
            async with asyncio.timeout(max(deadline - self.clock(), 0)):
                await self._turns.acquire()
        except TimeoutError:
            raise DeadlinePassed(f"The deadline passed while other {self._noun} ran.") from None
        finally:
            self._waiting -= 1

    def leave(self) -> None:
        self._turns.release()
